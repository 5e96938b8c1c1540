"""The bundled task and model."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl_notebook.tasks.make_tiny import build_tokenizer, clean_share, sampled_reward, sloppy_answer, warm_start
from prl_notebook.tasks.tiny import (
    few_shot_preamble,
    question,
    running_sum_reward,
    sample_terms,
    tiny_model_path,
    tiny_rows,
    worked_answer,
)


def test_example():
    assert question([7, 4, -2]) == "7+4-2="
    assert worked_answer([7, 4, -2]) == "<think>7+4=11,11-2=9</think><answer>9</answer>"


def test_problems_stay_in_their_bounds():
    rng = random.Random(0)
    problems = [sample_terms(rng) for _ in range(2000)]
    assert {len(terms) for terms in problems} == set(range(2, 8))
    assert all(
        sum(terms[:n]) >= 0 and 1 <= abs(terms[n - 1]) <= 9 for terms in problems for n in range(1, len(terms) + 1)
    )
    answers = [[{"role": "assistant", "content": worked_answer(terms)}] for terms in problems]
    assert running_sum_reward(answers, [sum(terms) for terms in problems]) == [1.0] * len(problems)


def test_rows_are_a_function_of_the_seed():
    assert tiny_rows(20, seed=1) == tiny_rows(20, seed=1) == tiny_rows(30, seed=1)[:20]
    assert tiny_rows(20, seed=1) != tiny_rows(20, seed=2)
    plain, with_preamble = tiny_rows(3), tiny_rows(3, preamble_tokens=64)
    assert [row["prompt"][-1] for row in with_preamble] == [row["prompt"][-1] for row in plain]
    assert [len(row["prompt"]) for row in with_preamble] == [2, 2, 2]


@pytest.mark.parametrize("tokens", [1, 10, 64, 512])
def test_preamble_has_exactly_the_asked_length(tokens):
    tokenizer = build_tokenizer()
    assert len(tokenizer(few_shot_preamble(tokens, random.Random(3)))["input_ids"]) == tokens


def test_tokenizer_is_lossless_and_keeps_tags_visible():
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
    text = "<think>7+4=11, ~{}</think>\n<answer>9</answer>"
    ids = tokenizer(text + "<|end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.convert_ids_to_tokens(ids[0]) == "<think>"
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.padding_side == "left"
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()


def test_model_folder_is_small_plain_float32_and_untied():
    folder = tiny_model_path()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 6e6
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["num_attention_heads"] % 2 == config["num_key_value_heads"] % 2 == config["intermediate_size"] % 2 == 0
    )
    assert config["vocab_size"] % 2 == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 820_608
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)


def test_model_earns_something_but_leaves_room_to_learn():
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path())
    torch.manual_seed(0)
    assert 0.15 <= sampled_reward(model, AutoTokenizer.from_pretrained(tiny_model_path())) <= 0.45


def test_warm_start_data_turns_from_clean_to_sloppy():
    assert [round(clean_share(progress), 3) for progress in (0, 0.35, 0.525, 0.7, 1)] == [1, 1, 0.5, 0, 0]
    rng = random.Random(0)
    problems = [sample_terms(rng) for _ in range(2000)]
    answers = [[{"role": "assistant", "content": sloppy_answer(terms, rng)}] for terms in problems]
    reward = sum(running_sum_reward(answers, [sum(terms) for terms in problems])) / len(problems)
    assert 0.35 < reward < 0.5


@pytest.mark.slow
def test_warm_start_gives_the_same_bits_again():
    threads = torch.get_num_threads()
    states = [warm_start(seed=3, steps=40)[0].state_dict() for _ in range(2)]
    torch.set_num_threads(threads)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
