"""Stepping: the engine runs towards a goal ("two periods", "one group"), and stands still when there is none.

The engine calls `arrive` at every boundary; there it blocks while the session is paused. Commands that need the
engine to stand still (verify, rewind, checkpoint) are run by the engine's own thread while it waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from prl_notebook.engine.types import Group

Unit = Literal["period", "group", "microstep"]
UNITS: tuple[Unit, ...] = ("period", "group", "microstep")


class Closed(Exception):
    """The session is being closed; the engine's thread unwinds."""


class PeriodAbandoned(Exception):
    """The period under way is given up (rewind); the engine goes back to the period boundary."""


@dataclass
class Goal:
    """How far to run. Done when `remaining` units have passed, or when the session pauses."""

    unit: Unit
    remaining: int
    done: Future[None] = field(default_factory=Future)


@dataclass
class Breakpoint:
    """Pause where `when` is true.

    `on` and what `when` is called with: 'group' - the scored Group before it is trained; 'microstep' - the
    MicroStepReport; 'period' - the metrics dict of the finished period.
    """

    on: Unit
    when: Callable[[Any], bool]
    name: str
    enabled: bool = True
    hits: int = 0


class Stepper:
    """Shared by the session's threads (which set goals) and the engine's (which arrives at boundaries)."""

    def __init__(self, on_pause: Callable[[Unit, str, str | None], None], on_resume: Callable[[Goal], None]) -> None:
        self.breakpoints: list[Breakpoint] = []
        self._on_pause, self._on_resume = on_pause, on_resume
        self._changed = threading.Condition()
        self._goal: Goal | None = None
        self._pause = False
        self._closed = False
        self._abandon = False
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.at: Unit | None = None
        """the boundary the engine stands at, None while it runs"""

    @property
    def unit(self) -> Unit | None:
        """Unit of the present goal."""
        goal = self._goal
        return goal.unit if goal else None

    @property
    def _halts(self) -> bool:
        """True when the engine is to stand at the next boundary."""
        return self._goal is None or self._goal.remaining <= 0 or self._pause or self._abandon

    def run(self, unit: Unit, count: int) -> Goal:
        """Set a goal.

        Raises:
            ValueError: unknown unit, or count below 1.
            RuntimeError: another goal is being worked on.
        """
        if unit not in UNITS:
            raise ValueError(f"step({unit!r}): a step is one of {', '.join(map(repr, UNITS))}")
        if count < 1:
            raise ValueError(f"cannot run {count} {unit}s: at least 1")
        with self._changed:
            if self._closed:
                raise RuntimeError("the session is closed")
            if self._goal is not None:
                raise RuntimeError(
                    f"the session runs ({self._goal.remaining} {self._goal.unit}(s) to go); pause() or wait() first"
                )
            self._pause = False
            self._goal = Goal(unit, count)
            self._changed.notify_all()
            return self._goal

    def pause(self) -> None:
        """Stand still at the next boundary of any kind."""
        with self._changed:
            if self._goal is not None:
                self._pause = True

    def close(self, error: Exception | None = None) -> None:
        """Let the engine's thread unwind; open goals and commands fail with `error`, or end."""
        with self._changed:
            self._closed = True
            self._finish_goal(error)
            for _, future in self._commands:
                future.set_exception(error or RuntimeError("the session is closed"))
            self._commands.clear()
            self._changed.notify_all()

    def command(self, function: Callable[[], Any], abandon_period: bool = False) -> Future[Any]:
        """Have the engine's thread call `function` when it stands at a period boundary.

        With `abandon_period` the present goal is dropped, and a period under way given up first.
        """
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                future.set_exception(RuntimeError("the session is closed"))
                return future
            self._commands.append((function, future))
            if abandon_period and self.at == "period":
                self._finish_goal(None)  # set, but not begun
            elif abandon_period:
                self._abandon = True
            self._changed.notify_all()
        return future

    def raise_if_closed(self) -> None:
        """Called by the engine while it waits at a period boundary, where there is nothing to give up.

        Raises:
            Closed: the session is being closed.
        """
        if self._closed:
            raise Closed

    def interrupting(self) -> None:
        """Called by the engine while it waits inside a period.

        Raises:
            Closed: the session is being closed.
            PeriodAbandoned: the period is to be given up.
        """
        self.raise_if_closed()
        if self._abandon:
            raise PeriodAbandoned

    def begin(self, where: str) -> None:
        """The engine is ready at the first period boundary; a goal may have been set already."""
        if self._halts:
            self.stand("period", where)

    def arrive(self, boundary: Unit, where: str, groups: int = 0, subject: Any = None) -> None:
        """The engine stands at `boundary`, having passed it once (and `groups` groups); block while paused.

        `where` says in words what was done and what comes next; `subject` is what breakpoints look at.
        """
        if boundary == "period":
            self.raise_if_closed()
        else:
            self.interrupting()
        with self._changed:
            if goal := self._goal:
                goal.remaining -= groups if goal.unit == "group" else (goal.unit == boundary)
            halts = self._halts
        hit = self._hit(boundary, subject)
        if hit or halts:
            self.stand(boundary, where, hit)

    def break_on_group(self, group: Group, where: str) -> None:
        """Pause before a scored group is trained, if a breakpoint says so."""
        if hit := self._hit("group", group):
            self.stand("group", where, hit)

    def _hit(self, boundary: Unit, subject: Any) -> str | None:
        """Name of the first breakpoint that is true here."""
        for candidate in list(self.breakpoints):
            if not candidate.enabled or candidate.on != boundary:
                continue
            try:
                hit = candidate.when(subject)
            except Exception as error:  # noqa: BLE001 - a mistake in a condition must not end the run
                candidate.enabled = False
                return f"{candidate.name} (switched off: its condition raised {error!r})"
            if hit:
                candidate.hits += 1
                return candidate.name
        return None

    def stand(self, boundary: Unit, where: str, breakpoint: str | None = None) -> None:
        """Block until there is a goal; run commands first, if this is a period boundary."""
        self._on_pause(boundary, where, breakpoint)
        with self._changed:
            self._pause = False
            self.at = boundary
            if boundary == "period":
                self._abandon = False
            self._finish_goal(None)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._goal or self._closed or self._abandon or (boundary == "period" and self._commands)
                )
                self.at = None
                self.interrupting()
                if boundary != "period" or not self._commands:
                    goal = self._goal
                    break
                function, future = self._commands.popleft()
                self.at = boundary
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised where the caller waits
                future.set_exception(error)
        assert goal is not None
        self._on_resume(goal)

    def _finish_goal(self, error: Exception | None) -> None:
        goal, self._goal = self._goal, None
        if goal and not goal.done.done():
            if error:
                goal.done.set_exception(error)
            else:
                goal.done.set_result(None)
