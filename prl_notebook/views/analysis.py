"""Numbers that views derive from a period: idle time of both sides, overlap, who waited for whom, stragglers.

All times are seconds. A lane is busy where at least one of its spans covers the moment; a rollout worker that samples
several groups at once is busy once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import mean, median

from prl_notebook.engine.run_state import GroupState, PeriodState, RunState, Span
from prl_notebook.engine.timing import Interval, timing_metrics, union

STRAGGLER_FACTOR = 2.0
"""A group is called a straggler when it has been generating this many times the median of the finished ones."""


@dataclass(frozen=True)
class Wait:
    """Time one side stood idle, and why."""

    lane: str
    start: float
    end: float
    reason: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Costs:
    """Where the time of one period went."""

    seconds: float
    rollout_idle: float
    """share of the period a rollout worker stood idle, mean over workers"""
    trainer_idle: float
    overlap: float
    """seconds of forward and backward passes during which some rollout worker was generating"""
    synchronous: float | None
    """seconds the same work takes when the trainer starts after the last group; None before the period's end"""
    waits: tuple[Wait, ...]
    """longest first"""


def gaps(busy: list[Interval], start: float, end: float) -> list[Interval]:
    """What the disjoint, sorted intervals `busy` leave open of [start, end]."""
    edges = [start, *(min(max(edge, start), end) for interval in busy for edge in interval), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def spans_by_lane(period: PeriodState, now: float, workers: int) -> dict[str, list[Span]]:
    """The period's spans per lane, groups that are still generating included; empty lanes too, in the order drawn."""
    names = [*(f"rollout-{w}" for w in range(workers)), "rewards", "trainer"]
    lanes: dict[str, list[Span]] = {name: [] for name in names}
    for span in period.spans:
        lanes[span.lane].append(span)
    for g in period.groups:
        if g.status == "generating" and g.dispatched_t is not None:
            label = f"group {g.group}: {g.done} of {period.generations} done so far"
            lanes[f"rollout-{g.worker}"].append(
                Span(f"rollout-{g.worker}", "generate", g.dispatched_t, now, label, g.group)
            )
    return lanes


def worker_count(state: RunState) -> int:
    """Rollout workers of the run; at least 1."""
    return max(state.workers, default=0) + 1


def end_of(period: PeriodState, now: float) -> float:
    return now if period.finished_t is None else period.finished_t


def costs(period: PeriodState, now: float, workers: int) -> Costs:
    """Where the time went up to `now` or the period's end, with `workers` rollout workers."""
    end = end_of(period, now)
    length = end - period.started_t
    if length <= 0:
        return Costs(0.0, 0.0, 0.0, 0.0, None, ())
    lanes = spans_by_lane(period, now, workers)
    spans = tuple(span for lane in lanes.values() for span in lane)
    metrics = timing_metrics(replace(period, spans=spans), end, workers)
    busy = {lane: union((s.start, s.end) for s in lane_spans) for lane, lane_spans in lanes.items()}
    waits = [*_trainer_waits(period, busy["trainer"], end)]
    for lane in lanes:
        if lane.startswith("rollout"):
            waits += _worker_waits(period, lane, busy[lane], end)
    return Costs(
        seconds=length,
        rollout_idle=metrics["idle_ratio/rollout"],
        trainer_idle=metrics["idle_ratio/trainer"],
        overlap=metrics["overlap_ratio"] * metrics["timing_s/training"],
        synchronous=metrics["timing_s/synchronous_estimate"] if period.finished_t is not None else None,
        waits=tuple(sorted((w for w in waits if w.seconds > 0.01 * length), key=lambda w: -w.seconds)),
    )


def _trainer_waits(period: PeriodState, busy: list[Interval], end: float) -> Iterable[Wait]:
    for a, b in gaps(busy, period.started_t, end):
        arrived = [g for g in period.groups if g.scored_t is not None and g.scored_t <= b]
        if b == end and busy and period.count("trained") == len(period.groups):
            reason = "the rollout workers to load the new version"
        elif b == end:
            reason = "the next group"
        elif arrived:
            last = max(arrived, key=lambda g: g.scored_t or 0.0)
            reason = f"group {last.group} from rollout-{last.worker}"
        else:
            reason = "the rollout workers"
        yield Wait("trainer", a, b, reason)


def _worker_waits(period: PeriodState, lane: str, busy: list[Interval], end: float) -> Iterable[Wait]:
    """A worker without work waits for the others' last groups, then (at the fence) for the trainer."""
    sampling = [g for g in period.groups if g.status == "generating" or g.finished_t is not None]
    last_group = max(sampling, key=lambda g: end if g.finished_t is None else g.finished_t, default=None)
    if last_group is None:
        return
    sampled = end if last_group.finished_t is None else last_group.finished_t
    for a, b in gaps(busy, period.started_t, end):
        others = min(b, sampled)
        if a < others and last_group.worker is not None and f"rollout-{last_group.worker}" != lane:
            yield Wait(lane, a, others, f"group {last_group.group} on rollout-{last_group.worker}")
        if max(a, sampled) < b:
            yield Wait(lane, max(a, sampled), b, "the trainer (fence: no prompt of the next version goes out yet)")


def stragglers(period: PeriodState, now: float) -> list[GroupState]:
    """Groups that generate for much longer than the others of the period took; slowest first."""
    durations = [
        g.finished_t - g.dispatched_t for g in period.groups if g.finished_t is not None and g.dispatched_t is not None
    ]
    if len(durations) < 3:
        return []
    limit = STRAGGLER_FACTOR * median(durations)
    late = [
        g
        for g in period.groups
        if g.status == "generating" and g.dispatched_t is not None and now - g.dispatched_t > limit
    ]
    return sorted(late, key=lambda g: g.dispatched_t or 0.0)


def remaining_of_run(state: RunState) -> float | None:
    """Estimated seconds until the goal of the run, from the mean of the periods kept in detail; None if unknown."""
    if not state.periods_to_go:
        return None
    lengths = [p.finished_t - p.started_t for p in state.periods if p.finished_t is not None]
    current = state.current
    if current is None or current.finished_t is not None:
        return state.periods_to_go * mean(lengths) if lengths else None
    left = remaining(current, state.periods[:-1], state.t)
    if left is None:
        return None
    return left + (state.periods_to_go - 1) * (mean(lengths) if lengths else state.t - current.started_t + left)


def remaining(period: PeriodState, earlier: Iterable[PeriodState], now: float) -> float | None:
    """Estimated seconds to the period's end: from the periods before it, else from its own pace; None if unknown."""
    if period.finished_t is not None:
        return 0.0
    elapsed = now - period.started_t
    lengths = [p.finished_t - p.started_t for p in earlier if p.finished_t is not None]
    if lengths:
        return max(0.0, median(lengths) - elapsed)
    done = sum(g.done for g in period.groups) / (len(period.groups) * period.generations)
    pace = (done + period.count("trained") / len(period.groups)) / 2
    return elapsed * (1 - pace) / pace if pace else None
