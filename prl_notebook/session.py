"""The user's handle on a run: starts everything in background processes, steps, runs, pauses, inspects, closes.

The same object serves a notebook, a script and the command line. It is synchronous on purpose, so it also works inside
a running event loop; only `step`, `wait`, `verify` and the calls that say so block.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prl_notebook.config import GRPO, Config, Rewards, Rollout, Run, Trainer, Weights
from prl_notebook.engine.assembly import Assembly
from prl_notebook.engine.checkpoints import Checkpoint, Checkpoints
from prl_notebook.engine.conditions import Condition
from prl_notebook.engine.events import read_events
from prl_notebook.engine.live import LiveState
from prl_notebook.engine.records import GroupRecord
from prl_notebook.engine.run_state import RunState, state_of
from prl_notebook.engine.stepping import Breakpoint, Goal, Unit
from prl_notebook.engine.verify import VerifyReport, verify
from prl_notebook.rollout.vllm_setup import check_versions, choose_transfer
from prl_notebook.runtime.device import plan_devices
from prl_notebook.runtime.local import tail as last_lines
from prl_notebook.tasks import resolve_task
from prl_notebook.tasks.datasets import PromptSource
from prl_notebook.tasks.reward_process import pickle_functions
from prl_notebook.tasks.rewards import check_functions
from prl_notebook.views import View, report_html
from prl_notebook.views.of_run import RunViews

if TYPE_CHECKING:
    from prl_notebook.widgets import Dashboard, LiveView

RewardFunctions = Callable[..., Any] | Sequence[Callable[..., Any]] | None


class SessionError(RuntimeError):
    """The session cannot go on; the cause is chained."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Where a step has led to."""

    unit: Unit
    period: int
    """last finished period; -1 before the first"""
    policy_version: int
    metrics: dict[str, float]
    """of the last finished period, under TRL's names"""
    where: str
    """what was done and what comes next"""
    breakpoint: str | None = None
    """name of the breakpoint that stopped it early"""

    def __str__(self) -> str:
        m = self.metrics
        line = self.where if self.breakpoint is None else f"breakpoint {self.breakpoint!r}: {self.where}"
        if not m:
            return line
        return (
            f"{line}\nperiod {self.period}: reward {m.get('reward', math.nan):.3f}, "
            f"overlap {m['overlap_ratio']:.0%}, idle: rollout {m['idle_ratio/rollout']:.0%}, "
            f"trainer {m['idle_ratio/trainer']:.0%}, {m['tokens_per_second']:.0f} tokens/s"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class RunHandle:
    """A run in progress; `wait()` for it, or go on working."""

    def __init__(self, session: Session, goal: Goal) -> None:
        self._session, self._goal = session, goal

    @property
    def done(self) -> bool:
        return self._goal.done.done()

    def wait(self, timeout: float | None = None) -> StepResult:
        """Wait until the run is done, paused or stopped by a breakpoint.

        An interrupt (Ctrl-C, the notebook's stop button) pauses the session, which stays usable.

        Raises:
            TimeoutError: after `timeout` seconds; the run goes on.
            Exception: whatever ended the run.
        """
        return self._session._wait(self._goal, timeout)

    def __repr__(self) -> str:
        return f"<run in {self._session.run_dir}: {'done' if self.done else 'in progress'}>"


class _Resume:
    """`Session.resume(run_dir)` on the class goes on with a finished run; `session.resume()` with a paused one."""

    def __get__(self, session: Session | None, owner: type[Session]) -> Callable[..., Any]:
        return owner._from_run_dir if session is None else session._go_on


class Session(RunViews):
    """GRPO on a model, a dataset and reward functions.

    Args:
        model: bundled task ("tiny", "tiny-preamble-512", "smollm2-135m") or a model folder in Hugging Face format.
        dataset: rows in TRL's conventions: a list of dicts, a datasets.Dataset, a .jsonl or .parquet file, a name on
            the hub, or "reasoning_gym:TASK". None: the bundled task's.
        reward_funcs: one or several TRL reward functions, also lambdas and functions of a notebook cell.
        grpo, rollout, trainer, rewards, weights, run: sections of the configuration; each replaces the task's preset.
        run_dir: where events, completions, checkpoints and report.html go. None: runs/<time>-<task>.
        settings: single fields of GRPO and Run, e.g. `learning_rate=1e-4, reproducible=True`.

    Raises:
        ValueError, FileNotFoundError, ImportError: at once, naming the argument, for input that cannot work.
    """

    resume = _Resume()

    def __init__(
        self,
        model: str | Path | None = None,
        dataset: Any = None,
        reward_funcs: RewardFunctions = None,
        *,
        grpo: GRPO | None = None,
        rollout: Rollout | None = None,
        trainer: Trainer | None = None,
        rewards: Rewards | None = None,
        weights: Weights | None = None,
        run: Run | None = None,
        run_dir: str | Path | None = None,
        **settings: Any,
    ) -> None:
        sections = {
            "grpo": grpo,
            "rollout": rollout,
            "trainer": trainer,
            "rewards": rewards,
            "weights": weights,
            "run": run,
        }
        self._build(model, dataset, reward_funcs, sections, settings, run_dir)

    @classmethod
    def _from_run_dir(cls, run_dir: str | Path, dataset: Any = None, reward_funcs: RewardFunctions = None) -> Session:
        """Go on with a run from its newest checkpoint; the result equals the uninterrupted run's.

        `dataset` and `reward_funcs` are needed again where they were objects and not names.

        Raises:
            FileNotFoundError: no run in this directory.
            ValueError: dataset or reward functions are needed.
        """
        path = Path(run_dir)
        if not (path / "run.json").is_file():
            raise FileNotFoundError(f"{path} is no run directory: it has no run.json")
        known = json.loads((path / "run.json").read_text())
        if known["own_dataset"] and dataset is None:
            raise ValueError(f"the run in {path} was made with a dataset object; pass it again as dataset=")
        if known["own_rewards"] and reward_funcs is None:
            raise ValueError(f"the run in {path} was made with its own reward functions; pass them as reward_funcs=")
        session = cls.__new__(cls)
        session._build(
            known["model"],
            known["dataset"] if dataset is None else dataset,
            reward_funcs,
            vars(Config.from_dict(known["config"])),
            {},
            path,
            checkpoint=Checkpoints(path).newest(),
            earlier=state_of(read_events(path / "events.jsonl")),
        )
        return session

    def _build(
        self,
        model: str | Path | None,
        dataset: Any,
        reward_funcs: RewardFunctions,
        sections: dict[str, Any],
        settings: dict[str, Any],
        run_dir: str | Path | None,
        checkpoint: Checkpoint | None = None,
        earlier: RunState | None = None,
        parent: RunState | None = None,
    ) -> None:
        task = resolve_task(model, dataset, reward_funcs)
        asked = config = configure(task.preset, sections, settings)
        check_functions(task.reward_funcs, config.grpo.reward_weights)
        plan = plan_devices(config.run.devices, config.rollout, config.trainer)
        if config.rollout.engine == "vllm":
            check_versions(plan.rollout[0][0].kind)
            config = dataclasses.replace(config, weights=Weights(choose_transfer(config.weights.transfer, plan)))
        self.config = config
        source = PromptSource(task.rows, task.tokenizer, config.grpo, task.context_length)
        functions = pickle_functions(task.reward_funcs)
        self.run_dir = Path(run_dir) if run_dir else _new_run_dir(task.name)
        if earlier is None and (self.run_dir / "run.json").exists():
            raise ValueError(f"run_dir {self.run_dir} holds a run; go on with it by Session.resume(run_dir)")
        self.run_dir.mkdir(parents=True, exist_ok=True)
        description = {
            "model": str(model) if model else task.name,
            "dataset": str(dataset) if isinstance(dataset, str | Path) else None,
            "own_dataset": dataset is not None and not isinstance(dataset, str | Path),
            "own_rewards": reward_funcs is not None,
            "config": asked.to_dict(),
        }
        (self.run_dir / "run.json").write_text(json.dumps(description, indent=2))
        self.plan = plan
        if plan.trainer[0].kind != "cpu":
            print(plan)
        self.parent = parent
        """state of the run this one was forked from, to be shown beside it"""
        self._origin = (model, dataset, reward_funcs)
        self._last_goal: tuple[Unit, int] = ("period", 1)
        self._closed = False
        self._parts = Assembly(
            task, config, plan, source, functions, self.run_dir, checkpoint, earlier, parent.run_dir if parent else None
        )
        self._finalizer = weakref.finalize(self, self._parts.close)

    # ---- stepping

    def step(self, unit: Unit = "period", count: int = 1, wait: bool = True) -> StepResult | RunHandle:
        """Advance by whole periods, by single groups, or by micro-steps.

        'group' trains the next group alone in a micro-step; 'microstep' trains what the token budget packs together.
        With `wait=False` it returns at once.
        """
        handle = RunHandle(self, self._start(unit, count))
        return handle.wait() if wait else handle

    def run(self, periods: int) -> RunHandle:
        """Run this many periods in the background; returns at once."""
        return RunHandle(self, self._start("period", periods))

    def pause(self) -> None:
        """Stand still at the next boundary: no further micro-step and no further prompt. Returns at once."""
        self._parts.stepper.pause()

    def _go_on(self) -> RunHandle:
        """Go on with what `pause`, an interrupt or a breakpoint cut short; returns at once."""
        return RunHandle(self, self._start(*self._last_goal))

    def _start(self, unit: Unit, count: int) -> Goal:
        self._check()
        goal = self._parts.stepper.run(unit, count)
        self._goal = goal
        return goal

    def _wait(self, goal: Goal, timeout: float | None = None) -> StepResult:
        try:
            goal.done.result(timeout)
        except KeyboardInterrupt:
            self.pause()
            raise
        self._last_goal = (goal.unit, max(1, goal.remaining))
        state = self.state
        return StepResult(
            unit=goal.unit,
            period=state.history[-1][0] if state.history else -1,
            policy_version=state.version,
            metrics=state.last_metrics,
            where=state.paused_at,
            breakpoint=state.breakpoint,
        )

    def _check(self) -> None:
        if self._closed:
            raise SessionError("the session is closed; make a new one, or go on with Session.resume(run_dir)")
        if failure := self._parts.engine.failure:
            raise SessionError(
                f"the run has failed: {failure}; Session.resume({str(self.run_dir)!r}) goes on from the "
                "newest checkpoint"
            ) from failure

    # ---- debugging

    @property
    def breakpoints(self) -> list[Breakpoint]:
        """The session's breakpoints; set `enabled`, or remove them from the list."""
        return self._parts.stepper.breakpoints

    def breakpoint(
        self, on: Unit | Condition = "group", when: Callable[[Any], bool] | None = None, name: str | None = None
    ) -> Breakpoint:
        """Pause where a condition is true: a ready-made one, `breakpoint(conditions.zero_variance())`, or your own.

        Args:
            on: a condition, or what `when` looks at: 'group', 'microstep' or 'period'.
            when: called with the scored Group before it is trained, the MicroStepReport, or the period's metrics.
                None: always.

        Raises:
            ValueError: unknown `on`, or a condition and `when` at once.
        """
        if isinstance(on, Condition):
            if when is not None:
                raise ValueError(f"the condition {on.name!r} has a `when` of its own; pass one or the other")
            condition = on
        else:
            condition = Condition(on, f"{on} {len(self.breakpoints) + 1}", when or (lambda _: True))
        point = Breakpoint(condition.on, condition.when, name or condition.name)
        self.breakpoints.append(point)
        return point

    def verify(self, permutations: int = 3, seed: int = 0) -> VerifyReport:
        """Compute the next period's gradient as both schedules would, and under random orders and splits.

        Nothing is changed by it. Blocks; the session must stand at a period boundary.

        Raises:
            SessionError: in the middle of a period.
        """
        self._check()
        self._at_boundary("verify")
        return self._parts.at_boundary(lambda: verify(self._parts.engine, permutations, seed))

    def rewind(self, period: int) -> None:
        """Go back to the start of `period`: weights, optimizer, random states and data position. Blocks.

        A period under way is given up.

        Raises:
            ValueError: there is no checkpoint at that period; the message lists those there are.
        """
        self._check()
        self._parts.checkpoints.at(period)  # raises before anything is given up
        self.pause()
        self._parts.at_boundary(lambda: self._parts.rewind(period), abandon_period=True)

    def fork(self, run_dir: str | Path | None = None, reward_funcs: RewardFunctions = None, **settings: Any) -> Session:
        """A second session that goes on from here with changed settings (fields of GRPO and Run). Blocks.

        `reward_funcs` replaces the reward functions; None keeps them.

        Its history starts with this session's, and `fork.parent` is this session's state, so that curves are shown
        side by side.

        Raises:
            SessionError: in the middle of a period.
        """
        self._check()
        self._at_boundary("fork")
        checkpoint = self._parts.at_boundary(self._parts.save)
        path = Path(run_dir) if run_dir else _new_run_dir("fork")
        path.mkdir(parents=True)
        shutil.copy(self.run_dir / "events.jsonl", path / "events.jsonl")
        model, dataset, own_rewards = self._origin
        other = Session.__new__(Session)
        other._build(
            model,
            dataset,
            own_rewards if reward_funcs is None else reward_funcs,
            vars(self.config),
            settings,
            path,
            checkpoint=checkpoint,
            earlier=self.state,
            parent=self.state,
        )
        return other

    def _at_boundary(self, what: str) -> None:
        stepper = self._parts.stepper
        if stepper.unit is not None or stepper.at not in (None, "period"):
            raise SessionError(f"{what} needs the session to stand between two periods: finish this one with step()")

    # ---- looking

    @property
    def live(self) -> LiveState:
        """The live state, for dashboards."""
        return self._parts.live

    @property
    def state(self) -> RunState:
        """Everything known about the run now; immutable."""
        return self._parts.live.state

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of every finished period."""
        return [metrics for _, metrics in self.state.history]

    @property
    def groups(self) -> list[GroupRecord]:
        """The groups of the newest period that the trainer has taken up, in prompt order."""
        record = self._parts.engine.record
        if record is None:
            return []
        results, recorder = self._parts.scorer.results, self._parts.recorder
        return [recorder.group(record, g, results[g].logs if g in results else {}) for g in sorted(record.groups)]

    def dashboard(self) -> Dashboard:
        """Controls, queue, progress, timeline and curves, live. Show it as the last expression of a cell."""
        from prl_notebook.widgets import Dashboard  # brings Jupyter, which a script does not need

        return Dashboard(self)

    def _shown(self) -> Dashboard:
        return self.dashboard()

    def _view(self, draw: Callable[[RunState], View]) -> View:
        def widget() -> LiveView:
            from prl_notebook.widgets import LiveView

            return LiveView(self.live, draw)

        return draw(self.state) if self._closed else dataclasses.replace(draw(self.state), widget=widget)

    @property
    def pids(self) -> list[int]:
        """Background processes that are alive."""
        return self._parts.runtime.pids()

    def logs(self, process: str, tail: int = 30) -> str:
        """The last `tail` lines of a background process's log: 'rollout-0', 'trainer-0', 'rewards', ...

        Raises:
            KeyError: naming the processes there are.
        """
        path = self.run_dir / "logs" / f"{process}.log"
        if not path.exists():
            names = ", ".join(sorted(p.stem for p in path.parent.glob("*.log")))
            raise KeyError(f"no process {process!r}; there are {names}")
        return last_lines(path, tail)

    # ---- ending

    def close(self) -> None:
        """End every process, save an unsaved policy, write report.html. Calling it again does nothing.

        Raises:
            RemoteError, ProcessDied: the policy could not be saved; the processes are ended all the same.
        """
        if self._closed:
            return
        self._closed = True
        groups = self.groups
        try:
            self._finalizer()
        finally:
            (self.run_dir / "report.html").write_text(report_html(self.state, groups, self._dims()), encoding="utf-8")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.state
        return f"<Session {state.task!r}: {state.status}, policy version {state.version}, {self.run_dir}>"


def configure(preset: Config, sections: dict[str, Any], settings: dict[str, Any]) -> Config:
    """The preset, with whole sections replaced, then single fields of GRPO and Run.

    Raises:
        TypeError: naming a setting that is no field of GRPO or Run.
    """
    config = dataclasses.replace(preset, **{name: value for name, value in sections.items() if value is not None})
    for name, value in settings.items():
        section = next(
            (s for s in ("grpo", "run") if name in {f.name for f in dataclasses.fields(getattr(config, s))}), None
        )
        if section is None:
            raise TypeError(f"{name!r} is no argument of Session and no field of GRPO or Run")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def _new_run_dir(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = [Path("runs") / f"{stamp}-{name}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 100)))]
    return next(path for path in candidates if not path.exists())
