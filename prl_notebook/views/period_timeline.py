"""The timeline: what every rollout worker, the reward process and the trainer did during a period, and who waited for
whom. What a period would have taken under the synchronous schedule is computed from the same durations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from markupsafe import Markup, escape

from prl_notebook.engine.run_state import DETAILED_PERIODS, PeriodState, RunState, Span
from prl_notebook.engine.timing import length, union
from prl_notebook.views import analysis
from prl_notebook.views.base import Same, View, percent, plural, render, seconds

KINDS = {
    "generate": "generate",
    "score": "score",
    "microstep": "micro-step (m)",
    "optimizer": "optimizer step",
    "publish": "publish weights",
    "load": "load weights",
    "wait": "idle",
    "fence": "fence: waits for the next policy version",
}
SHORT = {"optimizer": "opt", "publish": "pub", "load": "load"}
MAX_ROWS = 6
"""Groups that one worker samples at once are drawn below each other, at most this many; further ones overlap."""
ROW = 14
LABEL_FROM = 1.5
"""A bar carries its label from this width on, in percent of the track."""
KEPT_BARS = 4096
"""Bars kept as drawn: one that is done looks the same at the next update."""
BAR = '<span class="bar {}" style="margin:{}px 0 0 {}%;width:{}%;height:{}px" data-tip="{}">{}</span>'
"""Not a template of its own: that takes five times as long, and there are hundreds."""


@dataclass(frozen=True)
class Lane:
    name: str
    crowded: str
    """says so where bars overlap"""
    height: int
    idle: str
    bars: list[Markup]


@dataclass(frozen=True)
class Panel:
    period: PeriodState
    costs: analysis.Costs
    lanes: list[Lane]
    ticks: list[tuple[float, str]]
    """(percent of the track, label)"""
    waits: list[str]
    verdict: str
    finished: bool


def timeline(state: RunState, periods: int = 3) -> View:
    """Lanes of the newest `periods` periods (of those kept in detail), the newest first."""
    workers = analysis.worker_count(state)
    panels = [
        _drawn(p, state.t, workers) if p.finished_t is None else _finished(Same(p), workers)
        for p in reversed(state.periods[-periods:])
    ]
    if not panels:
        return View(render("empty", title="Timeline", message="No period has started yet."), "Timeline: no period yet")
    body = render("timeline", panels=[p.body for p in panels], kinds=KINDS)
    return View(body, "\n".join(p.text for p in panels))


@lru_cache(maxsize=2 * DETAILED_PERIODS)
def _finished(period: Same[PeriodState], workers: int) -> View:
    return _drawn(period.object, 0.0, workers)


def _drawn(period: PeriodState, now: float, workers: int) -> View:
    panel = _panel(period, now, workers)
    c = panel.costs
    lines = [
        f"Timeline, period {period.period}: {seconds(c.seconds)}, rollout idle {percent(c.rollout_idle)}, "
        f"trainer idle {percent(c.trainer_idle)}, overlap {seconds(c.overlap)}"
    ]
    lines += [f"  {text}" for text in (panel.verdict, *panel.waits) if text]
    return View(render("timeline_panel", p=panel), "\n".join(lines))


def _panel(period: PeriodState, now: float, workers: int) -> Panel:
    costs = analysis.costs(period, now, workers)
    end = analysis.end_of(period, now)
    shown = _track_seconds(period, end)
    scale = 100 / shown
    lanes = [
        _lane(lane, spans, [w for w in costs.waits if w.lane == lane], period, end, scale)
        for lane, spans in analysis.spans_by_lane(period, now, workers).items()
    ]
    waits = [f"{w.lane} waited {seconds(w.seconds)} for {w.reason}" for w in costs.waits[:4]]
    return Panel(period, costs, lanes, _ticks(shown), waits, _verdict(period, costs), period.finished_t is not None)


def _track_seconds(period: PeriodState, end: float) -> float:
    """Length of the track. That of a period under way grows in steps, so that a bar that is done stays where it is."""
    length = max(end - period.started_t, 1e-9)
    return length if period.finished_t is not None else 2 ** (math.ceil(2 * math.log2(length)) / 2)


def _verdict(period: PeriodState, costs: analysis.Costs) -> str:
    if costs.synchronous is None:
        return ""
    if period.schedule == "synchronous":
        return "Synchronous schedule: the trainer started after the last group, by request."
    return (
        f"The synchronous schedule would have taken about {seconds(costs.synchronous)} "
        f"({costs.synchronous / costs.seconds:.2f}x) for the same work."
    )


def _lane(
    name: str, spans: list[Span], waits: list[analysis.Wait], period: PeriodState, end: float, scale: float
) -> Lane:
    rows: list[float] = []
    bars = []
    hidden = 0
    start = period.started_t
    for span in sorted(spans, key=lambda s: s.start):
        row = next((i for i, free in enumerate(rows) if free <= span.start + 1e-6), len(rows))
        hidden += row == MAX_ROWS
        row = min(row, MAX_ROWS - 1)
        rows[row : row + 1] = [max(span.end, rows[row]) if row < len(rows) else span.end]
        group = None if span.group is None else period.groups[span.group]
        sampled = (group.lengths, group.version) if group else ((), None)
        bars.append(_span_bar(Same(span), *sampled, row, start, scale))
    height = ROW * max(1, len(rows))
    bars += [_wait_bar(w, height, start, scale) for w in waits]
    idle = 1 - length(union((s.start, s.end) for s in spans)) / max(end - start, 1e-9)
    crowded = f"{hidden} more in the last row" if hidden else ""
    return Lane(name, crowded, height, percent(max(0.0, idle)), bars)


@lru_cache(maxsize=KEPT_BARS)
def _span_bar(
    of: Same[Span], lengths: tuple[int, ...], version: int | None, row: int, started: float, scale: float
) -> Markup:
    span = of.object
    left, width = _place(span.start, span.end, started, scale)
    begin = seconds(max(0.0, span.start - started))
    tip = f"{span.lane} · {span.label} · {seconds(span.end - span.start)} · from {begin} on"
    css: str = span.kind
    label = SHORT.get(span.kind, "")
    if span.kind == "microstep":
        label = "m" + span.label.partition(":")[0].rpartition(" ")[2]
    elif span.group is not None:
        label = str(span.group)
        if lengths:
            tip += f" · {plural(sum(lengths), 'token')}, longest {max(lengths)}, policy version {version}"
        else:
            css = f"{span.kind} unfinished"
    return _bar(css, left, width, row * ROW, ROW - 1, label, tip)


@lru_cache(maxsize=KEPT_BARS)
def _wait_bar(wait: analysis.Wait, height: int, started: float, scale: float) -> Markup:
    kind, label = ("fence", "fence") if "fence" in wait.reason else ("wait", "idle")
    left, width = _place(wait.start, wait.end, started, scale)
    return _bar(kind, left, width, 0, height, label, f"{wait.lane} waited {seconds(wait.seconds)} for {wait.reason}")


def _bar(css: str, left: float, width: float, top: int, height: int, label: str, tip: str) -> Markup:
    """`left` and `width` in percent of the track, `top` and `height` in pixels."""
    if width < LABEL_FROM * max(1, len(label) / 2):
        label = ""
    return Markup(BAR.format(css, top, left, width, height, escape(tip), escape(label)))


def _place(start: float, end: float, started: float, scale: float) -> tuple[float, float]:
    start = max(start, started)
    return round((start - started) * scale, 2), round(max(0.0, end - start) * scale, 2)


def _ticks(duration: float) -> list[tuple[float, str]]:
    """About six round times."""
    if duration <= 0:
        return []
    magnitude = 10.0 ** math.floor(math.log10(duration / 6))
    step = next(magnitude * m for m in (1, 2, 5, 10) if duration <= 6 * magnitude * m)
    return [(100 * i * step / duration, f"{i * step:g} s") for i in range(7) if i * step < 0.96 * duration]
