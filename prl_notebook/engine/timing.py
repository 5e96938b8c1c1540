"""Who was busy when: idle ratios, overlap and waits of a period, from the spans in its state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from prl_notebook.engine.run_state import PeriodState, Span

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint intervals covering the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Total seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Time covered by both of two lists of sorted, disjoint intervals."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def busy(spans: Iterable[Span], lane: str, kinds: tuple[str, ...] = ()) -> list[Interval]:
    """When a lane was busy (with one of `kinds`, if given)."""
    return union((s.start, s.end) for s in spans if s.lane == lane and (not kinds or s.kind in kinds))


def timing_metrics(period: PeriodState, end: float, workers: int) -> dict[str, float]:
    """Timing of a period that ends at `end` (run seconds).

    - step_time: seconds of the whole period
    - idle_ratio/rollout, idle_ratio/trainer: share of it in which a rollout worker (mean) or the trainer did nothing
    - overlap_ratio: share of the trainer's forward-backward time during which some worker was generating
    - timing_s/generation (first dispatch to last group), timing_s/training (sum of micro-steps), timing_s/rewards
    - timing_s/synchronous_estimate: generation, then training, then the rest: the same work without overlap
    - queue_wait_time_s: mean seconds a scored group waited to be trained; weight_sync_time_s: optimizer step's end to
      the last acknowledgement; buffer_qsize: mean depth of the rollout queue over time
    """
    spans, total = period.spans, end - period.started_t
    lanes = [f"rollout-{w}" for w in range(workers)]
    generating = [busy(spans, lane) for lane in lanes]
    anyone = union(i for intervals in (busy(spans, lane, ("generate",)) for lane in lanes) for i in intervals)
    training = busy(spans, "trainer", ("microstep",))
    trainer = busy(spans, "trainer")
    generation = anyone[-1][1] - anyone[0][0] if anyone else 0.0
    trained = length(training)
    stepped = max((s.end for s in spans if s.kind == "optimizer"), default=end)
    loaded = max((s.end for s in spans if s.kind == "load"), default=stepped)
    after = end - max([i[1] for i in training], default=end)
    waits = [g.trained_t - g.scored_t for g in period.groups if g.trained_t is not None and g.scored_t is not None]
    return {
        "step_time": total,
        "idle_ratio/rollout": 1 - sum(map(length, generating)) / (workers * total),
        "idle_ratio/trainer": 1 - length(trainer) / total,
        "overlap_ratio": length(intersection(anyone, training)) / trained if trained else 0.0,
        "timing_s/generation": generation,
        "timing_s/training": trained,
        "timing_s/rewards": length(busy(spans, "rewards")),
        "timing_s/synchronous_estimate": generation + trained + after,
        "queue_wait_time_s": sum(waits) / len(waits) if waits else 0.0,
        "weight_sync_time_s": max(0.0, loaded - stepped),
        "buffer_qsize": _mean_depth(period, end),
    }


def _mean_depth(period: PeriodState, end: float) -> float:
    changes = [(period.started_t, 0), *period.depth, (end, 0)]
    area = sum(depth * (after - t) for (t, depth), (after, _) in pairwise(changes))
    return area / (end - period.started_t)
