"""Schedules: when the trainer may start. The two differ in nothing else, so their gradients are the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Answers the engine's one question about order within a period."""

    name: str
    waits_for_all: bool

    def may_train(self, arrived: int, total: int) -> bool:
        """May the trainer take groups, `arrived` of the period's `total` being there?"""
        return arrived == total if self.waits_for_all else arrived > 0


SYNCHRONOUS = Schedule("synchronous", waits_for_all=True)
PERIODIC = Schedule("periodic", waits_for_all=False)
SCHEDULES = {s.name: s for s in (SYNCHRONOUS, PERIODIC)}
