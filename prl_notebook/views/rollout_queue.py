"""The rollout queue: every group of the period on its way from waiting to trained, and the queue's depth over time."""

from __future__ import annotations

from dataclasses import dataclass

from prl_notebook.engine.run_state import GroupState, PeriodState, RunState
from prl_notebook.views import analysis
from prl_notebook.views.base import View, number, plural, render, seconds

STAGES = (
    ("waiting", "not sent to a worker yet"),
    ("generating", "a rollout worker samples it"),
    ("scoring", "complete; the reward process has it"),
    ("queued", "scored; waits for the trainer or for the end of its micro-step"),
    ("trained", "in the gradient"),
)
COMPACT_ABOVE = 64
"""Above this many groups a chip shows its number only; the rest is in the read-out."""
DEPTH_WIDTH, DEPTH_HEIGHT = 600, 60


@dataclass(frozen=True)
class Chip:
    label: str
    version: str
    """policy version that samples it, as v12; empty while it waits"""
    tip: str
    done: int
    """percent"""
    late: bool


def queue(state: RunState) -> View:
    """Groups of the current period by stage, stragglers named, queue depth over time."""
    period = state.current
    if period is None:
        return View(
            render("empty", title="Rollout queue", message="No period has started yet."), "Rollout queue: no period yet"
        )
    late = analysis.stragglers(period, state.t)
    compact = len(period.groups) > COMPACT_ABOVE
    late_groups = {g.group for g in late}
    stages = [
        (
            name,
            meaning,
            [_chip(g, period, state.t, compact, g.group in late_groups) for g in period.groups if g.status == name],
        )
        for name, meaning in STAGES
    ]
    straggling = [
        f"group {g.group} on rollout-{g.worker}: {g.done} of {period.generations} done "
        f"after {seconds(state.t - (g.dispatched_t or 0.0))}"
        for g in late
    ]
    body = render(
        "queue",
        period=period,
        stages=stages,
        compact=compact,
        stragglers=straggling,
        depth=_depth_path(period, state.t),
        depth_max=max((d for _, d in period.depth), default=0),
        depth_now=period.depth[-1][1] if period.depth else 0,
        duration=seconds(analysis.end_of(period, state.t) - period.started_t),
        width=DEPTH_WIDTH,
        height=DEPTH_HEIGHT,
    )
    lines = [f"Rollout queue, period {period.period} (policy version {period.version})"]
    lines += [f"  {name:<10} {len(chips):>4}  {_numbers(chips)}" for name, _, chips in stages]
    lines += [f"  straggler: {text}" for text in straggling]
    return View(body, "\n".join(lines))


def _chip(g: GroupState, period: PeriodState, now: float, compact: bool, late: bool) -> Chip:
    label = str(g.group)
    if not compact:
        if g.status == "generating":
            label = f"{g.group} · w{g.worker} · {g.done}/{period.generations}"
        elif g.status in ("queued", "trained") and g.reward_mean is not None:
            label = f"{g.group} · {number(g.reward_mean)}"
    done = round(100 * g.done / period.generations) if g.status == "generating" else 100
    version = "" if g.version is None else f"v{g.version}"
    return Chip(label + (" ⚠" if late or g.invalid else ""), version, _tip(g, period, now, late), done, late)


def _tip(g: GroupState, period: PeriodState, now: float, late: bool) -> str:
    parts = [f"group {g.group}: {g.status}", f"prompt {plural(g.prompt_tokens, 'token')}"]
    if g.worker is not None:
        parts.append(
            f"rollout-{g.worker}, policy version {g.version}, {g.done} of {period.generations} done, "
            f"{plural(g.tokens, 'token')}"
        )
    if g.dispatches > 1:
        parts.append(f"sent {g.dispatches} times (a worker died; same seeds)")
    if g.dispatched_t is not None:
        verb = "generating for" if g.finished_t is None else "generated in"
        parts.append(f"{verb} {seconds((g.finished_t or now) - g.dispatched_t)}" + (" (straggler)" if late else ""))
    if g.finish_reasons and (cut := g.finish_reasons.count("length")):
        parts.append(f"{cut} cut at the length limit")
    if g.scored_t is not None:
        parts.append(
            f"reward mean {number(g.reward_mean)}, std {number(g.reward_std)}"
            + (" (no gradient)" if g.reward_std == 0 else "")
        )
    if g.invalid:
        parts.append(f"{g.invalid} without a valid reward (a reward function failed)")
    if g.scored_t is not None and g.trained_t is not None:
        parts.append(f"trained in micro-step {g.micro_step}, {seconds(g.trained_t - g.scored_t)} after scoring")
    return " · ".join(parts)


def _numbers(chips: list[Chip]) -> str:
    shown = ", ".join(f"{c.label} {c.version}".rstrip() for c in chips[:8])
    return shown + (f", … {len(chips) - 8} more" if len(chips) > 8 else "")


def _depth_path(period: PeriodState, now: float) -> str:
    """SVG path of the queue depth as steps."""
    start, end = period.started_t, analysis.end_of(period, now)
    top = max((d for _, d in period.depth), default=0)
    if not top or end <= start:
        return ""
    steps = [f"M0 {DEPTH_HEIGHT}"]
    for t, depth in period.depth:
        steps.append(f"H{DEPTH_WIDTH * (t - start) / (end - start):.1f}V{DEPTH_HEIGHT * (1 - depth / top):.1f}")
    return "".join(steps) + f"H{DEPTH_WIDTH}"
