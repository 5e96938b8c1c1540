"""The live RunState of a session: fed by the event log, read by views; latest wins."""

from __future__ import annotations

import threading

from prl_notebook.engine.events import Event
from prl_notebook.engine.run_state import RunState, reduce


class LiveState:
    """Keeps the newest RunState. Readers poll `state` or block in `newer` until something changed."""

    def __init__(self, state: RunState | None = None) -> None:
        self.state = state or RunState()
        self.sequence = 0
        """grows by one with every event"""
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.state = reduce(self.state, event)
            self.sequence += 1
            self._changed.notify_all()

    def newer(self, sequence: int, timeout: float | None = None) -> tuple[int, RunState]:
        """Wait until the state is newer than `sequence` (or `timeout` seconds passed); returns both."""
        with self._changed:
            self._changed.wait_for(lambda: self.sequence > sequence, timeout)
            return self.sequence, self.state
