"""`prl bench engine`: how close the engine comes to the ideal makespan, with 1 to 64 emulated workers.

Real processes, pipes, producer, scorer, queue and events; only the models are left out. Workers take one group at a
time with long-tailed latencies. The ideal is list scheduling of the very same latencies in the same order: every group
starts the moment a worker is free, and nothing costs anything.
"""

from __future__ import annotations

import heapq
import sys
import tempfile
from pathlib import Path
from typing import Any

from prl_notebook.bench.emulated import latency
from prl_notebook.config import GRPO, Config, Rollout, Run
from prl_notebook.engine.engine import Engine
from prl_notebook.engine.events import EventLog
from prl_notebook.engine.live import LiveState
from prl_notebook.engine.producer import Producer
from prl_notebook.engine.queue import RolloutQueue
from prl_notebook.engine.scoring import Scorer
from prl_notebook.engine.stepping import Stepper
from prl_notebook.engine.trainer_group import TrainerGroup
from prl_notebook.engine.types import Prompt
from prl_notebook.runtime.local import LocalRuntime

GROUPS_PER_WORKER = 8
MEDIAN_SECONDS = 0.5
PERIODS = 3


class _Prompts:
    def __init__(self, count: int) -> None:
        self._count = count

    def batch(self, period: int) -> list[Prompt]:
        return [Prompt(i, (0,), "emulated") for i in range(self._count)]


def engine(worker_counts: tuple[int, ...] = (1, 8, 64)) -> dict[str, Any]:
    """{"efficiency": {"1": .., "8": .., "64": ..}}: ideal makespan / measured, mean over PERIODS periods."""
    efficiency = {}
    print(f"{'workers':>7} {'groups':>6} {'ideal s':>8} {'measured s':>10} {'efficiency':>10}", file=sys.stderr)
    for workers in worker_counts:
        ideal, measured = _measure(workers)
        efficiency[str(workers)] = round(ideal / measured, 4)
        print(
            f"{workers:7} {workers * GROUPS_PER_WORKER:6} {ideal:8.2f} {measured:10.2f} {ideal / measured:10.1%}",
            file=sys.stderr,
        )
    return {"efficiency": efficiency}


def _measure(workers: int) -> tuple[float, float]:
    """Seconds of PERIODS periods from first dispatch to last micro-step: (ideal, measured)."""
    groups = workers * GROUPS_PER_WORKER
    config = Config(
        GRPO(prompts_per_period=groups, num_generations=2),
        Rollout(workers=workers, groups_in_flight=1),
        run=Run(record_tokens=False),
    )
    with tempfile.TemporaryDirectory() as folder:
        runtime = LocalRuntime(Path(folder))
        live = LiveState()
        log = EventLog(None, listeners=[live])
        emulated = "prl_notebook.bench.emulated"
        trainer = TrainerGroup([runtime.start("trainer-0", f"{emulated}:EmulatedTrainer", {})])
        queue = RolloutQueue()
        scorer = Scorer(
            lambda: runtime.start("rewards", f"{emulated}:EmulatedRewards", {}),
            config.rewards,
            config.grpo,
            0,
            queue.put,
            queue.fail,
            log,
        )
        producer = Producer(
            lambda index, on_event, on_death: runtime.start(
                f"rollout-{index}",
                f"{emulated}:EmulatedWorker",
                {"median": MEDIAN_SECONDS},
                on_event=on_event,
                on_death=on_death,
            ),
            workers,
            1,
            0,
            lambda: trainer.submit("publish", folder),
            lambda: trainer.submit("send"),
            lambda ref: None,
            scorer.submit,
            queue.fail,
            log,
        )
        stepper = Stepper(lambda *_: None, lambda _: None)
        measured = Engine(
            config, _Prompts(groups), producer, queue, scorer, trainer, stepper, live, log, folder, lambda _: None
        )
        ideal = 0.0
        for period in range(PERIODS):
            measured.period = period
            requests = measured.requests(measured.source.batch(period))
            ideal += makespan([latency(r, MEDIAN_SECONDS) for r in requests], workers)
        measured.period = 0
        for thread in (scorer, producer, measured):
            thread.start()
        stepper.run("period", PERIODS).done.result()
        seconds = sum(
            p.micro_steps[-1].end - min(g.dispatched_t for g in p.groups if g.dispatched_t is not None)
            for p in live.state.periods
        )
        stepper.close()
        scorer.stop()
        runtime.close()
        producer.stop()
    return ideal, seconds


def makespan(latencies: list[float], workers: int) -> float:
    """Length of the schedule in which each job in turn goes to the worker that is free first."""
    free = [0.0] * workers
    for seconds in latencies:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free)
