"""RunState: what is known about a run at one moment, as a pure function of its events.

`reduce(state, event)` returns a new state and never looks at a clock, a file or a process, so a live run, a replay
of a finished run and a static page are the same. States share structure; keeping many of them is cheap.
Groups, spans and queue depth are kept for the newest `DETAILED_PERIODS` periods, metrics for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any, Literal

from prl_notebook.engine import events as ev

DETAILED_PERIODS = 12
KEPT_NOTICES = 20

GroupStatus = Literal["waiting", "generating", "scoring", "queued", "trained"]
RunStatus = Literal["starting", "running", "paused", "failed", "closed"]


@dataclass(frozen=True)
class GroupState:
    """One prompt of the period on its way from waiting to trained."""

    group: int
    prompt_tokens: int
    status: GroupStatus = "waiting"
    worker: int | None = None
    dispatches: int = 0
    """more than 1: its worker died and it went out again with the same seeds"""
    done: int = 0
    """finished completions of K"""
    tokens: int = 0
    """tokens sampled so far, all completions together"""
    dispatched_t: float | None = None
    finished_t: float | None = None
    scored_t: float | None = None
    trained_t: float | None = None
    version: int | None = None
    """policy version that sampled it"""
    lengths: tuple[int, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    rewards: tuple[float | None, ...] = ()
    by_function: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    advantages: tuple[float, ...] = ()
    reward_mean: float | None = None
    reward_std: float | None = None
    invalid: int = 0
    micro_step: int | None = None
    """index of the micro-step that trained it first"""


@dataclass(frozen=True)
class Span:
    """A stretch of work on one lane of the timeline, in run seconds."""

    lane: str
    """rollout-0.., rewards, trainer"""
    kind: Literal["generate", "score", "microstep", "optimizer", "publish", "load"]
    start: float
    end: float
    label: str
    group: int | None = None


@dataclass(frozen=True)
class MicroStepState:
    index: int
    iteration: int
    groups: tuple[int, ...]
    tokens: int
    completion_tokens: int
    start: float
    end: float
    shared_prompt: bool
    stats: dict[str, float]


@dataclass(frozen=True)
class PeriodState:
    """One period in detail."""

    period: int
    version: int
    generations: int
    schedule: str
    started_t: float
    groups: tuple[GroupState, ...]
    micro_steps: tuple[MicroStepState, ...] = ()
    spans: tuple[Span, ...] = ()
    depth: tuple[tuple[float, int], ...] = ()
    """(time, groups in the queue) at every change"""
    finished_t: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def count(self, *statuses: GroupStatus) -> int:
        return sum(g.status in statuses for g in self.groups)


@dataclass(frozen=True)
class ProcessState:
    name: str
    pid: int
    alive: bool = True
    restarts: int = 0
    last_reason: str = ""


@dataclass(frozen=True)
class WorkerState:
    """The policy version a rollout worker has acknowledged."""

    version: int
    checksum: str
    acknowledged_t: float


@dataclass(frozen=True)
class RunState:
    status: RunStatus = "starting"
    task: str = ""
    model: str = ""
    run_dir: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    parent_run: str | None = None
    t: float = 0.0
    """time of the newest event, seconds"""
    wall: float = 0.0
    version: int = 0
    """newest policy version of the trainer"""
    checksum: str = ""
    """of the newest published version"""
    period: int | None = None
    """period under way or, between periods, the last one"""
    history: tuple[tuple[int, dict[str, float]], ...] = ()
    """(period, metrics) of every finished period"""
    periods: tuple[PeriodState, ...] = ()
    """the newest periods in detail, the current one last"""
    workers: dict[int, WorkerState] = field(default_factory=dict)
    processes: dict[str, ProcessState] = field(default_factory=dict)
    paused_at: str = ""
    """where the engine stands and what comes next, while paused"""
    breakpoint: str | None = None
    goal: str = ""
    periods_to_go: int | None = None
    """until the goal, the one under way included; None without a goal or where it is not counted in periods"""
    stalled: tuple[str, ...] = ()
    notices: tuple[tuple[float, str], ...] = ()
    failure: str = ""
    checkpoints: tuple[tuple[int, str], ...] = ()
    """(version, path)"""

    @property
    def current(self) -> PeriodState | None:
        """The newest period in detail."""
        return self.periods[-1] if self.periods else None

    @property
    def last_metrics(self) -> dict[str, float]:
        return self.history[-1][1] if self.history else {}


def reduce(state: RunState, event: ev.Event) -> RunState:
    """The state after `event`."""
    return replace(_apply(event, state), t=event.t)


def state_of(events: Iterable[ev.Event]) -> RunState:
    """The state after all of `events`."""
    state = RunState()
    for event in events:
        state = reduce(state, event)
    return state


@singledispatch
def _apply(event: ev.Event, state: RunState) -> RunState:
    raise TypeError(f"no reducer for {type(event).__name__}")


def _in_period(state: RunState, period: int, **changes: Any) -> RunState:
    """Replace fields of the current period; events of another period are late news and change nothing."""
    current = state.current
    if current is None or current.period != period:
        return state
    return replace(state, periods=(*state.periods[:-1], replace(current, **changes)), stalled=())


def _in_group(state: RunState, period: int, group: int, spans: tuple[Span, ...] = (), **changes: Any) -> RunState:
    current = state.current
    if current is None or current.period != period:
        return state
    groups = current.groups
    changed = replace(groups[group], **changes)
    return _in_period(
        state, period, groups=(*groups[:group], changed, *groups[group + 1 :]), spans=current.spans + spans
    )


@_apply.register
def _(event: ev.RunStarted, state: RunState) -> RunState:
    return replace(
        state,
        status="running",
        task=event.task,
        model=event.model,
        run_dir=event.run_dir,
        config=event.config,
        parent_run=event.parent_run,
        wall=event.wall,
        version=event.version,
        history=tuple(h for h in state.history if h[0] < event.period),
        failure="",
    )


@_apply.register
def _(event: ev.ProcessStarted, state: RunState) -> RunState:
    before = state.processes.get(event.name)
    restarts = before.restarts + 1 if before and not before.alive else 0
    process = ProcessState(event.name, event.pid, restarts=restarts)
    return replace(state, processes={**state.processes, event.name: process})


@_apply.register
def _(event: ev.ProcessDied, state: RunState) -> RunState:
    before = state.processes.get(event.name, ProcessState(event.name, -1))
    process = replace(before, alive=False, last_reason=event.reason)
    state = replace(state, processes={**state.processes, event.name: process})
    current = state.current
    if current is not None:
        for group in event.requeued:
            state = _in_group(state, current.period, group, status="waiting", worker=None, done=0, tokens=0)
    return state


@_apply.register
def _(event: ev.PeriodStarted, state: RunState) -> RunState:
    groups = tuple(GroupState(i, n) for i, n in enumerate(event.prompt_tokens))
    period = PeriodState(event.period, event.version, event.generations, event.schedule, event.t, groups)
    return replace(
        state, status="running", period=event.period, periods=(*state.periods[-(DETAILED_PERIODS - 1) :], period)
    )


@_apply.register
def _(event: ev.GroupDispatched, state: RunState) -> RunState:
    current = state.current
    dispatches = current.groups[event.group].dispatches + 1 if current and current.period == event.period else 1
    return _in_group(
        state,
        event.period,
        event.group,
        status="generating",
        worker=event.worker,
        version=event.version,
        dispatches=dispatches,
        dispatched_t=event.t,
    )


@_apply.register
def _(event: ev.RowsFinished, state: RunState) -> RunState:
    return _in_group(state, event.period, event.group, done=event.done, tokens=event.tokens)


@_apply.register
def _(event: ev.GroupFinished, state: RunState) -> RunState:
    current = state.current
    if current is None or current.period != event.period:
        return state
    start = current.groups[event.group].dispatched_t or current.started_t
    span = Span(f"rollout-{event.worker}", "generate", start, event.t, f"group {event.group}", event.group)
    return _in_group(
        state,
        event.period,
        event.group,
        (span,),
        status="scoring",
        done=len(event.lengths),
        tokens=sum(event.lengths),
        finished_t=event.t,
        lengths=tuple(event.lengths),
        finish_reasons=tuple(event.finish_reasons),
    )


@_apply.register
def _(event: ev.GroupScored, state: RunState) -> RunState:
    span = Span("rewards", "score", event.t - event.seconds, event.t, f"group {event.group}", event.group)
    state = _in_group(
        state,
        event.period,
        event.group,
        (span,),
        status="queued",
        scored_t=event.t,
        rewards=tuple(event.rewards),
        by_function={k: tuple(v) for k, v in event.by_function.items()},
        advantages=tuple(event.advantages),
        reward_mean=event.reward_mean,
        reward_std=event.reward_std,
        invalid=event.invalid,
    )
    return _depth(state, event.period, event.t, event.depth)


def _depth(state: RunState, period: int, t: float, depth: int) -> RunState:
    current = state.current
    return _in_period(state, period, depth=(*current.depth, (t, depth))) if current else state


@_apply.register
def _(event: ev.MicroStep, state: RunState) -> RunState:
    current = state.current
    if current is None or current.period != event.period:
        return state
    start = event.t - event.seconds
    trained = set(event.groups)
    groups = tuple(
        replace(g, status="trained", trained_t=event.t, micro_step=event.index)
        if g.group in trained and event.iteration == 0
        else g
        for g in current.groups
    )
    step = MicroStepState(
        event.index,
        event.iteration,
        tuple(event.groups),
        event.tokens,
        event.completion_tokens,
        start,
        event.t,
        event.shared_prompt,
        event.stats,
    )
    names = ", ".join(map(str, event.groups))
    span = Span("trainer", "microstep", start, event.t, f"micro-step {event.index}: groups {names}")
    state = _in_period(
        state,
        event.period,
        groups=groups,
        micro_steps=(*current.micro_steps, step),
        spans=(*current.spans, span),
    )
    return _depth(state, event.period, event.t, event.depth)


def _span(state: RunState, span: Span) -> RunState:
    current = state.current
    if current is None or current.finished_t is not None:
        return state
    return _in_period(state, current.period, spans=(*current.spans, span))


@_apply.register
def _(event: ev.OptimizerStepped, state: RunState) -> RunState:
    span = Span("trainer", "optimizer", event.t - event.seconds, event.t, f"optimizer step {event.iteration + 1}")
    return _span(replace(state, version=event.version), span)


@_apply.register
def _(event: ev.WeightsPublished, state: RunState) -> RunState:
    span = Span("trainer", "publish", event.t - event.seconds, event.t, f"publish version {event.version}")
    return _span(replace(state, version=event.version, checksum=event.checksum), span)


@_apply.register
def _(event: ev.WeightsAcknowledged, state: RunState) -> RunState:
    span = Span(f"rollout-{event.worker}", "load", event.t - event.seconds, event.t, f"load version {event.version}")
    worker = WorkerState(event.version, event.checksum, event.t)
    return _span(replace(state, workers={**state.workers, event.worker: worker}), span)


@_apply.register
def _(event: ev.PeriodFinished, state: RunState) -> RunState:
    state = _in_period(state, event.period, finished_t=event.t, metrics=event.metrics)
    to_go = None if state.periods_to_go is None else state.periods_to_go - 1
    return replace(state, history=(*state.history, (event.period, event.metrics)), periods_to_go=to_go)


@_apply.register
def _(event: ev.Stalled, state: RunState) -> RunState:
    return replace(state, stalled=tuple(event.waiting))


@_apply.register
def _(event: ev.Paused, state: RunState) -> RunState:
    return replace(
        state, status="paused", paused_at=event.where, breakpoint=event.breakpoint, goal="", periods_to_go=None
    )


@_apply.register
def _(event: ev.Resumed, state: RunState) -> RunState:
    return replace(state, status="running", paused_at="", breakpoint=None, goal=event.goal, periods_to_go=event.periods)


@_apply.register
def _(event: ev.CheckpointSaved, state: RunState) -> RunState:
    return replace(state, checkpoints=(*state.checkpoints, (event.version, event.path)))


@_apply.register
def _(event: ev.Rewound, state: RunState) -> RunState:
    return replace(
        state,
        version=event.version,
        period=event.period - 1 if event.period else None,
        history=tuple(h for h in state.history if h[0] < event.period),
        periods=tuple(p for p in state.periods if p.period < event.period),
    )


@_apply.register
def _(event: ev.Notice, state: RunState) -> RunState:
    return replace(state, notices=(*state.notices[-(KEPT_NOTICES - 1) :], (event.t, event.text)))


@_apply.register
def _(event: ev.RunFailed, state: RunState) -> RunState:
    return replace(state, status="failed", failure=event.error)


@_apply.register
def _(event: ev.RunClosed, state: RunState) -> RunState:
    processes = {name: replace(p, alive=False) for name, p in state.processes.items()}
    return replace(state, status="closed", processes=processes)
