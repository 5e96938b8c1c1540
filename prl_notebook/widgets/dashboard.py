"""The dashboard: controls, status, progress, queue, timeline and curves of a session, live.

Buttons only call the session's methods that return at once, so they work in whichever thread the kernel runs their
callbacks. Training itself never waits for the dashboard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import ipywidgets as ipw

from prl_notebook import views
from prl_notebook.engine import conditions
from prl_notebook.engine.live import LiveState
from prl_notebook.engine.run_state import RunState
from prl_notebook.views import View
from prl_notebook.views.base import joined, message
from prl_notebook.widgets.bundle import Bundled
from prl_notebook.widgets.live import Follower
from prl_notebook.widgets.panes import Panes

READY_MADE: dict[str, Callable[[], conditions.Condition]] = {
    "zero variance": conditions.zero_variance,
    "all truncated": conditions.all_truncated,
    "no valid reward": conditions.reward_failed,
    "straggler": conditions.straggler,
    "KL above 0.1": lambda: conditions.kl_above(0.1),
    "ratio above 1.5": lambda: conditions.ratio_above(1.5),
}
"""What the menu offers; any other condition is set in a cell with session.breakpoint()."""

PICTURE_SECONDS = 1.0
"""Timeline and curves, which are large, are drawn at most this often while a run goes on."""

WHEN_BUSY = (
    "Buttons act at once while no cell is running. While one is running they act when it ends (the kernel's rule), "
    "so start long work with run(n), which returns at once, and keep wait() for the end."
)


class Steerable(Protocol):
    """What the dashboard needs of a session."""

    @property
    def live(self) -> LiveState: ...

    parent: RunState | None
    """of the run this one was forked from; its curves are drawn beside"""

    @property
    def breakpoints(self) -> list[Any]: ...
    def breakpoint(self, on: Any = "group") -> Any: ...
    def step(self, unit: Any = "period", count: int = 1, wait: bool = True) -> Any: ...
    def run(self, periods: int) -> Any: ...
    def pause(self) -> Any: ...
    def resume(self) -> Any: ...
    def close(self) -> Any: ...


class Dashboard(Bundled, ipw.VBox):
    """Show it as the last expression of a cell. `close()` ends its updater; the session goes on."""

    def __init__(self, session: Steerable, timeline_periods: int = 2) -> None:
        self._session = session
        self._timeline_periods = timeline_periods
        self._panes = Panes()
        self._message = ipw.HTML()
        self._breakpoints = ipw.HBox(layout=ipw.Layout(flex_flow="row wrap"))
        self._drawn: dict[str, tuple[object, float]] = {}
        """for numbers, timeline and curves: what they show (a part of a RunState) and when they were drawn"""
        super().__init__([self._controls(), self._breakpoints, self._message, self._panes])
        self._follower = Follower(session.live, self._draw)

    def view(self) -> View:
        """The static dashboard: the same panes as one View."""
        return dashboard_view(self._session.live.state, self._session.parent, self._timeline_periods)

    @property
    def update_seconds(self) -> list[float]:
        """CPU time that the newest updates took from the kernel."""
        return list(self._follower.update_seconds)

    def close(self) -> None:
        """End the updater and remove the widget from the page."""
        self._follower.close()
        super().close()

    def _draw(self, state: RunState) -> float | None:
        """Whichever of numbers, timeline and curves is overdue: one per update, so that none takes long."""
        now, running = time.monotonic(), state.status == "running"
        subjects: dict[str, object] = {"numbers": state, "timeline": state, "curves": state.history}
        due: dict[str, float] = {}
        for part, subject in subjects.items():
            shown, at = self._drawn.get(part, (None, 0.0))
            if shown is not subject:
                due[part] = at + (PICTURE_SECONDS if running and part != "numbers" else 0.0)
        first = min(due, key=due.__getitem__, default="")
        if first and due[first] <= now:
            self._drawn[first] = subjects[first], now
            self._panes.show(self._part(first, state), live=running)
            del due[first]
        self._list_breakpoints()
        return max(0.0, min(due.values()) - now) if due else None

    def _part(self, part: str, state: RunState) -> dict[str, View]:
        if part == "numbers":
            return numbers(state)
        if part == "timeline":
            return {part: views.timeline(state, self._timeline_periods)}
        return {part: views.curves(state, self._session.parent)}

    def _controls(self) -> ipw.Widget:
        session = self._session
        unit = ipw.Dropdown(options=["period", "group", "microstep"], layout=ipw.Layout(width="110px"))
        count = ipw.BoundedIntText(value=10, min=1, max=1_000_000, layout=ipw.Layout(width="80px"))
        row = ipw.HBox(
            [
                self._button(
                    "Step", "step-forward", "one unit, then stop", lambda: session.step(unit.value, wait=False)
                ),
                unit,
                self._button("Run", "play", "this many periods", lambda: session.run(count.value)),
                count,
                ipw.Label("periods"),
                self._button("Pause", "pause", "stop at the next boundary", session.pause),
                self._button("Resume", "play-circle", "go on with what was paused", session.resume),
                self._button("Stop", "stop", "end the session and its processes", self._stop),
            ],
            layout=ipw.Layout(flex_flow="row wrap", align_items="center"),
        )
        ready = ["add a breakpoint ...", *READY_MADE]
        add = ipw.Dropdown(options=ready, layout=ipw.Layout(width="220px"))
        add.add_class("prl-add-breakpoint")
        add.observe(self._add_breakpoint, "value")
        row.children = (*row.children, add)
        return ipw.VBox([row, ipw.HTML(f'<div class="prl muted" style="margin:0">{WHEN_BUSY}</div>')])

    def _button(self, label: str, icon: str, tip: str, act: Callable[[], Any]) -> ipw.Button:
        button = ipw.Button(description=label, icon=icon, tooltip=tip, layout=ipw.Layout(width="90px"))
        button.add_class(f"prl-{label.lower()}")

        def clicked(_: ipw.Button) -> None:
            try:
                act()
                self._message.value = ""
            except (RuntimeError, ValueError) as error:  # e.g. "the session runs ...; pause first": tell, and go on
                self._message.value = str(message(str(error)).body)

        button.on_click(clicked)
        return button

    def _stop(self) -> None:
        # Ending the processes takes a while, and a callback must not keep the kernel.
        threading.Thread(target=self._session.close, name="prl-stop").start()

    def _add_breakpoint(self, change: Any) -> None:
        if change["new"] in READY_MADE:
            self._session.breakpoint(READY_MADE[change["new"]]())
            change["owner"].index = 0
            self._list_breakpoints()

    def _list_breakpoints(self) -> None:
        """A check box per breakpoint; drawn anew only when the list changed."""
        listed = [box.breakpoint for box in self._breakpoints.children]
        if listed != list(self._session.breakpoints):
            self._breakpoints.children = [_BreakpointBox(b) for b in self._session.breakpoints]


class _BreakpointBox(ipw.Checkbox):
    def __init__(self, breakpoint: Any) -> None:
        self.breakpoint = breakpoint
        label = f"break on {breakpoint.on}: {breakpoint.name}"
        super().__init__(
            value=breakpoint.enabled,
            description=label,
            indent=False,
            layout=ipw.Layout(width="auto", margin="0 16px 0 0"),
        )
        self.observe(self._switch, "value")

    def _switch(self, change: Any) -> None:
        self.breakpoint.enabled = change["new"]


def numbers(state: RunState) -> dict[str, View]:
    """The small views of a run by pane."""
    return {"status": views.status(state), "progress": views.progress(state), "queue": views.queue(state)}


def run_views(state: RunState, parent: RunState | None = None, timeline_periods: int = 2) -> dict[str, View]:
    """The views of a run by pane."""
    pictures = {"timeline": views.timeline(state, timeline_periods), "curves": views.curves(state, parent)}
    return numbers(state) | pictures


def dashboard_view(state: RunState, parent: RunState | None = None, timeline_periods: int = 2) -> View:
    """Everything the dashboard shows but its controls, as one View."""
    return joined(run_views(state, parent, timeline_periods).values())
