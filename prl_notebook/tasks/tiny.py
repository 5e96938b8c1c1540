"""The bundled task: the running sum of two to seven signed one-digit numbers, for the bundled 0.8M-parameter model.

`7+4-2=` is answered by `<think>7+4=11,11-2=9</think><answer>9</answer>`; the thinking part may be left out. The
bundled model was warm-started (make_tiny.py) to think only sometimes and to be sloppy about it, so GRPO has
something to select: it sharpens a behaviour the model has and does not teach it addition.

Left out on purpose: torch, the tokenizer and the model; they are loaded where they are needed.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from prl_notebook.config import GRPO, Config

MIN_TERMS, MAX_TERMS, MAX_TERM = 2, 7, 9
_ANSWER = re.compile(r"(?:<think>[^<]*</think>)?<answer>(\d{1,4})</answer>")
_TAG = re.compile(r"</?(?:think|answer)>")


def tiny_model_path() -> Path:
    """Folder of the bundled model in Hugging Face format."""
    return Path(__file__).parent / "tiny_model"


def tiny_preset() -> Config:
    """Settings under which the bundled model learns the bundled task in about 40 periods."""
    return Config(
        grpo=GRPO(
            prompts_per_period=16,
            num_generations=8,
            max_completion_length=64,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            warmup_steps=5,
            adam_beta2=0.99,
        )
    )


def sample_terms(rng: random.Random) -> list[int]:
    """Draw one problem: signed terms whose running sum never falls below 0."""
    terms = [rng.randint(1, MAX_TERM)]
    for _ in range(rng.randint(MIN_TERMS, MAX_TERMS) - 1):
        term = rng.randint(1, MAX_TERM)
        subtract = term <= sum(terms) and rng.random() < 0.35
        terms.append(-term if subtract else term)
    return terms


def question(terms: list[int]) -> str:
    """`[7, 4, -2]` -> `7+4-2=`"""
    return f"{terms[0]}" + "".join(f"{term:+d}" for term in terms[1:]) + "="


def worked_answer(terms: list[int]) -> str:
    """The full answer, thinking included."""
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{total}{term:+d}={total + term}")
        total += term
    return f"<think>{','.join(steps)}</think><answer>{total}</answer>"


def few_shot_preamble(tokens: int, rng: random.Random) -> str:
    """Worked examples, one a line, filled up with dots to exactly `tokens` tokens of the bundled tokenizer."""
    text, used = "", 0
    while True:
        terms = sample_terms(rng)
        example = question(terms) + worked_answer(terms) + "\n"
        length = len(_TAG.sub(".", example))  # one token per character and per tag
        if used + length > tokens:
            return text + "." * (tokens - used)
        text += example
        used += length


def tiny_rows(rows: int = 2048, seed: int = 0, preamble_tokens: int = 0) -> list[dict[str, Any]]:
    """The dataset: `prompt` (messages) and `answer` (the sum).

    `preamble_tokens` > 0 puts the same few-shot system message of that many tokens before every question: a long
    prompt shared by the K completions of a group.
    """
    rng = random.Random(seed)
    preamble = few_shot_preamble(preamble_tokens, random.Random(seed))
    system = [{"role": "system", "content": preamble}] if preamble else []
    problems = [sample_terms(rng) for _ in range(rows)]
    return [
        {"prompt": [*system, {"role": "user", "content": question(terms)}], "answer": sum(terms)} for terms in problems
    ]


def running_sum_reward(completions: list[list[dict[str, str]]], answer: list[int], **_: Any) -> list[float]:
    """1.0 where the completion has exactly the asked format and the right sum, else 0.0."""
    rewards = []
    for messages, expected in zip(completions, answer, strict=True):
        match = _ANSWER.fullmatch(messages[-1]["content"])
        rewards.append(float(match is not None and int(match[1]) == expected))
    return rewards
