"""Reward functions of every kind TRL users bring, called for one group."""

import functools
import subprocess
import sys

import cloudpickle
import numpy as np
import pytest
import torch

from prl_notebook.engine.types import Completion, Group, Prompt
from prl_notebook.tasks.make_tiny import build_tokenizer
from prl_notebook.tasks.reward_process import RewardRole, pickle_functions
from prl_notebook.tasks.rewards import (
    RewardError,
    RewardSet,
    TrainerState,
    check_functions,
    function_names,
    load_decode,
)
from prl_notebook.tasks.tiny import tiny_model_path

TOKENIZER = build_tokenizer()
TEXTS = ["1", "22", "333"]
STATE = TrainerState(global_step=5, period=5)


def make_group(texts=TEXTS):
    completions = [
        Completion(np.array(TOKENIZER(text)["input_ids"], np.int32), np.zeros(len(text), np.float32), "stop")
        for text in texts
    ]
    return Group(period=5, group=0, version=5, prompt_ids=(1,), completions=completions)


def prompt(conversational=False, **columns):
    text = [{"role": "user", "content": "hi"}] if conversational else "hi"
    return Prompt(index=0, ids=(1,), prompt=text, columns=columns)


def score(*functions, weights=None, texts=TEXTS, on=None, skip_special_tokens=True):
    decode = load_decode(tiny_model_path(), skip_special_tokens)
    rewards = RewardSet(functions, weights, decode)
    try:
        return rewards.score(make_group(texts), on or prompt(), STATE)
    finally:
        rewards.close()


def by_length(completions, **_):
    return [float(len(text)) for text in completions]


async def by_length_async(completions):
    return [float(len(text)) for text in completions]


class ByLength:
    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, completions):
        return [self.factor * len(text) for text in completions]

    def method(self, completions, **kwargs):
        return self(completions)


class ByLengthAsync:
    async def __call__(self, completions):
        return [float(len(text)) for text in completions]


def scaled(completions, factor):
    return [factor * len(text) for text in completions]


def defined_in_a_cell():
    """A function whose module cannot be imported elsewhere and which closes over a notebook's variable."""
    namespace = {"__name__": "__main__"}
    exec(
        "factor = 1.0\ndef reward(completions, **kwargs):\n    return [factor * len(c) for c in completions]", namespace
    )
    return namespace["reward"]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (by_length, "by_length"),
        (by_length_async, "by_length_async"),
        (lambda completions: [len(text) for text in completions], "lambda"),
        (functools.partial(scaled, factor=1), "scaled"),
        (functools.partial(by_length_async), "by_length_async"),
        (functools.partial(ByLength()), "ByLength"),
        (ByLength(), "ByLength"),
        (ByLength().method, "method"),
        (ByLengthAsync(), "ByLengthAsync"),
        (lambda completions: np.array([len(text) for text in completions]), "lambda"),
        (lambda completions: torch.tensor([float(len(text)) for text in completions]), "lambda"),
        (lambda completions: (len(text) for text in completions), "lambda"),
        (defined_in_a_cell(), "reward"),
    ],
)
def test_every_kind_of_callable_works_before_and_after_pickling(function, name):
    here = score(function)
    assert {name: values.tolist() for name, values in here.by_function.items()} == {name: [1.0, 2.0, 3.0]}
    assert here.rewards_K.dtype == np.float64

    role = RewardRole(pickle_functions([function]), None, str(tiny_model_path()))
    there = role.score(make_group(), prompt(), 5)
    role.close()
    np.testing.assert_array_equal(there.rewards_K, here.rewards_K)


def test_a_function_of_a_notebook_cell_runs_in_another_process():
    code = "import sys, cloudpickle; from prl_notebook.tasks.reward_process import RewardRole; "
    code += "init, args = cloudpickle.load(sys.stdin.buffer); print(*RewardRole(*init).score(*args).rewards_K)"
    init = (pickle_functions([defined_in_a_cell()]), (2.0,), str(tiny_model_path()))
    sent = cloudpickle.dumps((init, (make_group(), prompt(), 5)))
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.split() == [b"2.0", b"4.0", b"6.0"]


def test_names_are_unique():
    functions = [by_length, lambda: 0, functools.partial(by_length), lambda: 1, by_length]
    assert function_names(functions) == ["by_length", "lambda", "by_length_2", "lambda_2", "by_length_3"]

    def by_length_2():
        return []

    assert function_names([by_length, by_length_2, by_length]) == ["by_length", "by_length_2", "by_length_3"]


def test_keywords_are_trl_s():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0, 0, 0]

    score(everything, on=prompt(answer=3, level={"terms": 2}))
    assert set(seen) == {
        *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "answer", "level")
    }
    assert seen["prompts"] == ["hi"] * 3
    assert seen["completions"] == TEXTS
    assert seen["answer"] == [3, 3, 3]
    assert seen["level"] == [{"terms": 2}] * 3
    assert seen["trainer_state"].global_step == 5

    def only_some(answer, prompts, unused=None):
        seen["unused"] = unused
        return answer

    assert score(only_some, on=prompt(answer=3)).rewards_K.tolist() == [3, 3, 3]
    assert seen["unused"] is None


def test_conversational_prompts_get_conversational_completions():
    def content(completions, prompts):
        assert prompts[0] == [{"role": "user", "content": "hi"}]
        assert [c[0]["role"] for c in completions] == ["assistant"] * 3
        return [int(c[0]["content"]) for c in completions]

    assert score(content, on=prompt(conversational=True)).rewards_K.tolist() == [1, 22, 333]


def test_completion_ids_are_the_sampled_ones():
    """Only the ids tell the tag's own token from `<answer>` spelled in characters: the text is the same."""
    spelled, tag = TOKENIZER.convert_tokens_to_ids(list("<answer>")), TOKENIZER("<answer>")["input_ids"]
    group = make_group(["1", "1"])
    group.completions[0].ids_R, group.completions[1].ids_R = np.array(spelled, np.int32), np.array(tag, np.int32)
    seen = {}

    def look(completions, completion_ids):
        seen.update(texts=completions, ids=completion_ids)
        return [0, 0]

    RewardSet([look], None, load_decode(tiny_model_path())).score(group, prompt(), STATE)
    assert seen["texts"] == ["<answer>", "<answer>"]
    assert seen["ids"] == [spelled, tag]
    assert all(type(i) is int for i in seen["ids"][0])


def test_special_tokens_are_left_out_unless_asked_for():
    def is_clean(completions):
        return [float(text == "<answer>1</answer>") for text in completions]

    texts = ["<answer>1</answer><|end|>", "<answer>1</answer>"]
    assert score(is_clean, texts=texts).rewards_K.tolist() == [1, 1]
    assert score(is_clean, texts=texts, skip_special_tokens=False).rewards_K.tolist() == [0, 1]


def test_the_light_decoder_agrees_with_transformers():
    ids = [list(range(128)), [1, 0, 6, 30, 9, 1], []]
    for skip in (True, False):
        assert load_decode(tiny_model_path(), skip)(ids) == TOKENIZER.batch_decode(ids, skip_special_tokens=skip)


def test_a_folder_without_tokenizer_json_is_read_by_transformers(tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path: TOKENIZER)
    assert load_decode(tmp_path)([[10, 1]]) == TOKENIZER.batch_decode([[10]])


def test_none_abstains_and_nan_is_left_out_of_the_weighted_sum():
    def first(completions):
        return [1.0, None, None]

    def second(completions):
        return [10.0, 20.0, None]

    result = score(first, second, weights=(2.0, 0.5))
    np.testing.assert_array_equal(result.rewards_K, [7.0, 10.0, np.nan])
    np.testing.assert_array_equal(result.by_function["first"], [1.0, np.nan, np.nan])
    np.testing.assert_array_equal(result.by_function["second"], [10.0, 20.0, np.nan])
    np.testing.assert_array_equal(score(first, second).rewards_K, [11.0, 20.0, np.nan])


def test_async_functions_run_together_on_one_lasting_loop():
    import asyncio

    both = asyncio.Barrier(2)  # a function that waited for the other one's end would never get past it
    loops = []

    async def meet(completions):
        loops.append(asyncio.get_running_loop())
        async with asyncio.timeout(5), both:
            return [1.0] * len(completions)

    async def meet_too(completions):
        return await meet(completions)

    rewards = RewardSet([meet, by_length, meet_too], None, load_decode(tiny_model_path()))
    for _ in range(2):
        assert rewards.score(make_group(), prompt(), STATE).rewards_K.tolist() == [3, 4, 5]
    assert len(set(map(id, loops))) == 1
    rewards.close()


def test_logs_and_metrics():
    def logging(completions, log_extra, log_metric):
        log_extra("length", [len(text) for text in completions])
        log_metric("longest", 3)
        log_metric("longest", 5)
        return [0, 0, 0]

    result = score(logging)
    assert result.logs == {"length": [1, 2, 3]}
    assert result.metrics == {"longest": 4.0}

    def short_log(log_extra, **_):
        log_extra("length", [1])
        return [0, 0, 0]

    with pytest.raises(RewardError, match=r"'short_log' raised ValueError: log_extra\('length'\) got 1 values for 3"):
        score(short_log)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([1.0], "'wrong' returned 1 rewards for 3 completions"),
        ([1.0] * 4, "'wrong' returned 4 rewards for 3 completions"),
        (1.0, r"'wrong' returned 1\.0; it must return a list of 3 numbers"),
        (None, "'wrong' returned None; it must return a list of 3 numbers"),
        ("abc", "'wrong' returned 'abc'; it must return a list of 3 numbers"),
        ([1.0, "1.0", 0], r"'wrong' returned '1\.0' among its rewards; expected a finite number or None"),
        ([1.0, [2.0], 0], r"'wrong' returned \[2\.0\] among its rewards"),
        ([1.0, float("inf"), 0], "'wrong' returned inf among its rewards"),
        ([1.0, -float("inf"), 0], "'wrong' returned -inf among its rewards"),
    ],
)
@pytest.mark.parametrize("sync", [True, False])
def test_a_wrong_answer_names_the_function(output, message, sync):
    def wrong(completions):
        return output

    async def wrong_async(completions):
        return output

    with pytest.raises(ValueError, match=message if sync else message.replace("wrong", "wrong_async")):
        score(by_length, wrong if sync else wrong_async)


def test_an_exception_names_the_function_and_keeps_its_cause():
    def broken(completions):
        return {}["missing"]

    async def broken_async(completions):
        return {}["missing"]

    for function in (broken, broken_async):
        with pytest.raises(RewardError, match=f"'{function.__name__}' raised KeyError: 'missing'") as caught:
            score(by_length, function, by_length_async)
        assert isinstance(caught.value.__cause__, KeyError)
        assert str(cloudpickle.loads(cloudpickle.dumps(caught.value))) == str(caught.value)


def test_functions_are_checked_before_a_run():
    def wants_solution(completions, solution, hint=None, *args, **kwargs):
        return []

    check_functions([wants_solution, by_length, ByLength()], (1, 1, 1), columns=["prompt", "solution"])
    with pytest.raises(ValueError, match=r"'wants_solution' needs 'solution', .*; its columns are answer, level"):
        check_functions([wants_solution], None, columns=["prompt", "answer", "level"])
    with pytest.raises(ValueError, match=r"'wants_solution' needs 'solution', .*\(none besides prompt\)"):
        check_functions([wants_solution], None, columns=["prompt"])
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        check_functions([], None)
    with pytest.raises(ValueError, match="reward_weights has 1 entries for 2 reward functions"):
        check_functions([by_length, by_length], (1.0,))
    with pytest.raises(ValueError, match="'some/reward-model' is a str, not a callable"):
        check_functions(["some/reward-model"], None)


def test_a_function_that_cannot_be_sent_is_named():
    import threading

    lock = threading.Lock()

    def holds_a_lock(completions):
        with lock:
            return [0] * len(completions)

    with pytest.raises(ValueError, match="'holds_a_lock' cannot be sent to the reward process"):
        pickle_functions([by_length, holds_a_lock])
