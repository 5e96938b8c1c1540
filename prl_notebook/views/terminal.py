"""The mini view for a terminal: one rich renderable of the run, redrawn by `prl run` and `prl demo` while they work."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prl_notebook.engine.run_state import PeriodState, RunState
from prl_notebook.views import analysis
from prl_notebook.views.base import number, percent, seconds
from prl_notebook.views.metric_curves import sparkline
from prl_notebook.views.period_progress import status, time_left, time_left_of_run

MARKS = {
    "waiting": ("·", "dim"),
    "generating": ("g", "blue"),
    "scoring": ("s", "magenta"),
    "queued": ("q", "yellow"),
    "trained": ("█", "green"),
}
MAX_CHIPS = 128


def render(state: RunState) -> RenderableType:
    """State, the groups of the period as one letter each, progress, idle time of both sides, tokens/s and reward."""
    parts: list[RenderableType] = [Text(status(state).text)]
    if state.current is not None:
        parts += [_chips(state.current), _bars(state.current, state), _numbers(state.current, state)]
    title = " · ".join(text for text in ("prl", state.task, state.model) if text)
    return Panel(Group(*parts), title=escape(title), title_align="left", expand=False, width=100)


def _chips(period: PeriodState) -> Text:
    line = Text()
    for g in period.groups[:MAX_CHIPS]:
        line.append(*MARKS[g.status])
    if len(period.groups) > MAX_CHIPS:
        line.append(f" … {len(period.groups) - MAX_CHIPS} more")
    line.append("   " + "  ".join(f"{mark} {name}" for name, (mark, _) in MARKS.items()), "dim")
    return line


def _bars(period: PeriodState, state: RunState) -> Table:
    table = Table.grid(padding=(0, 1))
    total = max(1, len(period.groups))
    for name, done in (
        ("generated", period.count("scoring", "queued", "trained")),
        ("trained", period.count("trained")),
    ):
        table.add_row(name, ProgressBar(total=total, completed=done, width=40), f"{done}/{total}")
    table.add_row("", time_left(period, state), "")
    if run_left := time_left_of_run(state):
        table.add_row("", run_left, "")
    return table


def _numbers(period: PeriodState, state: RunState) -> Table:
    costs = analysis.costs(period, state.t, analysis.worker_count(state))
    tokens = sum(g.tokens for g in period.groups)
    rewards = [metrics["reward"] for _, metrics in state.history if metrics.get("reward") is not None]
    table = Table.grid(padding=(0, 2))
    table.add_row("rollout idle", percent(costs.rollout_idle), "trainer idle", percent(costs.trainer_idle))
    table.add_row(
        "tokens/s", number(tokens / costs.seconds) if costs.seconds else "–", "overlap", seconds(costs.overlap)
    )
    if rewards:
        table.add_row("reward", number(rewards[-1]), "so far", sparkline(rewards))
    return table
