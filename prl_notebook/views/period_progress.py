"""Where a run stands: its state in one line, and how far the current period is."""

from __future__ import annotations

from prl_notebook.engine.run_state import PeriodState, RunState
from prl_notebook.views import analysis
from prl_notebook.views.base import View, number, plural, render, rough, seconds

LEADING = (
    "reward",
    "reward_std",
    "grad_norm",
    "kl",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "step_time",
)
"""Metrics compared with the period before, in this order (prime-rl's overview leads with reward and grad_norm too)."""
SHOWN_MICRO_STEPS = 4


def status(state: RunState) -> View:
    """State, policy version of every process, and whatever needs attention."""
    workers = [
        (f"rollout-{w}", s.version, s.version == state.version, s.checksum) for w, s in sorted(state.workers.items())
    ]
    dead = [p for p in state.processes.values() if not p.alive and p.last_reason]
    headline = _headline(state)
    body = render("status", state=state, headline=headline, workers=workers, dead=dead, notices=state.notices[-3:])
    lines = [headline, f"policy version {state.version}"]
    lines += [f"{name} holds version {version}" for name, version, current, _ in workers if not current]
    lines += [f"FAILED: {state.failure}"] if state.failure else []
    lines += [f"waiting for {text}" for text in state.stalled]
    lines += [f"{p.name} died: {p.last_reason}" for p in dead]
    lines += [f"note: {text}" for _, text in state.notices[-3:]]
    return View(body, "\n".join(lines))


def _headline(state: RunState) -> str:
    where = "before the first period" if state.period is None else f"period {state.period}"
    if state.status == "paused":
        stop = f" at breakpoint {state.breakpoint}" if state.breakpoint else ""
        return f"paused{stop}: {state.paused_at or where}"
    return f"{state.status}, {where}" + (f", goal: {state.goal}" if state.goal else "")


def progress(state: RunState) -> View:
    """How much of the period is generated, scored and trained, time left, micro-steps, metrics beside the last ones."""
    period = state.current
    if period is None:
        return View(render("empty", title="Period", message="No period has started yet."), "Progress: no period yet")
    total = len(period.groups)
    meters = [
        ("generated", "generating", period.count("scoring", "queued", "trained")),
        ("scored", "queued", period.count("queued", "trained")),
        ("trained", "trained", period.count("trained")),
    ]
    completions = sum(g.done for g in period.groups)
    left, run_left = time_left(period, state), time_left_of_run(state)
    metrics = _compared(state)
    body = render(
        "progress",
        period=period,
        meters=[(name, css, done, round(100 * done / total) if total else 0) for name, css, done in meters],
        total=total,
        completions=f"{completions:,} of {plural(total * period.generations, 'completion')}",
        tokens=sum(g.tokens for g in period.groups),
        left=left,
        run_left=run_left,
        micro_steps=period.micro_steps[-SHOWN_MICRO_STEPS:],
        hidden=max(0, len(period.micro_steps) - SHOWN_MICRO_STEPS),
        metrics=metrics,
        last=state.history[-1][0] if state.history else None,
    )
    counts = ", ".join(f"{name} {done}/{total}" for name, _, done in meters)
    lines = [f"Period {period.period}: {counts}; {left}"] + [f"  {run_left}"] * bool(run_left)
    lines += [f"  {name} {now} (before: {before})" for name, now, before, _ in metrics]
    return View(body, "\n".join(lines))


def time_left(period: PeriodState, state: RunState) -> str:
    """What is left of a period, in words."""
    if period.finished_t is not None:
        return f"finished in {seconds(period.finished_t - period.started_t)}"
    if state.status in ("failed", "closed"):
        return f"not finished: the run {'has failed' if state.status == 'failed' else 'was closed'}"
    left = analysis.remaining(period, state.periods[:-1], state.t)
    return "time left not known yet" if left is None else f"about {rough(left)} left"


def time_left_of_run(state: RunState) -> str:
    """When the goal of the run is expected to be reached, in words; empty without a goal of whole periods."""
    if not state.periods_to_go or state.status != "running":
        return ""
    left = analysis.remaining_of_run(state)
    when = "its end is not known yet" if left is None else f"ends in about {rough(left)}"
    return f"The run: {plural(state.periods_to_go, 'period')} to go, {when}"


def _compared(state: RunState) -> list[tuple[str, str, str, str]]:
    """(name, last, the one before, arrow) of the leading metrics."""
    now = state.last_metrics
    before = state.history[-2][1] if len(state.history) > 1 else {}
    rows = []
    for name in LEADING:
        value, old = now.get(name), before.get(name)
        if value is not None:
            arrow = "" if old is None else "▲" if value > old else "▼" if value < old else "="
            rows.append((name, number(value), number(old), arrow))
    return rows
