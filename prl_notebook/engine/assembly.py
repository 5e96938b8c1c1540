"""Puts a run together: event log, threads and background processes, and takes it apart again."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prl_notebook.config import Config
from prl_notebook.engine import events as ev
from prl_notebook.engine.checkpoints import Checkpoint, Checkpoints
from prl_notebook.engine.engine import Engine, PeriodRecord
from prl_notebook.engine.live import LiveState
from prl_notebook.engine.producer import Producer
from prl_notebook.engine.queue import RolloutQueue
from prl_notebook.engine.recorder import Recorder
from prl_notebook.engine.run_state import RunState
from prl_notebook.engine.scoring import Scorer
from prl_notebook.engine.stepping import Goal, Stepper, Unit
from prl_notebook.engine.trainer_group import TrainerGroup
from prl_notebook.runtime.device import DevicePlan
from prl_notebook.runtime.launch import Launcher
from prl_notebook.runtime.local import LocalRuntime
from prl_notebook.runtime.shared_memory import release, session_directory
from prl_notebook.tasks import Task
from prl_notebook.tasks.datasets import PromptSource


def folder_bytes(folder: Path) -> int:
    """Size of a model folder: about what one published version takes."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


class Assembly:
    """Everything that runs for one session."""

    def __init__(
        self,
        task: Task,
        config: Config,
        plan: DevicePlan,
        source: PromptSource,
        functions_pickled: bytes,
        run_dir: Path,
        checkpoint: Checkpoint | None = None,
        earlier: RunState | None = None,
        parent_run: str | None = None,
    ) -> None:
        """`earlier` is the state of the events already in run_dir; `checkpoint` is where to go on."""
        self.config, self.run_dir = config, run_dir
        self.live = LiveState(earlier)
        started = time.perf_counter() - (earlier.t if earlier else 0.0)
        self.log = ev.EventLog(run_dir / "events.jsonl", started, [self.live])
        self.session_dir = session_directory(secrets.token_hex(6), 2 * folder_bytes(task.model_path))
        self.runtime = LocalRuntime(run_dir / "logs", self.session_dir)
        self.checkpoints = Checkpoints(run_dir, config.run.keep_checkpoints)
        self.recorder = Recorder(run_dir, task.tokenizer)
        self.log.emit(
            ev.RunStarted(
                run_dir=str(run_dir),
                task=task.name,
                model=str(task.model_path),
                config=config.to_dict(),
                version=checkpoint.version if checkpoint else 0,
                period=checkpoint.period if checkpoint else 0,
                workers=config.rollout.workers,
                wall=time.time(),
                parent_run=parent_run,
            )
        )
        launcher = Launcher(self.runtime, config, plan, str(task.model_path))
        trainer = TrainerGroup(launcher.trainer())
        queue = RolloutQueue()
        self.stepper = Stepper(self._paused, self._resumed)
        self.scorer = Scorer(
            lambda: launcher.rewards(functions_pickled),
            config.rewards,
            config.grpo,
            config.run.max_restarts,
            queue.put,
            queue.fail,
            self.log,
        )
        self.producer = Producer(
            launcher.rollout_worker,
            config.rollout.workers,
            config.rollout.groups_in_flight,
            0 if config.weights.broadcast else config.run.max_restarts,
            lambda: trainer.submit("publish", str(self.session_dir)),
            lambda: trainer.submit("send"),
            release,
            self.scorer.submit,
            queue.fail,
            self.log,
        )
        self.engine = Engine(
            config,
            source,
            self.producer,
            queue,
            self.scorer,
            trainer,
            self.stepper,
            self.live,
            self.log,
            str(self.session_dir),
            self._finished_period,
            checkpoint,
        )
        self._saved_version = checkpoint.version if checkpoint else -1
        for thread in (self.scorer, self.producer, self.engine):
            thread.start()

    def save(self) -> Checkpoint:
        """Checkpoint now; in the engine's thread, at a period boundary."""
        began = time.perf_counter()
        engine = self.engine
        saved = self.checkpoints.save(engine.trainer, engine.period, engine.version)
        self._saved_version = engine.version
        self.log.emit(
            ev.CheckpointSaved(version=saved.version, path=str(saved.path), seconds=time.perf_counter() - began)
        )
        return saved

    def rewind(self, period: int) -> None:
        """Back to the checkpoint at `period`; later ones are dropped. In the engine's thread, at a period boundary."""
        checkpoint = self.checkpoints.at(period)
        self.engine.restore(checkpoint)
        self.checkpoints.drop_after(period)
        self._saved_version = checkpoint.version

    def at_boundary(self, function: Callable[[], Any], abandon_period: bool = False) -> Any:
        """Run `function` in the engine's thread at a period boundary, and wait for its result."""
        return self.stepper.command(function, abandon_period).result()

    def close(self) -> None:
        """Save what is unsaved, end threads and processes, remove shared memory."""
        stands = self.stepper.at == "period" and self.engine.failure is None
        try:
            if stands and self._saved_version != self.engine.version:
                self.at_boundary(self.save, abandon_period=True)
        finally:
            self._take_apart()

    def _take_apart(self) -> None:
        self.stepper.close()
        self.engine.join(timeout=1.0)
        self.scorer.stop()
        self.runtime.close()
        self.engine.join()
        self.scorer.join()
        self.producer.stop()
        shutil.rmtree(self.session_dir, ignore_errors=True)
        self.log.emit(ev.RunClosed(version=self.engine.version))
        self.log.close()
        self.recorder.close()

    def _finished_period(self, record: PeriodRecord | None) -> None:
        run, engine = self.config.run, self.engine
        if record is not None:
            self.recorder.write(record, {g: result.logs for g, result in self.scorer.results.items()})
        if run.checkpoint_every and engine.period % run.checkpoint_every == 0:
            self.save()

    def _paused(self, boundary: Unit, where: str, breakpoint: str | None) -> None:
        self.producer.hold(True)
        self.log.emit(ev.Paused(period=self.engine.period, boundary=boundary, where=where, breakpoint=breakpoint))

    def _resumed(self, goal: Goal) -> None:
        text = f"{goal.remaining} {goal.unit}{'s' if goal.remaining > 1 else ''}"
        self.log.emit(ev.Resumed(goal=text, periods=goal.remaining if goal.unit == "period" else None))
        self.producer.hold(False)
