"""Tasks of the optional package reasoning_gym by name, scored by its own score functions.

Left out on purpose: the tasks' difficulty settings. Rows made with them (`reasoning_gym.create_dataset(...)`) work
as a list of dicts with the columns below.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from prl_notebook.engine.seeds import derive_seed
from prl_notebook.tasks.math_rewards import completion_text

ROWS = 1024
_INSTRUCTION = "\nGive the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def reasoning_rows(task: str, rows: int = ROWS, seed: int = 0) -> list[dict[str, Any]]:
    """Columns `prompt` (one user message), `question`, `answer` and `metadata`.

    Raises:
        ImportError: reasoning_gym is not installed.
        ValueError: it has no such task.
    """
    gym = _import_gym()
    names = sorted(gym.factory.DATASETS)
    if task not in names:
        raise ValueError(f"reasoning_gym has no task {task!r}; it has {', '.join(names)}")
    dataset = gym.create_dataset(task, size=rows, seed=derive_seed("reasoning_gym", seed) % 2**31)
    return [
        {
            "prompt": [{"role": "user", "content": item["question"] + _INSTRUCTION}],
            "question": item["question"],
            "answer": item["answer"],
            "metadata": item["metadata"],
        }
        for item in (dataset[index] for index in range(rows))
    ]


def reasoning_gym_reward(
    completions: list[Any], question: list[str], answer: list[str], metadata: list[dict[str, Any]]
) -> list[float]:
    """reasoning_gym's score, 0 to 1, of the last <answer>...</answer>, or of the whole text without that tag."""
    rewards = []
    for completion, asked, expected, about in zip(completions, question, answer, metadata, strict=True):
        text = completion_text(completion)
        tagged = _ANSWER.findall(text)
        found = (tagged[-1] if tagged else text).strip()
        score = _score_function(about["source_dataset"])
        rewards.append(float(score(found, {"question": asked, "answer": expected, "metadata": about})))
    return rewards


@functools.cache
def _score_function(task: str) -> Callable[[str, dict[str, Any]], float]:
    return _import_gym().get_score_answer_fn(task)


def _import_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("this dataset needs reasoning_gym: pip install 'prl-notebook[reasoning-gym]'") from error
    return reasoning_gym
