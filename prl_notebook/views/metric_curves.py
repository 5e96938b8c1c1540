"""Curves of every metric over the periods, as small SVG charts: a few kilobytes each, where plotly needs megabytes.

`curves_figure` gives the same charts as a plotly figure to zoom into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from prl_notebook.engine.run_state import RunState
from prl_notebook.views.base import View, number, render

WIDTH, HEIGHT = 300, 90
MAX_POINTS = 80
"""More periods than this are drawn as blocks of periods, each by its last value; the first period and the last one are
always drawn."""
MAX_SERIES = 6

ZERO_LOSS = (
    "A loss of 0 is expected here, and a negative one is no mistake: with one update per period the ratio is exactly "
    "1, so the loss is minus the mean advantage, 0 where completions weigh the same and else a matter of their "
    "lengths. Its gradient does not vanish: watch reward and grad_norm instead."
)
FIRST_RATIO = "Clip ratios stay 0 with num_iterations=1: the policy is still the one that sampled."

# (section, title, patterns of metric names, note). A metric belongs to the first chart that matches it.
CHARTS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("train", "Reward", ("reward",), ""),
    ("train", "Reward per function (mean)", ("rewards/*/mean",), ""),
    ("train", "Reward spread", ("reward_std", "frac_reward_zero_std", "rewards/*/std"), ""),
    ("train", "Gradient norm", ("grad_norm",), ""),
    ("train", "Loss", ("loss",), ZERO_LOSS),
    (
        "train",
        "Completion length (tokens)",
        ("completions/mean_length", "completions/min_length", "completions/max_length"),
        "",
    ),
    ("train", "Cut at the length limit", ("completions/clipped_ratio",), ""),
    ("train", "Length of finished completions", ("completions/*_terminated_length",), ""),
    ("train", "Learning rate", ("learning_rate",), ""),
    ("evaluation", "Evaluation", ("eval_*",), ""),
    ("stability", "KL to the reference", ("kl",), ""),
    ("stability", "Entropy", ("entropy",), ""),
    ("stability", "Clip ratios", ("clip_ratio/*", "cispo_clip_ratio"), FIRST_RATIO),
    ("stability", "Sampler and trainer: log-prob difference", ("sampling/sampling_logp_difference/*",), ""),
    ("stability", "Sampler and trainer: probability ratio", ("sampling/importance_sampling_ratio/*",), ""),
    ("stability", "Completions without a valid reward", ("rewards/invalid",), ""),
    ("performance", "Idle share of each side, overlap", ("idle_ratio/*", "overlap_ratio"), ""),
    ("performance", "Time of a period (s)", ("step_time",), ""),
    ("performance", "Tokens per second", ("*tokens_per_second*",), ""),
    ("performance", "Waiting and weight sync (s)", ("queue_wait_time_s", "weight_sync_time_s"), ""),
    ("performance", "Queue depth", ("buffer_qsize",), ""),
    ("performance", "Parts of a period (s)", ("timing_s/*",), ""),
    ("performance", "Tokens so far", ("num_tokens",), ""),
    ("performance", "Policy version", ("policy_version",), ""),
)
QUESTIONS = {
    "train": "Does it learn?",
    "evaluation": "Does it hold on other data?",
    "stability": "Is it about to break?",
    "performance": "Where does the time go?",
    "more": "Everything else that was logged",
}


@dataclass(frozen=True)
class Series:
    name: str
    periods: list[int]
    values: list[float]

    @property
    def finite(self) -> list[float]:
        return [v for v in self.values if math.isfinite(v)]


@dataclass(frozen=True)
class Chart:
    section: str
    title: str
    note: str
    series: list[Series]


def charts(state: RunState, most: int = MAX_POINTS) -> list[Chart]:
    """Every logged metric, gathered into charts in the order of `CHARTS`, with about `most` points or fewer each."""
    points = _points(state, most)
    names = sorted({name for _, metrics in points for name, value in metrics.items() if value is not None})
    found = []
    for section, title, patterns, note in CHARTS:
        matching = [n for n in names if any(fnmatchcase(n, p) for p in patterns)]
        names = [n for n in names if n not in matching]
        found += [
            Chart(section, title, note, [_series(points, n) for n in matching[i : i + MAX_SERIES]])
            for i in range(0, len(matching), MAX_SERIES)
        ]
    return found + [Chart("more", n, "", [_series(points, n)]) for n in names]


def curves(state: RunState, parent: RunState | None = None) -> View:
    """Small charts of all metrics, grouped into train, evaluation, stability and performance.

    With the state of the run this one was forked from, its curves are drawn beside, thin and grey.
    """
    found = charts(state)
    if not found:
        return View(
            render("empty", title="Curves", message="No period has finished yet."), "Curves: no finished period yet"
        )
    before = _points(parent) if parent else []
    sections = [
        (name, question, [_drawn(c, before) for c in found if c.section == name])
        for name, question in QUESTIONS.items()
        if any(c.section == name for c in found)
    ]
    lines = [f"Curves over {len(state.history)} periods (first -> last)"]
    lines += [f"  {s.name:<42} {number(s.values[0]):>10} -> {number(s.values[-1])}" for c in found for s in c.series]
    return View(
        render("curves", sections=sections, forked=parent is not None, width=WIDTH, height=HEIGHT), "\n".join(lines)
    )


def curves_figure(state: RunState) -> Any:
    """The charts as one `plotly.graph_objects.Figure`, two columns, for zooming and reading values."""
    from plotly.subplots import make_subplots  # 4.8 MB of JavaScript come with it, so only on request

    found = charts(state, most=max(1, len(state.history)))
    rows = max(1, math.ceil(len(found) / 2))
    figure = make_subplots(rows=rows, cols=2, subplot_titles=[c.title for c in found] or ["no finished period yet"])
    for i, chart in enumerate(found):
        for s in chart.series:
            figure.add_scatter(x=s.periods, y=s.values, name=s.name, row=i // 2 + 1, col=i % 2 + 1)
    return figure.update_layout(
        height=240 * rows, margin={"l": 40, "r": 20, "t": 40, "b": 30}, legend={"font_size": 10}
    )


def _points(state: RunState, most: int = MAX_POINTS) -> list[tuple[int, dict[str, float]]]:
    """(period, metrics) of what is drawn."""
    history = state.history
    if len(history) <= most:
        return list(history)
    step = math.ceil(len(history) / most)
    blocks = [history[:1], *(history[i : i + step] for i in range(1, len(history), step))]
    merged = []
    for block in blocks:
        metrics: dict[str, float] = {}
        for _, logged in block:
            metrics |= logged  # so that a metric that is logged now and then is not missed
        merged.append((block[-1][0], metrics))
    return merged


def _series(points: list[tuple[int, dict[str, float]]], name: str) -> Series:
    logged = [(period, metrics[name]) for period, metrics in points if metrics.get(name) is not None]
    return Series(name, [p for p, _ in logged], [float(v) for _, v in logged])


def _drawn(chart: Chart, parent: list[tuple[int, dict[str, float]]]) -> dict[str, Any]:
    before = [_series(parent, s.name) for s in chart.series]
    before = [s for s in before if s.periods]
    values = [v for s in chart.series + before for v in s.finite] or [0.0]
    low, high = min(values), max(values)
    first = min(s.periods[0] for s in chart.series + before)
    last = max(s.periods[-1] for s in chart.series + before)
    flat = high - low < 1e-12 + 1e-6 * abs(high)
    return {
        "title": chart.title,
        "note": chart.note,
        "low": "" if flat else number(low),
        "high": number(high) if flat or number(high) != number(low) else f"{number(low)} + {number(high - low)}",
        "parent": [_path(s, first, last, low, high, flat) for s in before],
        "first": first,
        "last": last,
        "lines": [
            (i, s.name, number(s.values[-1]), _path(s, first, last, low, high, flat))
            for i, s in enumerate(chart.series)
        ],
    }


def _path(s: Series, first: int, last: int, low: float, high: float, flat: bool) -> str:
    """SVG path; a single period becomes a short dash, a missing value a gap."""
    across = WIDTH / max(1, last - first)
    if flat and len(s.finite) == len(s.values) > 1:
        return f"M{across * (s.periods[0] - first):.0f} {HEIGHT / 2}H{across * (s.periods[-1] - first):.0f}"
    up = 0.0 if flat else HEIGHT / (high - low)
    bottom = HEIGHT / 2 if flat else HEIGHT + low * up
    path, pen = [], "M"
    for period, value in zip(s.periods, s.values, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        path.append(f"{pen}{across * (period - first):.0f} {bottom - up * value:.1f}")
        pen = "L"
    return "".join(path) + ("h6" if len(path) == 1 else "")


def sparkline(values: list[float], width: int = 40) -> str:
    """The newest `width` values as one line of text."""
    shown = [v for v in values[-width:] if math.isfinite(v)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(
        blocks[int((len(blocks) - 1) * (v - low) / (high - low))] if high > low else blocks[3] for v in shown
    )
