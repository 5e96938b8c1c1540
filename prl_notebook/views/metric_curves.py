"""Curves of every metric over the periods, as small SVG charts: a few kilobytes each, where plotly needs megabytes.

`curves_figure` gives the same charts as a plotly figure to zoom into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from prl_notebook.engine.run_state import RunState
from prl_notebook.views.base import View, number, render

WIDTH, HEIGHT = 300, 90
MAX_POINTS = 60
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
    periods: tuple[int, ...]
    values: list[float]

    @cached_property
    def finite(self) -> list[float]:
        return self.values if math.isfinite(sum(self.values)) else [v for v in self.values if math.isfinite(v)]


@dataclass(frozen=True)
class Chart:
    section: str
    title: str
    note: str
    series: list[Series]


def charts(state: RunState, most: int = MAX_POINTS) -> list[Chart]:
    """Every logged metric, gathered into charts in the order of `CHARTS`, with about `most` points or fewer each."""
    points = _points(state, most)
    periods = tuple(period for period, _ in points)
    logged = {n: s for n in set().union(*(m for _, m in points)) if (s := _series(points, n, periods)).periods}
    return [
        Chart(section, title, note, [logged[n] for n in names])
        for section, title, note, names in _arranged(tuple(sorted(logged)))
    ]


@lru_cache(maxsize=16)
def _arranged(names: tuple[str, ...]) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(section, title, note, names of its metrics) of every chart."""
    found = []
    for section, title, patterns, note in CHARTS:
        matching = tuple(n for n in names if any(fnmatchcase(n, p) for p in patterns))
        names = tuple(n for n in names if n not in matching)
        found += [(section, title, note, matching[i : i + MAX_SERIES]) for i in range(0, len(matching), MAX_SERIES)]
    return found + [("more", n, "", (n,)) for n in names]


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
        period, metrics = block[-1]
        for _, logged in reversed(block):
            if logged.keys() != metrics.keys():
                metrics = {**logged, **metrics}  # a metric that is logged now and then is not missed
        merged.append((period, metrics))
    return merged


def _series(points: list[tuple[int, dict[str, float]]], name: str, periods: tuple[int, ...]) -> Series:
    """`periods` are those of `points`, as all series without gaps share them."""
    values = [metrics.get(name) for _, metrics in points]
    if None in values:
        periods = tuple(p for p, v in zip(periods, values, strict=True) if v is not None)
    return Series(name, periods, [float(v) for v in values if v is not None])


def _drawn(chart: Chart, parent: list[tuple[int, dict[str, float]]]) -> dict[str, Any]:
    of_parent = tuple(period for period, _ in parent)
    before = [_series(parent, s.name, of_parent) for s in chart.series]
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
    xs = _across(s.periods, first, last)
    if flat and len(s.finite) == len(s.values) > 1:
        return f"M{xs[0]} {HEIGHT / 2}H{xs[-1]}"
    up = 0.0 if flat else HEIGHT / (high - low)
    bottom = HEIGHT / 2 if flat else HEIGHT + low * up
    points = zip(xs, s.values, strict=True)
    path = ""
    for drawn, run in [(True, points)] if s.finite is s.values else groupby(points, lambda p: math.isfinite(p[1])):
        if drawn:
            path += "M" + "L".join([f"{x} {bottom - up * value:.1f}" for x, value in run])
    return path + ("h6" if len(s.finite) == 1 else "")


@lru_cache(maxsize=64)
def _across(periods: tuple[int, ...], first: int, last: int) -> list[str]:
    """x of each period, for all the metrics that were logged in the same ones."""
    across = WIDTH / max(1, last - first)
    return [f"{across * (period - first):.0f}" for period in periods]


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
