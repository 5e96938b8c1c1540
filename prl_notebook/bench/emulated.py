"""Stand-ins without a model, for measuring the engine alone: a worker that waits, a trainer that counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from prl_notebook.engine.types import Completion, Group, GroupRequest, WeightsRef
from prl_notebook.rollout.worker import GroupDone, LoadAck, WorkerEvent
from prl_notebook.training.trainer import MicroStepReport, TokenDetail, UpdateReport


def latency(request: GroupRequest, median: float) -> float:
    """Seconds a group takes: log-normal with sigma 1, so that one in a hundred takes ten times the median."""
    return float(np.random.default_rng(request.seeds[0]).lognormal(np.log(median), 1.0))


class EmulatedWorker:
    """A rollout worker that takes one group at a time and answers after its latency."""

    def __init__(self, median: float) -> None:
        self._median = median
        self._current: tuple[GroupRequest, float] | None = None

    @property
    def has_work(self) -> bool:
        return self._current is not None

    def load(self, ref: WeightsRef) -> LoadAck:
        return LoadAck(ref.version, ref.checksum, 0.0)

    def submit(self, request: GroupRequest) -> None:
        self._current = (request, time.perf_counter() + latency(request, self._median))

    def step(self) -> list[WorkerEvent]:
        assert self._current is not None
        request, end = self._current
        time.sleep(max(0.0, end - time.perf_counter()))
        self._current = None
        completions = [
            Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop") for _ in range(len(request.seeds))
        ]
        return [GroupDone(Group(request.period, request.group, request.version, request.prompt_ids, completions))]


class EmulatedTrainer:
    """A trainer that takes no time."""

    def __init__(self) -> None:
        self._version = 0

    def begin_period(self, period: int, version: int, groups: int) -> None:
        pass

    def accumulate(self, groups: list[Group], detail: bool = False) -> MicroStepReport:
        tokens = sum(g.tokens(shared_prompt=True) for g in groups)
        report = MicroStepReport([g.group for g in groups], tokens, tokens, 0.0, 0.0, True)
        if detail:  # the trainer agrees with the sampler
            for group in groups:
                for k, completion in enumerate(group.completions):
                    same, mask = completion.logprobs_R, np.ones(len(completion.ids_R), bool)
                    report.detail.append(
                        TokenDetail(group.group, k, same, same, None, same, None, same, 0.0, same, mask)
                    )
        return report

    def finish_update(self, last: bool = True) -> UpdateReport:
        self._version += 1
        return UpdateReport(self._version, {})

    def publish(self, directory: str) -> WeightsRef:
        return WeightsRef(self._version, str(Path(directory) / "none"), "emulated", 0)


class EmulatedRewards:
    """A reward process whose functions cost nothing."""

    def score(self, group: Group, prompt: Any, step: int) -> Any:
        from prl_notebook.tasks.rewards import RewardResult

        zeros = np.zeros(len(group.completions))
        return RewardResult(zeros, {"zero": zeros})
