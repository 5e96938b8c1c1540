"""A stand-in for a Session where only its face matters: plays a made-up run into a LiveState in real time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from synthetic_run import synthetic_events

from prl_notebook.engine import events as ev
from prl_notebook.engine.live import LiveState


class Feeder:
    """Steered like a Session; a background thread plays the events `speed` times as fast as they were."""

    parent = None

    def __init__(self, periods: int = 40, speed: float = 1.0, **shape: int) -> None:
        self.live = LiveState()
        self.breakpoints = [
            SimpleNamespace(on="group", name="zero variance", enabled=True),
            SimpleNamespace(on="microstep", name="ratio above 1.2", enabled=False),
        ]
        self.calls: list[str] = []
        self._events = iter(synthetic_events(periods, **shape))
        self._speed = speed
        self._go = threading.Event()
        self._goal = 0
        self._stop = False
        self._played = 0.0
        """run seconds of the event played last"""
        threading.Thread(target=self._play, daemon=True).start()

    def step(self, unit: str = "period", count: int = 1, wait: bool = True) -> None:
        self.calls.append(f"step {unit}")
        self.run(count)

    def run(self, periods: int) -> None:
        if self._go.is_set():
            raise RuntimeError(f"the session runs ({self._goal} period(s) to go); pause() or wait() first")
        self._goal = periods
        self._go.set()

    def pause(self) -> None:
        self.calls.append("pause")
        self._stand("told to pause")

    def resume(self) -> None:
        self.calls.append("resume")
        self._go.set()

    def close(self) -> None:
        self._stop = True
        self._emit(ev.RunClosed(version=0))

    def _stand(self, why: str) -> None:
        self._go.clear()
        self._emit(ev.Paused(period=0, boundary="period", where=f"{why}; next: another period"))

    def _emit(self, event: ev.Event) -> None:
        object.__setattr__(event, "t", self._played)
        self.live(event)

    def _play(self) -> None:
        for event in self._events:
            self._go.wait()
            if self._stop:
                return
            time.sleep(max(0.0, event.t - self._played) / self._speed)
            self._played = event.t
            self.live(event)
            if isinstance(event, ev.PeriodFinished):
                self._goal -= 1
                if self._goal <= 0:
                    self._stand(f"period {event.period} is finished")
