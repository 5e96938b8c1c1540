"""Ready-made reward functions for answers that can be checked, in TRL's calling convention."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

TIMEOUT = 5
"""Seconds math-verify may take to parse one answer, and again to compare it."""
_INTEGER = re.compile(r"-?\d+")
_THINK_ANSWER = re.compile(
    r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL
)


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Text of a completion, conversational or not."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def accuracy_reward(
    completions: list[Any],
    solution: list[Any] | None = None,
    answer: list[Any] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
) -> list[float | None]:
    r"""1.0 where the completion's answer equals the dataset's mathematically, else 0.0, by math-verify.

    The expected answer is the column `solution`, or else `answer`: text or LaTeX (`1/3`, `\frac{1}{3}`, `$x=2$`,
    `\boxed{4}`) or a number. Abstains (None) where that cannot be parsed.
    """
    expected = solution if solution is not None else answer
    if expected is None:
        raise ValueError("accuracy_reward needs a dataset column 'solution' or 'answer'")
    rewards: list[float | None] = []
    parsed: list[str] = []
    timeout = _timeout()
    for completion, truth in zip(completions, expected, strict=True):
        gold = _parse_gold(str(truth), timeout)
        found = parse(completion_text(completion), parsing_timeout=timeout) if gold else []
        parsed.append(str(found[0]) if found else "")
        rewards.append(float(verify(gold, found, timeout_seconds=timeout)) if gold else None)
    if log_extra is not None:
        log_extra("answer_parsed", parsed)
    return rewards


def _parse_gold(truth: str, timeout: int | None) -> list[Any]:
    """The dataset's answer: as it stands, else taken as LaTeX without delimiters."""
    bare_latex = "\\" in truth and "$" not in truth and "\\boxed" not in truth
    config = (LatexExtractionConfig(), ExprExtractionConfig())
    return parse(f"${truth}$" if bare_latex else truth, extraction_config=config, parsing_timeout=timeout)


def _timeout() -> int | None:
    """math-verify's time limits use signals, which only the main thread receives; elsewhere they are turned off."""
    if threading.current_thread() is threading.main_thread():
        return TIMEOUT
    for name in ("math_verify.parser", "math_verify.grader"):  # they warn about it at every process's first call
        logging.getLogger(name).setLevel(logging.ERROR)
    return None


def last_integer_reward(completions: list[Any], answer: list[Any]) -> list[float]:
    """1.0 where the last integer written in the completion is the column `answer`, else 0.0."""
    found = [_INTEGER.findall(completion_text(completion)) for completion in completions]
    return [float(f[-1:] == [str(int(a))]) for f, a in zip(found, answer, strict=True)]


def think_answer_format_reward(completions: list[Any]) -> list[float]:
    """1.0 where the completion is exactly one <think>...</think> followed by one <answer>...</answer>, else 0.0."""
    return [float(_THINK_ANSWER.fullmatch(completion_text(completion)) is not None) for completion in completions]
