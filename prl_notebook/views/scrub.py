"""Any moment of a finished run: the RunState at time t, found from its events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from prl_notebook.engine.events import Event, PeriodFinished
from prl_notebook.engine.run_state import RunState, reduce

KEPT_EVERY = 256
"""States kept on the way, in events: a look at any moment reduces at most this many (states share structure)."""


class Scrubber:
    """Random access to the states of a run."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = list(events)
        self._times = [e.t for e in self.events]
        self._kept = [RunState()]
        state = self._kept[0]
        for i, event in enumerate(self.events, 1):
            state = reduce(state, event)
            if i % KEPT_EVERY == 0:
                self._kept.append(state)

    @property
    def seconds(self) -> float:
        """Time of the last event."""
        return self._times[-1] if self._times else 0.0

    @property
    def period_ends(self) -> dict[int, int]:
        """For each finished period the number of events up to its end; `after` takes it."""
        return {e.period: i for i, e in enumerate(self.events, 1) if isinstance(e, PeriodFinished)}

    def at(self, t: float) -> RunState:
        """State after every event up to and including time `t` (seconds)."""
        return self.after(bisect_right(self._times, t))

    def after(self, count: int) -> RunState:
        """State after the first `count` events."""
        state = self._kept[count // KEPT_EVERY]
        for event in self.events[count - count % KEPT_EVERY : count]:
            state = reduce(state, event)
        return state
