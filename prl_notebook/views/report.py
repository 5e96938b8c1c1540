"""One self-contained HTML file of a run: the views, static, without JavaScript, small enough for an e-mail."""

from __future__ import annotations

from collections.abc import Sequence

from prl_notebook.attention.costs import ModelDims
from prl_notebook.engine.records import GroupRecord
from prl_notebook.engine.run_state import DETAILED_PERIODS, RunState
from prl_notebook.views.attention_mask import layout_of, mask
from prl_notebook.views.base import CSS, View, render
from prl_notebook.views.metric_curves import curves
from prl_notebook.views.period_progress import progress, status
from prl_notebook.views.period_timeline import timeline
from prl_notebook.views.rollout_queue import queue
from prl_notebook.views.token_colors import Color, group, tokens

MAX_GROUPS = 4
MAX_LANE_BARS = 3000
"""Bars all timelines together may have; with more groups per period fewer periods are drawn."""
MAX_MASK_TOKENS = 16384


def report_html(state: RunState, records: Sequence[GroupRecord] = (), dims: ModelDims | None = None) -> str:
    """A page with status, curves, timelines, queue, the mask of one micro-step, and a few groups in detail.

    Args:
        records: groups of any periods; the most instructive ones (most and least advantage spread) are shown.
        dims: sizes of the model, to count operations.
    """
    groups_per_period = len(state.current.groups) if state.current else 1
    periods = max(1, min(DETAILED_PERIODS, MAX_LANE_BARS // (3 * groups_per_period)))
    views: list[View] = [status(state), progress(state), curves(state), timeline(state, periods), queue(state)]
    views += _mask(records, state, dims)
    for record in _instructive(records):
        views += [group(record), *_tokens(record, state)]
    title = f"prl run {state.run_dir}" if state.run_dir else "prl run"
    return str(render("report", title=title, css=CSS, bodies=[v.body for v in views], config=_settings(state)))


def _instructive(records: Sequence[GroupRecord]) -> list[GroupRecord]:
    """Groups that taught most, and one that taught nothing, in run order."""
    ranked = sorted(records, key=lambda r: -max((abs(c.advantage) for c in r.completions), default=0.0))
    chosen = ranked[: MAX_GROUPS - 1] + ranked[MAX_GROUPS - 1 :][-1:]
    return sorted(chosen, key=lambda r: (r.period, r.group))


def _tokens(record: GroupRecord, state: RunState) -> list[View]:
    """The completion with the largest advantage, coloured by its share of the loss where that was recorded."""
    if not record.completions:
        return []
    best = max(range(len(record.completions)), key=lambda k: record.completions[k].advantage)
    color: Color = "loss" if "loss" in record.completions[best].numbers else "advantage"
    loss_type = state.config.get("grpo", {}).get("loss_type")
    return [tokens(record, best, color, loss_type)]


def _mask(records: Sequence[GroupRecord], state: RunState, dims: ModelDims | None) -> list[View]:
    """Mask of the last recorded micro-step, or of its first groups where it is huge."""
    chosen: list[GroupRecord] = []
    size = 0
    last = max(((r.period, r.micro_step or 0) for r in records), default=None)
    for record in [r for r in records if (r.period, r.micro_step or 0) == last][: MAX_GROUPS * 4]:
        size += len(record.prompt_ids) + sum(len(c.ids) for c in record.completions)
        if chosen and size > MAX_MASK_TOKENS:
            break
        chosen.append(record)
    return [mask(layout_of(chosen, state), dims)] if chosen else []


def _settings(state: RunState) -> list[tuple[str, str]]:
    return [
        (f"{section}.{name}", str(value)) for section, values in state.config.items() for name, value in values.items()
    ]
