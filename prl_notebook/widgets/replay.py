"""A finished run with a slider over time: every view at any moment, and the completions of the period."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipywidgets as ipw

from prl_notebook.engine.events import Event
from prl_notebook.engine.records import GroupRecord
from prl_notebook.engine.run_state import RunState
from prl_notebook.views import View
from prl_notebook.views.scrub import Scrubber
from prl_notebook.widgets.bundle import Bundled
from prl_notebook.widgets.completions import CompletionExplorer
from prl_notebook.widgets.dashboard import dashboard_view, run_views
from prl_notebook.widgets.panes import Panes

Records = Callable[[int], Sequence[GroupRecord]]
"""The completions of a period; empty where none were recorded."""


class ReplayPlayer(Bundled, ipw.VBox):
    """
    Args:
        events: of the run, in order.
        records: called with a period when its completions are looked at.
    """

    def __init__(self, events: Iterable[Event], records: Records = lambda period: ()) -> None:
        self._scrubber = Scrubber(events)
        self._records = records
        self._period: int | None = None
        end = self._scrubber.seconds
        self._time = ipw.FloatSlider(
            value=end,
            min=0.0,
            max=end,
            step=max(end / 1000, 0.01),
            description="time (s)",
            layout=ipw.Layout(width="70%"),
        )
        ends = {f"end of period {period}": t for period, t in self._scrubber.period_ends.items()}
        self._jump = ipw.Dropdown(options={"go to ...": None, **ends}, layout=ipw.Layout(width="160px"))
        self._panes = Panes()
        self._completions = CompletionExplorer(loss_type=self.state.config.get("grpo", {}).get("loss_type"))
        self._time.observe(self._draw, "value")
        self._jump.observe(self._go_to, "value")
        super().__init__([ipw.HBox([self._time, self._jump]), self._panes, self._completions])
        self._draw()

    @property
    def state(self) -> RunState:
        """The run at the slider's moment."""
        return self._scrubber.at(self._time.value)

    def view(self) -> View:
        return dashboard_view(self.state)

    def _go_to(self, change: Any) -> None:
        if change["new"] is not None:
            self._time.value = change["new"]

    def _draw(self, _: Any = None) -> None:
        state = self.state
        self._panes.show(**run_views(state))
        if state.period is not None and state.period != self._period:
            self._period = state.period
            self._completions.load(self._records(state.period))
