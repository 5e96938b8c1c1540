"""Bookkeeping of one period, shared by every training engine: each group enters each optimizer step exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from prl_notebook.config import GRPO
from prl_notebook.engine.types import Group
from prl_notebook.training.metrics import UpdateMetrics


@dataclass
class Period:
    """What a trainer has taken in so far."""

    number: int
    version: int
    """policy version that sampled every group"""
    groups: int
    """B"""
    grpo: GRPO
    updates: int = 0
    """optimizer steps already taken on this batch (num_iterations > 1)"""
    trained: set[int] = field(default_factory=set)
    """groups that entered the current optimizer step"""
    metrics: UpdateMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = self.new_totals()

    def new_totals(self) -> UpdateMetrics:
        """Empty totals of the kind that this loss needs."""
        return UpdateMetrics(self.grpo.importance_sampling_level == "sequence", self.grpo.loss_type == "cispo")

    def check(self, groups: Sequence[Group]) -> None:
        """Refuse what must not enter the gradient; called before anything is computed.

        Raises:
            ValueError: naming the group of another period or policy version, outside 0..B-1, with more than K
                completions, without advantages, or given twice.
        """
        taken = set(self.trained)
        for group in groups:
            where = f"group {group.group} of period {group.period}"
            if group.version != self.version:
                raise ValueError(
                    f"{where} was sampled by policy version {group.version}, but version {self.version} is being "
                    "trained: strictly on-policy training takes no other"
                )
            if group.period != self.number:
                raise ValueError(f"{where} was given to period {self.number}")
            if not 0 <= group.group < self.groups:
                raise ValueError(f"{where} is not one of the period's groups 0..{self.groups - 1}")
            if group.group in taken:
                raise ValueError(f"{where} already entered this optimizer step")
            if len(group.completions) > self.grpo.num_generations:
                raise ValueError(
                    f"{where} has {len(group.completions)} completions, num_generations={self.grpo.num_generations}"
                )
            advantages_K = group.advantages_K
            if advantages_K is None:
                raise ValueError(f"{where} has no advantages: score it before training")
            if np.shape(advantages_K) != (len(group.completions),) or not np.isfinite(advantages_K).all():
                raise ValueError(
                    f"{where} needs one finite advantage for each of its {len(group.completions)} completions, "
                    f"got {np.asarray(advantages_K).tolist()}"
                )
            taken.add(group.group)

    def finish_update(self) -> UpdateMetrics:
        """Close the optimizer step and start the next one on the same batch; returns the totals of the closed one.

        Raises:
            RuntimeError: naming the groups that are missing.
        """
        if missing := sorted(set(range(self.groups)) - self.trained):
            raise RuntimeError(
                f"period {self.number} cannot be finished: of its {self.groups} groups, "
                f"{', '.join(map(str, missing))} are missing"
            )
        totals = self.metrics
        self.updates += 1
        self.trained = set()
        self.metrics = self.new_totals()
        return totals


def open_period(unfinished: Period | None, number: int, version: int, held: int, groups: int, grpo: GRPO) -> Period:
    """A new period of policy version `version`, for a trainer that holds version `held`.

    Raises:
        ValueError: the versions differ.
        RuntimeError: an earlier period is unfinished.
    """
    if version != held:
        raise ValueError(f"period {number} is of policy version {version}, but the trainer holds version {held}")
    if unfinished is not None:
        raise RuntimeError(f"period {unfinished.number} is unfinished; finish it or load a checkpoint first")
    return Period(number, version, groups, grpo)
