"""The part of a run's reward functions that lives in the reward process: unpickle them there, score groups.

The time limit and the policy for exceptions belong to the runtime that started the process.
"""

from __future__ import annotations

from collections.abc import Sequence

import cloudpickle

from prl_notebook.engine.types import Group, Prompt
from prl_notebook.tasks.rewards import (
    RewardFunction,
    RewardResult,
    RewardSet,
    TrainerState,
    function_names,
    load_decode,
)


def pickle_functions(functions: Sequence[RewardFunction]) -> bytes:
    """Bytes for `RewardRole`; functions of a notebook or script travel by value.

    Raises:
        ValueError: naming the function that cannot be sent.
    """
    for name, function in zip(function_names(functions), functions, strict=True):
        try:
            cloudpickle.dumps(function)
        except Exception as error:
            raise ValueError(
                f"reward function {name!r} cannot be sent to the reward process ({type(error).__name__}: {error}); "
                "make what it holds on to (locks, open files, connections) inside the function"
            ) from error
    return cloudpickle.dumps(list(functions))


class RewardRole:
    """What runs in the reward process.

    Args:
        functions_pickled: from `pickle_functions`.
        weights: one per function; None: all 1.
        tokenizer_path: Hugging Face folder of the model.
        skip_special_tokens: leave special tokens out of the completions' text.
    """

    def __init__(
        self,
        functions_pickled: bytes,
        weights: Sequence[float] | None,
        tokenizer_path: str,
        skip_special_tokens: bool = True,
    ) -> None:
        functions = cloudpickle.loads(functions_pickled)
        self._rewards = RewardSet(functions, weights, load_decode(tokenizer_path, skip_special_tokens))

    def score(self, group: Group, prompt: Prompt, step: int) -> RewardResult:
        """Score one group; `step` is the number of optimizer steps done. Raises as `RewardSet.score`."""
        return self._rewards.score(group, prompt, TrainerState(global_step=step, period=group.period))

    def close(self) -> None:
        self._rewards.close()
