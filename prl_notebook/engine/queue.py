"""The rollout queue: scored groups of one period on their way from the reward process to the trainer.

It is where invariants 1 (one version) and 4 (nothing is lost) are checked: a group of another policy version, of
another period, or one that came before is refused.
"""

from __future__ import annotations

import threading
import time
from typing import Literal

from prl_notebook.engine.schedules import Schedule
from prl_notebook.engine.types import Group


class VersionError(RuntimeError):
    """A completion was sampled by another policy version than the one being trained."""


class RolloutQueue:
    """Thread-safe; one period at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self.begin(-1, -1, 0)

    def begin(self, period: int, version: int, total: int) -> None:
        """Expect `total` groups of `period`, sampled by `version`."""
        with self._changed:
            self.period, self.version, self.total = period, version, total
            self._arrived: dict[int, Group] = {}
            self._waiting: list[Group] = []
            self._taken = 0

    def put(self, group: Group) -> int:
        """Add a scored group; returns the queue's depth.

        Raises:
            VersionError: the group was sampled by another policy version.
            ValueError: the group belongs to another period or came before.
        """
        with self._changed:
            if group.version != self.version:
                raise VersionError(
                    f"group {group.group} of period {group.period} was sampled by policy version {group.version}, "
                    f"but the trainer is at version {self.version}: training on it would be off-policy"
                )
            if group.period != self.period or group.group in self._arrived or not 0 <= group.group < self.total:
                raise ValueError(f"group {group.key} is not expected in period {self.period}, or came twice")
            self._arrived[group.group] = group
            self._waiting.append(group)
            self._changed.notify_all()
            return len(self._waiting)

    def fail(self, error: Exception) -> None:
        """Let the consumer's next `take` raise `error`."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise what was given to `fail`, if anything was."""
        if self._failure:
            raise self._failure

    @property
    def depth(self) -> int:
        return len(self._waiting)

    @property
    def groups(self) -> list[Group]:
        """Every group that has arrived in this period, in order of arrival."""
        with self._changed:
            return list(self._arrived.values())

    def missing(self) -> list[int]:
        """Groups that have not arrived."""
        with self._changed:
            return [g for g in range(self.total) if g not in self._arrived]

    def take(
        self,
        schedule: Schedule,
        consume: Literal["arrival", "prompt_order"],
        budget: int,
        shared_prompt: bool,
        timeout: float,
        one: bool = False,
    ) -> list[Group]:
        """The next micro-step's groups, waiting up to `timeout` seconds; [] when there is none yet.

        'arrival' packs what is there, in order of arrival, up to `budget` tokens (at least one group).
        'prompt_order' packs in prompt order and waits until the micro-step is full or the period is complete, so that
        its composition does not depend on timing. `one` limits the micro-step to a single group.

        Raises:
            Exception: whatever was given to `fail`.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                self.raise_failure()
                batch = []
                if schedule.may_train(len(self._arrived), self.total):
                    batch = self._pack(consume, 0 if one else budget, shared_prompt)
                if batch:
                    for group in batch:
                        self._waiting.remove(group)
                    self._taken += len(batch)
                    return batch
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._changed.wait(left)

    def _pack(self, consume: str, budget: int, shared_prompt: bool) -> list[Group]:
        if consume == "arrival":
            return first_micro_step(self._waiting, budget, shared_prompt)
        in_order = []
        for g in range(self._taken, self.total):
            if g not in self._arrived:
                break
            in_order.append(self._arrived[g])
        batch = first_micro_step(in_order, budget, shared_prompt)
        complete = self._taken + len(batch) == self.total
        full = len(batch) < len(in_order) or budget == 0
        return batch if complete or full else []


def first_micro_step(groups: list[Group], budget: int, shared_prompt: bool) -> list[Group]:
    """The longest prefix of `groups` within `budget` tokens, one group at least."""
    batch: list[Group] = []
    tokens = 0
    for group in groups:
        tokens += group.tokens(shared_prompt)
        if batch and tokens > budget:
            break
        batch.append(group)
    return batch


def micro_steps(groups: list[Group], budget: int, shared_prompt: bool) -> list[list[Group]]:
    """Split `groups`, in their order, into micro-steps of at most `budget` tokens."""
    steps = []
    rest = groups
    while rest:
        steps.append(first_micro_step(rest, budget, shared_prompt))
        rest = rest[len(steps[-1]) :]
    return steps
