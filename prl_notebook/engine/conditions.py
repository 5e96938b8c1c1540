"""Ready-made conditions for `session.breakpoint(...)`: what usually goes wrong in GRPO, found where it happens.

A condition on groups looks at the scored group before it is trained, so the group can be inspected and the period
given up with `session.rewind`. A condition on micro-steps looks at the trainer's numbers of the update so far.

Left out on purpose: conditions on the text of a completion (the engine has token ids only; let the reward function
judge texts) and on a period's metrics, where a lambda says it best: `on="period", when=lambda m: m["reward"] < 0.1`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from prl_notebook.engine.metrics import all_rewards_equal
from prl_notebook.engine.stepping import UNITS, Unit
from prl_notebook.engine.types import Group
from prl_notebook.training.trainer import MicroStepReport

FEWEST_OTHERS = 3
"""Groups that must have come before one can be called a straggler: a median of fewer says little."""


@dataclass(frozen=True)
class Condition:
    """Something to pause at. `when` gets what `on` says: see `engine.stepping.Breakpoint`.

    Raises:
        ValueError: unknown `on`.
    """

    on: Unit
    name: str
    when: Callable[[Any], bool]

    def __post_init__(self) -> None:
        if self.on not in UNITS:
            raise ValueError(f"on={self.on!r}: a breakpoint is on one of {', '.join(map(repr, UNITS))}")


def zero_variance() -> Condition:
    """A group whose valid rewards are all equal: no completion is better than another, so it has no policy gradient.

    Counts exactly the groups of the metric `frac_reward_zero_std`.
    """
    return Condition("group", "zero variance", lambda group: all_rewards_equal(group.rewards_K))


def all_truncated() -> Condition:
    """A group of which every completion was cut off at max_completion_length."""
    return Condition(
        "group", "all truncated", lambda group: all(c.finish_reason == "length" for c in group.completions)
    )


def reward_failed() -> Condition:
    """A group without any valid reward: every function abstained, or failed under Rewards(on_error="invalid")."""
    return Condition("group", "no valid reward", lambda group: bool(np.isnan(group.rewards_K).all()))


def straggler(factor: float = 2.0) -> Condition:
    """A group whose longest completion has over `factor` times the tokens usual (median) among those trained before it.

    Only groups of the same period are compared, and only once there are `FEWEST_OTHERS` of them.
    """
    return Condition("group", f"straggler: {factor:g} x the usual length", _LongerThanOthers(factor))


def kl_above(limit: float) -> Condition:
    """Mean KL to the reference model, over the tokens of the update so far.

    Without beta above 0 no KL is measured; the breakpoint then stops at once, switched off, and says so.
    """
    return Condition("microstep", f"KL above {limit:g}", lambda report: _kl(report) > limit)


def ratio_above(limit: float) -> Condition:
    """Largest importance ratio policy / old of a token in the update so far.

    In a period's first update every ratio is 1, so it needs num_iterations above 1.
    """
    return Condition("microstep", f"ratio above {limit:g}", lambda report: report.stats.get("ratio_max", 1.0) > limit)


def _kl(report: MicroStepReport) -> float:
    if report.stats and "kl_mean" not in report.stats:
        raise ValueError("no KL is measured, because beta is 0 and there is no reference model; set beta above 0")
    return report.stats.get("kl_mean", 0.0)  # no numbers at all: every token so far was masked


class _LongerThanOthers:
    """Remembers the longest completion, in tokens, of each group of the period."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._period = -1
        self._longest: dict[int, int] = {}

    def __call__(self, group: Group) -> bool:
        if group.period != self._period:
            self._period, self._longest = group.period, {}
        others = [tokens for number, tokens in self._longest.items() if number != group.group]
        longest = self._longest[group.group] = max(group.lengths)
        return len(others) >= FEWEST_OTHERS and longest > self._factor * median(others)
