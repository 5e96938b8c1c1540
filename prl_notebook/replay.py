"""A finished run, loaded from its directory: the same views as a live session's, at any moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prl_notebook.engine.events import Event, read_events
from prl_notebook.engine.records import GroupRecord, completions_path, read_groups
from prl_notebook.engine.run_state import RunState
from prl_notebook.views.of_run import RunViews
from prl_notebook.views.scrub import Scrubber

if TYPE_CHECKING:
    from prl_notebook.widgets import ReplayPlayer


def load_run(run_dir: str | Path) -> LoadedRun:
    """Load a run directory; needs neither model nor tokenizer.

    Raises:
        FileNotFoundError: no events in this directory.
    """
    path = Path(run_dir)
    if not (path / "events.jsonl").is_file():
        raise FileNotFoundError(f"{path} is no run directory: it has no events.jsonl")
    return LoadedRun(path)


class LoadedRun(RunViews):
    """Display it to get a player with a slider over time."""

    parent = None

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.events: list[Event] = list(read_events(run_dir / "events.jsonl"))
        self._scrubber = Scrubber(self.events)
        self._time = self._scrubber.seconds

    @property
    def state(self) -> RunState:
        """The run at the chosen moment; at its end, if none was chosen with `at`."""
        return self._scrubber.at(self._time)

    def at(self, seconds: float) -> LoadedRun:
        """Choose a moment, in seconds since the run began; returns the run itself."""
        self._time = seconds
        return self

    @property
    def groups(self) -> Sequence[GroupRecord]:
        """Recorded completions of the period at the chosen moment."""
        period = self.state.period
        return [] if period is None else self.records(period)

    def records(self, period: int) -> list[GroupRecord]:
        """Recorded completions of a period; empty where there are none."""
        path = completions_path(self.run_dir, period)
        return read_groups(path) if path.exists() else []

    def player(self) -> ReplayPlayer:
        """The widget that is shown when a run is displayed."""
        from prl_notebook.widgets import ReplayPlayer

        return ReplayPlayer(self.events, self.records)

    def _shown(self) -> ReplayPlayer:
        return self.player()

    def __repr__(self) -> str:
        state = self.state
        return f"<run {self.run_dir}: {len(state.history)} periods, policy version {state.version}, {state.status}>"
