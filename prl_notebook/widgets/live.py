"""What keeps a widget up to date with a run: `Follower`, and `LiveView`, one view of a run that follows it.

While nothing happens a follower sleeps. Training never waits for one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from prl_notebook.engine.live import LiveState
from prl_notebook.engine.run_state import RunState
from prl_notebook.views import View
from prl_notebook.widgets.bundle import Bundled
from prl_notebook.widgets.panes import Panes

UPDATES_PER_SECOND = 5.0
SHARE = 1 / 100
"""Updates take at most this share of the time: where one takes more than 2 milliseconds, because the period is huge or
because a run fills the machine, they come less often than 5 times a second, yet ..."""
LONGEST_PAUSE = 1.0
"""... every second."""
LOOK_AGAIN = 5.0
"""Seconds after which a waiting follower looks whether it was closed."""


class Follower:
    """Draws the state now, and in a thread of its own the newest one whenever there is news, about 5 times a second.

    `draw` returns after how many seconds it wants to be called again even without news; None for never.
    Ends with `close`, or when the run is closed.
    """

    def __init__(self, live: LiveState, draw: Callable[[RunState], float | None]) -> None:
        self._live, self._draw = live, draw
        self._ended = threading.Event()
        self.update_seconds: deque[float] = deque(maxlen=1000)
        """CPU time that the newest updates took"""
        sequence, state = live.newer(-1)
        again = self._timed(state)
        threading.Thread(target=self._follow, args=(sequence, again), name="prl-follower", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _follow(self, seen: int, again: float | None) -> None:
        while not self._ended.is_set():
            sequence, state = self._live.newer(seen, LOOK_AGAIN if again is None else again)
            if sequence == seen and again is None:
                continue
            seen = sequence
            started = time.monotonic()
            again = self._timed(state)
            if state.status == "closed" and again is None:
                return
            took = time.monotonic() - started
            self._ended.wait(min(LONGEST_PAUSE, max(1 / UPDATES_PER_SECOND, took / SHARE)))

    def _timed(self, state: RunState) -> float | None:
        started = time.thread_time()
        again = self._draw(state)
        self.update_seconds.append(time.thread_time() - started)
        return again


class LiveView(Bundled, Panes):
    """One view of a run, live. `close()` ends its updates."""

    def __init__(self, live: LiveState, draw: Callable[[RunState], View]) -> None:
        super().__init__()
        self._live, self._drawing = live, draw
        self._follower = Follower(live, self._draw)

    def view(self) -> View:
        return self._drawing(self._live.state)

    def close(self) -> None:
        self._follower.close()
        super().close()

    def _draw(self, state: RunState) -> None:
        self.show({"detail": self._drawing(state)}, live=state.status == "running")
