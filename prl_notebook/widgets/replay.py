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
        count = len(self._scrubber.events)
        # The slider counts events: every one can be stopped at, also two within a millisecond.
        self._moment = ipw.IntSlider(
            value=count, min=0, max=count, description="moment", readout=False, layout=ipw.Layout(width="60%")
        )
        self._clock = ipw.Label()
        ends = {f"end of period {period}": n for period, n in self._scrubber.period_ends.items()}
        self._jump = ipw.Dropdown(options={"go to ...": None, **ends}, layout=ipw.Layout(width="160px"))
        self._panes = Panes()
        self._completions = CompletionExplorer(loss_type=self.state.config.get("grpo", {}).get("loss_type"))
        self._moment.observe(self._draw, "value")
        self._jump.observe(self._go_to, "value")
        super().__init__([ipw.HBox([self._moment, self._clock, self._jump]), self._panes, self._completions])
        self._draw()

    @property
    def state(self) -> RunState:
        """The run at the slider's moment."""
        return self._scrubber.after(self._moment.value)

    def view(self) -> View:
        return dashboard_view(self.state)

    def _go_to(self, change: Any) -> None:
        if change["new"] is not None:
            self._moment.value = change["new"]

    def _draw(self, _: Any = None) -> None:
        state = self.state
        self._clock.value = f"{state.t:.2f} s of {self._scrubber.seconds:.2f} s"
        self._panes.show(run_views(state))
        if state.period is not None and state.period != self._period:
            self._period = state.period
            self._completions.load(self._records(state.period))
