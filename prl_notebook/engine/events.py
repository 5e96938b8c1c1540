"""Typed events: everything the engine does, in the order it happened; the only thing views and replays know.

An event is a frozen dataclass of plain values. `EventLog` writes each as one JSON line to events.jsonl; `read_events`
reads them back. Times `t` are seconds since the run's first event, taken in the engine's process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. `t` is filled in by the log."""

    t: float = -1.0

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A session took up (or resumed) a run."""

    run_dir: str
    task: str
    model: str
    config: dict[str, Any]
    version: int
    period: int
    workers: int
    wall: float
    """Unix time of t = 0."""
    parent_run: str | None = None
    """Run directory this one was forked from."""


@dataclass(frozen=True, kw_only=True)
class ProcessStarted(Event):
    name: str
    """rollout-0, trainer-0, rewards"""
    pid: int
    seconds: float
    """from launch until it was ready"""


@dataclass(frozen=True, kw_only=True)
class ProcessDied(Event):
    name: str
    exit_code: int | None
    requeued: list[int]
    """groups that go out again with the same seeds"""
    log: str
    """path of the process's log"""
    reason: str


@dataclass(frozen=True, kw_only=True)
class PeriodStarted(Event):
    period: int
    version: int
    groups: int
    generations: int
    prompt_tokens: list[int]
    """prompt length of each group"""
    schedule: str


@dataclass(frozen=True, kw_only=True)
class GroupDispatched(Event):
    period: int
    group: int
    worker: int
    version: int


@dataclass(frozen=True, kw_only=True)
class RowsFinished(Event):
    """Some of a group's K completions are done."""

    period: int
    group: int
    worker: int
    done: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class GroupFinished(Event):
    """All K completions of a group arrived in the engine."""

    period: int
    group: int
    worker: int
    version: int
    lengths: list[int]
    finish_reasons: list[str]


@dataclass(frozen=True, kw_only=True)
class GroupScored(Event):
    """Rewards are there; the group is in the rollout queue from now on."""

    period: int
    group: int
    rewards: list[float | None]
    by_function: dict[str, list[float | None]]
    advantages: list[float]
    reward_mean: float | None
    reward_std: float | None
    seconds: float
    """time the reward process took"""
    depth: int
    """groups in the queue, this one included"""
    invalid: int = 0
    """completions without a valid reward because a reward function failed"""


@dataclass(frozen=True, kw_only=True)
class MicroStep(Event):
    """The trainer's forward and backward of some groups; `t` is its end."""

    period: int
    index: int
    iteration: int
    groups: list[int]
    tokens: int
    completion_tokens: int
    seconds: float
    waited: float
    """seconds the trainer stood idle before it"""
    depth: int
    """groups left in the queue"""
    shared_prompt: bool
    stats: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class OptimizerStepped(Event):
    period: int
    iteration: int
    version: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WeightsPublished(Event):
    version: int
    checksum: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WeightsAcknowledged(Event):
    worker: int
    version: int
    checksum: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PeriodFinished(Event):
    """The optimizer stepped and every worker holds the next version."""

    period: int
    version: int
    """version the period's completions were sampled from"""
    metrics: dict[str, float]
    """TRL's names, plus queue, wait, sync and idle metrics"""


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """Nothing moved for a while; `waiting` names what is waited for, in words."""

    period: int
    waiting: list[str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """The engine stands still at a boundary. `where` says in words what was done and what comes next."""

    period: int
    boundary: str
    """'period', 'group' or 'microstep'"""
    where: str
    breakpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    goal: str
    periods: int | None = None
    """periods to go until the goal; None where it is counted in groups or micro-steps"""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    version: int
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Rewound(Event):
    """The session went back to an earlier period: weights, optimizer and data position restored."""

    period: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """Something the user should know that stops nothing."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    error: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class RunClosed(Event):
    version: int


def to_json(event: Event) -> str:
    """One line of JSON. NaN and infinities become null, since JSON has none."""
    data = {"event": type(event).__name__, **dataclasses.asdict(event)}
    return json.dumps(_finite(data), separators=(",", ":"))


def from_json(line: str) -> Event:
    """Inverse of `to_json`.

    Raises:
        ValueError: for an event this version does not know.
    """
    data = json.loads(line)
    kind = _KINDS.get(data.pop("event", None))
    if kind is None:
        raise ValueError(f"unknown event in {line[:80]!r}")
    return kind(**data)


def read_events(path: Path) -> Iterator[Event]:
    """Events of an events.jsonl, in order; a torn last line (the process was killed while writing) is left out."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield from_json(line)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


@dataclass
class EventLog:
    """Stamps events, writes them, and hands them to listeners in one global order. Thread-safe."""

    path: Path | None
    """events.jsonl, appended to; None keeps the log in memory only (for tests and benchmarks)."""
    start: float = field(default_factory=time.perf_counter)
    """perf_counter() at t = 0; a resumed run moves it back so that time goes on"""
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._file = open(self.path, "a", encoding="utf-8") if self.path else None  # noqa: SIM115 - lives as long as the log

    def now(self) -> float:
        """Seconds since t = 0."""
        return time.perf_counter() - self.start

    def emit(self, event: Event) -> None:
        with self._lock:
            stamped = dataclasses.replace(event, t=self.now())
            if self._file:
                self._file.write(to_json(stamped) + "\n")
                self._file.flush()
            for listener in self.listeners:
                listener(stamped)

    def close(self) -> None:
        with self._lock:
            if self._file:
                self._file.close()
                self._file = None
