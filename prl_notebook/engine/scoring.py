"""The scorer thread: sends finished groups to the reward process and puts the scored ones into the rollout queue.

User code runs in the reward process only. One that hangs is killed after a time-out and started again; one that dies
is started again and scores its group once more. What an exception or a time-out means is `Rewards.on_error`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from prl_notebook.config import GRPO, Rewards
from prl_notebook.engine.events import EventLog, GroupScored, Notice, ProcessDied, ProcessStarted
from prl_notebook.engine.types import Group, Prompt
from prl_notebook.runtime.local import ProcessDied as ProcessDiedError
from prl_notebook.runtime.local import Remote, RemoteError
from prl_notebook.training.advantages import group_advantages


class RewardTimeout(RuntimeError):
    """A reward function took longer than Rewards.timeout."""


class Scorer(threading.Thread):
    """Owns the reward process."""

    def __init__(
        self,
        launch: Callable[[], Remote],
        rewards: Rewards,
        grpo: GRPO,
        max_restarts: int,
        put: Callable[[Group], int],
        on_failure: Callable[[Exception], None],
        log: EventLog,
    ) -> None:
        super().__init__(name="scorer", daemon=True)
        self._launch, self._rewards, self._grpo, self._max_restarts = launch, rewards, grpo, max_restarts
        self._put, self._on_failure, self._log = put, on_failure, log
        self._inbox: queue.SimpleQueue[Group | threading.Event | None] = queue.SimpleQueue()
        self._deaths = 0
        self._discarding = self._stopping = False
        self.results: dict[int, Any] = {}
        """RewardResult of each group of the period"""
        self.metrics: dict[str, list[float]] = {}
        """values logged with log_metric in this period"""
        self.seconds = 0.0
        """time spent scoring in this period"""
        self._start()

    def begin_period(self, prompts: list[Prompt], step: int) -> None:
        """Groups that come from now on belong to these prompts."""
        self._prompts, self._step, self._deaths = prompts, step, 0
        self.results, self.metrics, self.seconds = {}, {}, 0.0

    def submit(self, group: Group) -> None:
        self._inbox.put(group)

    def discard(self) -> None:
        """Drop the groups that are waiting to be scored (the period was given up); returns when they are gone."""
        done = threading.Event()
        self._discarding = True
        self._inbox.put(done)
        done.wait()
        self._discarding = False

    def stop(self) -> None:
        """Let the thread end; the reward process is the runtime's to close."""
        self._stopping = True
        self._inbox.put(None)

    def run(self) -> None:
        while (item := self._inbox.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    item.set()
                elif not self._discarding:
                    self._score(item)
            except Exception as error:  # noqa: BLE001 - raised by the consumer, in the engine's thread
                if self._stopping:
                    return
                self._on_failure(error)

    def _start(self) -> None:
        self._launched_at = time.perf_counter()
        self._announced = False
        self._remote = self._launch()

    def _score(self, group: Group) -> None:
        begin = time.perf_counter()
        result = self._ask(group)
        seconds = time.perf_counter() - begin
        self.seconds += seconds
        invalid = 0
        if result is None:
            group.rewards_K = np.full(len(group.completions), np.nan)
            invalid = len(group.completions)
        else:
            group.rewards_K, group.rewards_by_function = result.rewards_K, result.by_function
            self.results[group.group] = result
            for name, value in result.metrics.items():
                self.metrics.setdefault(name, []).append(value)
        group.advantages_K = group_advantages(group.rewards_K, self._grpo)
        valid = group.rewards_K[~np.isnan(group.rewards_K)]
        if self._discarding:
            return
        depth = self._put(group)
        self._log.emit(
            GroupScored(
                period=group.period,
                group=group.group,
                rewards=group.rewards_K.tolist(),
                by_function={name: values.tolist() for name, values in group.rewards_by_function.items()},
                advantages=group.advantages_K.tolist(),
                reward_mean=float(valid.mean()) if len(valid) else None,
                reward_std=float(valid.std(ddof=1)) if len(valid) > 1 else None,
                seconds=seconds,
                depth=depth,
                invalid=invalid,
            )
        )

    def _ask(self, group: Group) -> Any:
        """Score a group; None when its rewards failed and Rewards.on_error is 'invalid'."""
        while True:
            try:
                if not self._announced:
                    self._remote.ready.result()
                    seconds = time.perf_counter() - self._launched_at
                    self._log.emit(ProcessStarted(name="rewards", pid=self._remote.pid, seconds=seconds))
                    self._announced = True
                return self._remote.call(
                    "score", group, self._prompts[group.group], self._step, timeout=self._rewards.timeout
                )
            except FutureTimeout:
                error: Exception = RewardTimeout(
                    f"scoring group {group.group} of period {group.period} took longer than Rewards.timeout="
                    f"{self._rewards.timeout:g} s; the reward process was killed"
                )
                self._remote.kill()
                self._died(str(error))
                self._start()
            except RemoteError as remote_error:
                error = remote_error
            except ProcessDiedError as death:
                if self._stopping:
                    raise
                self._deaths += 1
                self._died(str(death).splitlines()[0])
                if self._deaths > self._max_restarts:
                    raise
                self._start()
                continue
            if self._rewards.on_error == "raise":
                raise error
            self._log.emit(Notice(text=f"group {group.group} has no valid rewards: {str(error).splitlines()[0]}"))
            return None

    def _died(self, reason: str) -> None:
        self._log.emit(
            ProcessDied(name="rewards", exit_code=None, requeued=[], log=str(self._remote.log), reason=reason)
        )
