"""Datasets as people have them, and the prompts of each period."""

import json
import subprocess
import sys

import datasets
import pytest
from transformers import AutoTokenizer

from prl_notebook.config import GRPO
from prl_notebook.engine.seeds import completion_seeds, derive_seed
from prl_notebook.tasks.datasets import PromptSource, load_dataset
from prl_notebook.tasks.tiny import tiny_model_path

ROWS = [{"prompt": f"{i}+1=", "answer": i + 1, "level": {"terms": 2}} for i in range(10)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model_path())


def grpo(prompts=4, **fields):
    return GRPO(**{"prompts_per_period": prompts, "max_completion_length": 256, **fields})


# ---- sources


def test_every_kind_of_source_gives_the_same_rows(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    for source in (ROWS, tuple(ROWS), dataset, tmp_path / "rows.parquet", str(tmp_path / "rows.jsonl")):
        assert load_dataset(source) == ROWS


def test_jsonl_may_hold_unicode_line_separators(tmp_path):
    row = {"prompt": "a\u2028b\x85c"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_dataset(tmp_path / "rows.jsonl") == [row]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("someone/maths", ("someone/maths", "train")), ("someone/maths:test[:5]", ("someone/maths", "test[:5]"))],
)
def test_hub_name_goes_to_the_datasets_library_with_its_split(monkeypatch, name, expected):
    asked = []

    def load(path, split):
        asked.append((path, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)  # no hub can be reached from the tests
    assert load_dataset(name) == ROWS
    assert asked == [expected]


def test_sources_that_cannot_be_used_say_why(tmp_path):
    stream = datasets.IterableDataset.from_generator(lambda: iter(ROWS))
    with pytest.raises(ValueError, match=r"IterableDataset, which cannot be indexed.*Dataset\.from_list"):
        load_dataset(stream)
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS)})
    with pytest.raises(ValueError, match=r"keys 'train', 'test'; pass one split, e\.g\. dataset\['train'\]"):
        load_dataset(splits)
    with pytest.raises(ValueError, match="dataset row 1 is a str, not a dict with a column 'prompt'"):
        load_dataset([ROWS[0], "1+1="])
    with pytest.raises(FileNotFoundError, match=r"dataset file 'nowhere\.jsonl' does not exist"):
        load_dataset("nowhere.jsonl")
    (tmp_path / "rows.csv").write_text("prompt\n")
    with pytest.raises(ValueError, match=r"rows\.csv' must be a \.jsonl or \.parquet file"):
        load_dataset(tmp_path / "rows.csv")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt":\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: not JSON"):
        load_dataset(tmp_path / "bad.jsonl")
    (tmp_path / "list.jsonl").write_text('["a"]\n')
    with pytest.raises(ValueError, match=r"list\.jsonl, line 1: a list, not a JSON object"):
        load_dataset(tmp_path / "list.jsonl")


# ---- prompts of a period


def test_messages_get_the_chat_template_and_strings_are_tokenised_plainly(tokenizer):
    messages = [{"role": "user", "content": "1+1="}]
    source = PromptSource([{"prompt": messages}, {"prompt": "1+1="}], tokenizer, grpo(2, shuffle_dataset=False))
    chat, plain = source.batch(0)
    assert tokenizer.decode(chat.ids) == "<|user|>1+1=<|end|><|assistant|>"
    assert chat.prompt == messages
    assert tokenizer.decode(plain.ids) == plain.prompt == "1+1="


def test_other_columns_reach_the_rewards_and_reserved_ones_do_not(tokenizer):
    rows = [{**row, "completion": "x", "completion_ids": [1]} for row in ROWS]
    prompt = PromptSource(rows, tokenizer, grpo(shuffle_dataset=False)).batch(1)[0]
    assert prompt.index == 4
    assert prompt.columns == {"answer": 5, "level": {"terms": 2}}


def test_a_period_is_a_pure_function_of_seed_and_period(tokenizer):
    one, other = (PromptSource(ROWS, tokenizer, grpo(seed=7)) for _ in range(2))
    forward = [one.batch(period) for period in range(6)]
    backward = [other.batch(period) for period in reversed(range(6))]
    assert forward == backward[::-1]  # a resumed run asks for period k first
    assert forward[3] == PromptSource(ROWS, tokenizer, grpo(seed=7)).batch(3)
    assert forward != [PromptSource(ROWS, tokenizer, grpo(seed=8)).batch(period) for period in range(6)]


def test_every_row_comes_once_per_epoch_also_where_periods_do_not_divide_it(tokenizer):
    source = PromptSource(ROWS, tokenizer, grpo(4))
    visited = [prompt.index for period in range(5) for prompt in source.batch(period)]
    first, second = visited[:10], visited[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    unshuffled = PromptSource(ROWS, tokenizer, grpo(4, shuffle_dataset=False))
    assert [prompt.index for period in range(5) for prompt in unshuffled.batch(period)] == [*range(10), *range(10)]


def test_order_of_rows_is_pinned(tokenizer):
    """Another order would break the resuming of old runs; the sort key must not depend on library versions."""
    source = PromptSource(ROWS, tokenizer, grpo(10, seed=42))
    assert [prompt.index for prompt in source.batch(0)] == PINNED_ORDER


PINNED_ORDER = [1, 9, 6, 2, 7, 0, 3, 8, 5, 4]


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([], {}, "the dataset is empty"),
        (ROWS, {"prompts": 11}, "the dataset has 10 rows, fewer than prompts_per_period=11"),
        ([{"question": "1", "answer": 2}], {}, "row 0 has no column 'prompt'; its columns are question, answer"),
        ([{"prompt": 3}], {}, "row 0: 'prompt' must be a string or a list of .* messages, got int"),
        ([{"prompt": ["hello"]}], {}, "row 0: 'prompt' must be a string or a list of .* messages, got list"),
        ([{"prompt": "1"}, {"prompt": ""}], {}, "row 1: the prompt has no tokens"),
        (
            [{"prompt": "1"}, {"prompt": "1234"}],
            {"max_prompt_length": 3},
            "row 1: the prompt has 4 tokens, more than max_prompt_length=3; prompts are never cut",
        ),
        (
            [{"prompt": "1234"}],
            {"max_completion_length": 297},
            "row 0: a prompt of 4 tokens and max_completion_length=297 exceed the model's context of 300 tokens",
        ),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused_at_once(tokenizer, rows, fields, message):
    with pytest.raises(ValueError, match=message):
        PromptSource(rows, tokenizer, grpo(**{"prompts": max(1, len(rows)), **fields}), context_length=300)


def test_limits_are_inclusive(tokenizer):
    fields = {"max_prompt_length": 4, "max_completion_length": 296}
    assert len(PromptSource([{"prompt": "1234"}], tokenizer, grpo(1, **fields), context_length=300)) == 1


def test_messages_need_a_chat_template():
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    tokenizer.chat_template = None
    rows = [{"prompt": "1"}, {"prompt": [{"role": "user", "content": "1"}]}]
    with pytest.raises(
        ValueError, match="row 1: the prompt is a list of messages, but the tokenizer has no chat template"
    ):
        PromptSource(rows, tokenizer, grpo(2))


def test_the_module_does_without_torch():
    code = "import sys; import prl_notebook.tasks, prl_notebook.tasks.reward_process; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- seeds


def test_seeds_are_63_bit_distinct_and_pinned():
    seeds = [s for period in range(3) for group in range(4) for s in completion_seeds(42, period, group, 8)]
    assert len(set(seeds)) == 3 * 4 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert completion_seeds(42, 0, 1, 8)[:2] == completion_seeds(42, 0, 1, 2)  # K does not change a sample's seed
    assert completion_seeds(42, 11, 1, 1) != completion_seeds(42, 1, 11, 1)
    assert derive_seed("completion", 42, 0, 0, 0) == PINNED_SEED  # runs are resumed by later versions


PINNED_SEED = 8833766390763859016
