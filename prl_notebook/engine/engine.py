"""The engine: one thread that runs period after period. `Engine.run_period` is the period loop.

    producer  -- prompts -->  rollout workers  -- groups -->  scorer  -- rewards -->  rollout queue  -->  this thread
    this thread  -- micro-steps -->  trainer  -- weights t+1 -->  rollout workers  -- acknowledged -->  next period

No torch and no Jupyter: token ids and small arrays pass through here, the models live in other processes.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from prl_notebook.config import Config
from prl_notebook.engine import events as ev
from prl_notebook.engine.checkpoints import Checkpoint
from prl_notebook.engine.live import LiveState
from prl_notebook.engine.metrics import batch_metrics
from prl_notebook.engine.producer import Producer
from prl_notebook.engine.queue import RolloutQueue
from prl_notebook.engine.schedules import SCHEDULES
from prl_notebook.engine.scoring import Scorer
from prl_notebook.engine.seeds import completion_seeds
from prl_notebook.engine.stepping import Closed, PeriodAbandoned, Stepper
from prl_notebook.engine.timing import timing_metrics
from prl_notebook.engine.trainer_group import TrainerGroup
from prl_notebook.engine.types import Group, GroupRequest, Prompt, Sampling, WeightsRef
from prl_notebook.rollout.guard import mismatch_guard
from prl_notebook.training.trainer import MicroStepReport, TokenDetail

POLL_SECONDS = 0.5
"""how often a waiting engine looks whether it is stalled or to be closed"""


class PromptSource(Protocol):
    """The prompts of a period: a pure function of seed, period and dataset."""

    def batch(self, period: int) -> list[Prompt]: ...


@dataclass
class PeriodRecord:
    """What the engine keeps of the newest period, for inspection."""

    period: int
    prompts: list[Prompt]
    groups: dict[int, Group] = field(default_factory=dict)
    """scored groups by number"""
    details: dict[tuple[int, int], TokenDetail] = field(default_factory=dict)
    """per-token numbers by (group, completion), of the first update"""
    micro_steps: list[list[int]] = field(default_factory=list)
    """groups of each micro-step of the first update"""

    def micro_step_of(self, group: int) -> int | None:
        return next((i for i, groups in enumerate(self.micro_steps) if group in groups), None)


class Engine(threading.Thread):
    """Runs periods while the stepper has a goal."""

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        producer: Producer,
        queue: RolloutQueue,
        scorer: Scorer,
        trainer: TrainerGroup,
        stepper: Stepper,
        live: LiveState,
        log: ev.EventLog,
        weights_dir: str,
        on_period: Callable[[PeriodRecord | None], None],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """`on_period(record)` is called when a period is finished and before the next may start (it writes records and
        checkpoints; None: before the first). `checkpoint` is where a resumed run goes on."""
        super().__init__(name="engine", daemon=True)
        self.config, self.source = config, source
        self.producer, self.queue, self.scorer, self.trainer = producer, queue, scorer, trainer
        self.stepper, self.live, self.log = stepper, live, log
        self.period, self.version = (checkpoint.period, checkpoint.version) if checkpoint else (0, 0)
        self.record: PeriodRecord | None = None
        self.failure: Exception | None = None
        self._weights_dir, self._on_period, self._checkpoint = weights_dir, on_period, checkpoint
        self._schedule = SCHEDULES[config.run.schedule]
        self._expected_length: dict[int, float] = {}
        """mean completion length seen for a row of the dataset, for dispatch='longest_first'"""

    # ---- the loop

    def run(self) -> None:
        try:
            self._start()
            self.stepper.begin(f"ready; next: period {self.period} with policy version {self.version}")
            while True:
                try:
                    metrics = self.run_period()
                except PeriodAbandoned:
                    self._abandon()
                    self.stepper.stand("period", f"period {self.period} was given up; next: period {self.period}")
                    continue
                self.stepper.arrive(
                    "period",
                    f"period {self.period - 1} is finished, all workers hold policy version {self.version}; "
                    f"next: period {self.period}",
                    subject=metrics,
                )
        except Closed:
            pass
        except Exception as error:  # noqa: BLE001 - raised by the session's next call, in the user's thread
            self.failure = error
            text = "".join(traceback.format_exception(error))
            self.log.emit(ev.RunFailed(error=str(error), traceback=text))
            self.stepper.close(error)

    def _start(self) -> None:
        began = time.perf_counter()
        self.trainer.wait_ready()
        for rank in self.trainer.ranks:
            self.log.emit(ev.ProcessStarted(name=rank.name, pid=rank.pid, seconds=time.perf_counter() - began))
        if self._checkpoint:
            self.trainer.call("load", self._checkpoint.path)
        self.sync(self.publish())
        if not self._checkpoint:
            self._on_period(None)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back (or forth) to a checkpoint; at a period boundary, in this thread."""
        self.trainer.call("load", checkpoint.path)
        self.period, self.version, self.record = checkpoint.period, checkpoint.version, None
        self.sync(self.publish())
        self.log.emit(ev.Rewound(period=self.period, version=self.version))

    def run_period(self) -> dict[str, float]:
        """One period: B groups from one policy version, then one optimizer step (or num_iterations of them).

        Returns the period's metrics. Raises whatever a process, a reward function or an invariant raised.
        """
        grpo, period, version = self.config.grpo, self.period, self.version
        prompts = self.source.batch(period)
        requests = self.requests(prompts)
        self.record = record = PeriodRecord(period, prompts)
        self.log.emit(
            ev.PeriodStarted(
                period=period,
                version=version,
                groups=len(prompts),
                generations=grpo.num_generations,
                prompt_tokens=[len(p.ids) for p in prompts],
                schedule=self._schedule.name,
            )
        )
        self.trainer.call("begin_period", period, version, len(prompts))
        self.roll_out(prompts, requests)

        for groups in self._arriving_micro_steps(record):
            record.micro_steps.append([g.group for g in groups])
            self._micro_step(record, groups, len(record.micro_steps) - 1, iteration=0)
        report = self._update(iteration=0, last=grpo.num_iterations == 1)
        for iteration in range(1, grpo.num_iterations):
            for index, numbers in enumerate(record.micro_steps):
                self._micro_step(record, [record.groups[g] for g in numbers], index, iteration)
            report = self._update(iteration, last=iteration == grpo.num_iterations - 1)

        self.sync(self.publish())
        self.version = report.version
        metrics = self._metrics(record, report.metrics)
        self.log.emit(ev.PeriodFinished(period=period, version=version, metrics=metrics))
        self.period = period + 1
        self._on_period(record)
        return metrics

    def _arriving_micro_steps(self, record: PeriodRecord) -> Iterator[list[Group]]:
        """Groups as the schedule, the consume order and the token budget let them be trained."""
        total = len(record.prompts)
        while len(record.groups) < total:
            began = time.perf_counter()
            groups = self._take(record)
            self._waited = time.perf_counter() - began
            for group in groups:
                record.groups[group.group] = group
                self.stepper.break_on_group(
                    group, f"group {group.group} of period {record.period} is scored; next: train it"
                )
            yield groups

    def _take(self, record: PeriodRecord) -> list[Group]:
        trainer = self.config.trainer
        quiet = self.log.now()
        while True:
            self.stepper.interrupting()
            groups = self.queue.take(
                self._schedule,
                self.config.run.consume,
                trainer.tokens_at_once,
                trainer.shared_prompt is not False,
                POLL_SECONDS,
                one=self.stepper.unit == "group",
            )
            if groups:
                return groups
            quiet = max(quiet, self.live.state.t)
            if self.log.now() - quiet > self.config.run.stall_after:
                self.log.emit(
                    ev.Stalled(period=record.period, waiting=self._waiting_for(), seconds=self.log.now() - quiet)
                )

    def _waiting_for(self) -> list[str]:
        """What the trainer is waiting for, in words."""
        state = self.live.state.current
        words = {
            "waiting": "group {0} has not been dispatched",
            "generating": "group {0}: {2} of {3} completions done on rollout-{1}",
            "scoring": "group {0} is being scored by the reward functions",
        }
        if state is None:
            return []
        return [
            words[g.status].format(g.group, g.worker, g.done, state.generations)
            for g in state.groups
            if g.status in words
        ]

    def _micro_step(self, record: PeriodRecord, groups: list[Group], index: int, iteration: int) -> None:
        grpo, guarded = self.config.grpo, index == iteration == 0
        detail = guarded or (self.config.run.record_tokens and iteration == 0)
        began = time.perf_counter()
        report: MicroStepReport = self.trainer.call("accumulate", groups, detail=detail)
        record.details.update({(d.group, d.completion): d for d in report.detail})
        if guarded:
            first = groups[0]
            policy = [record.details[first.group, k].policy_R for k in range(len(first.completions))]
            dtypes = self.config.rollout.dtype, self.config.trainer.dtype
            mismatch_guard(first, policy, *dtypes, top_p=grpo.top_p, top_k=grpo.top_k)
        self.log.emit(
            ev.MicroStep(
                period=record.period,
                index=index,
                iteration=iteration,
                groups=report.groups,
                tokens=report.tokens,
                completion_tokens=report.completion_tokens,
                seconds=time.perf_counter() - began,
                waited=self._waited if iteration == 0 else 0.0,
                depth=self.queue.depth,
                shared_prompt=report.shared_prompt,
                stats=report.stats,
            )
        )
        done, total = len(record.groups), len(record.prompts)
        following = "the next micro-step" if done < total else "the optimizer step"
        self.stepper.arrive(
            "microstep",
            f"micro-step {index} of period {record.period} trained groups {', '.join(map(str, report.groups))} "
            f"({done} of {total} groups done); next: {following}",
            groups=len(groups),
            subject=report,
        )

    def _update(self, iteration: int, last: bool) -> Any:
        began = time.perf_counter()
        report = self.trainer.call("finish_update", last)
        self.log.emit(
            ev.OptimizerStepped(
                period=self.period, iteration=iteration, version=report.version, seconds=time.perf_counter() - began
            )
        )
        return report

    # ---- parts that verify, rewind and resume use as well

    def requests(self, prompts: list[Prompt]) -> list[GroupRequest]:
        """What to sample in this period, in the order of dispatch."""
        grpo = self.config.grpo
        sampling = Sampling(grpo.temperature, grpo.top_p, grpo.top_k, grpo.max_completion_length)
        requests = [
            GroupRequest(
                self.period,
                i,
                self.version,
                prompt.ids,
                completion_seeds(grpo.seed, self.period, i, grpo.num_generations),
                sampling,
            )
            for i, prompt in enumerate(prompts)
        ]
        if self.config.run.dispatch == "longest_first":
            known = self._expected_length
            requests.sort(key=lambda r: known.get(prompts[r.group].index, len(r.prompt_ids)), reverse=True)
        return requests

    def roll_out(self, prompts: list[Prompt], requests: list[GroupRequest]) -> None:
        """Let the period's prompts go out; groups appear in the queue as they are scored."""
        self.queue.begin(self.period, self.version, len(requests))
        self.scorer.begin_period(prompts, self.period)
        self.producer.begin_period(requests)

    def publish(self) -> WeightsRef:
        """Have the trainer write its policy for the rollout workers."""
        began = time.perf_counter()
        ref: WeightsRef = self.trainer.call("publish", self._weights_dir)
        self.log.emit(
            ev.WeightsPublished(
                version=ref.version, checksum=ref.checksum, nbytes=ref.nbytes, seconds=time.perf_counter() - began
            )
        )
        return ref

    def sync(self, ref: WeightsRef) -> None:
        """The fence: wait until every worker has acknowledged `ref`."""
        fence = self.producer.load(ref)
        while not fence.done():
            self.stepper.raise_if_closed()
            self.queue.raise_failure()
            wait([fence], timeout=POLL_SECONDS)
        fence.result()

    def _abandon(self) -> None:
        self.producer.abandon_period().result()
        self.scorer.discard()
        self.queue.begin(-1, -1, 0)

    def _metrics(self, record: PeriodRecord, trained: dict[str, float]) -> dict[str, float]:
        groups = [record.groups[i] for i in range(len(record.prompts))]
        for prompt, group in zip(record.prompts, groups, strict=True):
            self._expected_length[prompt.index] = sum(group.lengths) / len(group.lengths)
        state = self.live.state.current
        assert state is not None
        timing = timing_metrics(state, self.log.now(), self.config.rollout.workers)
        logged = {name: sum(values) / len(values) for name, values in self.scorer.metrics.items()}
        completion_tokens = sum(sum(g.lengths) for g in groups)
        return {
            **batch_metrics(groups),
            **trained,
            **timing,
            **logged,
            "tokens_per_second": completion_tokens / timing["step_time"],
            "policy_version": float(self.version),
        }
