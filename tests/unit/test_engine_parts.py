"""Queue, schedules, stepping, timing, seeds, run state and events: the engine's parts without processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest

from prl_notebook.engine import events as ev
from prl_notebook.engine.queue import RolloutQueue, VersionError, micro_steps
from prl_notebook.engine.run_state import PeriodState, RunState, Span, reduce, state_of
from prl_notebook.engine.schedules import PERIODIC, SYNCHRONOUS
from prl_notebook.engine.seeds import completion_seeds
from prl_notebook.engine.stepping import Breakpoint, Closed, PeriodAbandoned, Stepper
from prl_notebook.engine.timing import intersection, timing_metrics, union
from prl_notebook.engine.types import Completion, Group


def group(number: int, tokens: int = 10, version: int = 0, period: int = 0) -> Group:
    """A group of two completions, `tokens` tokens in all when its prompt is computed once."""
    ids = np.zeros((tokens - 2) // 2, np.int32)
    completions = [Completion(ids, np.zeros(len(ids), np.float32), "stop") for _ in range(2)]
    return Group(period, number, version, (1, 2), completions)


def queue_of(total: int, *arrived: int) -> RolloutQueue:
    queue = RolloutQueue()
    queue.begin(0, 0, total)
    for number in arrived:
        queue.put(group(number))
    return queue


def numbers(groups: list[Group]) -> list[int]:
    return [g.group for g in groups]


def test_training_on_another_policy_version_raises():
    queue = queue_of(4)
    with pytest.raises(VersionError, match="sampled by policy version 1, but the trainer is at version 0"):
        queue.put(group(0, version=1))


def test_a_group_that_comes_twice_or_from_another_period_is_refused():
    queue = queue_of(4, 2)
    for stranger in (group(2), group(1, period=3), group(9)):
        with pytest.raises(ValueError, match="is not expected in period 0, or came twice"):
            queue.put(stranger)


def test_periodic_takes_what_is_there_in_order_of_arrival_up_to_the_budget():
    queue = queue_of(5, 3, 0, 4)
    assert numbers(queue.take(PERIODIC, "arrival", 20, True, 0)) == [3, 0]
    assert numbers(queue.take(PERIODIC, "arrival", 20, True, 0)) == [4]
    assert queue.take(PERIODIC, "arrival", 20, True, 0) == []
    assert queue.missing() == [1, 2]


def test_synchronous_waits_for_all():
    queue = queue_of(3, 2, 0)
    assert queue.take(SYNCHRONOUS, "arrival", 100, True, 0) == []
    queue.put(group(1))
    assert numbers(queue.take(SYNCHRONOUS, "arrival", 100, True, 0)) == [2, 0, 1]


def test_prompt_order_gives_the_same_micro_steps_whatever_arrives_first():
    plans = []
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        queue, plan = queue_of(5), []
        for number in order:
            queue.put(group(number))
            while batch := queue.take(PERIODIC, "prompt_order", 20, True, 0):
                plan.append(numbers(batch))
        plans.append(plan)
    assert plans == [[[0, 1], [2, 3], [4]]] * 3


def test_a_group_larger_than_the_budget_is_a_micro_step_of_its_own():
    steps = micro_steps([group(0, 10), group(1, 50), group(2, 10), group(3, 10)], 20, True)
    assert [numbers(s) for s in steps] == [[0], [1], [2, 3]]


def test_a_failure_reaches_the_waiting_consumer():
    queue = queue_of(1)
    threading.Timer(0.05, queue.fail, [RuntimeError("the reward process is gone")]).start()
    with pytest.raises(RuntimeError, match="reward process is gone"):
        queue.take(PERIODIC, "arrival", 100, True, 10)


def stepper() -> tuple[Stepper, list[str]]:
    told: list[str] = []
    return Stepper(lambda b, where, hit: told.append(f"{b}: {where} {hit or ''}"), lambda goal: None), told


def test_the_engine_stands_still_after_the_goal_and_tells_where():
    control, told = stepper()
    goal = control.run("microstep", 2)
    control.arrive("microstep", "first", groups=3)
    assert not goal.done.done()
    engine = threading.Thread(target=control.arrive, args=("microstep", "second"), kwargs={"groups": 1})
    engine.start()
    goal.done.result(5)
    assert told == ["microstep: second "] and control.at == "microstep"
    control.run("group", 1)
    engine.join(5)
    assert not engine.is_alive()


def test_a_command_runs_at_a_period_boundary_in_the_engines_thread():
    control, _ = stepper()
    engine = threading.Thread(target=control.stand, args=("period", "here"), name="the engine")
    engine.start()
    assert control.command(lambda: threading.current_thread().name).result(5) == "the engine"
    with pytest.raises(ZeroDivisionError):
        control.command(lambda: 1 / 0).result(5)
    control.run("period", 1)
    engine.join(5)


def test_closing_and_abandoning_unwind_a_waiting_engine():
    control, _ = stepper()
    control.run("period", 5)
    control.command(lambda: None, abandon_period=True)
    with pytest.raises(PeriodAbandoned):
        control.interrupting()
    control.close()
    with pytest.raises(Closed):
        control.interrupting()
    with pytest.raises(RuntimeError, match="closed"):
        control.run("period", 1)


@pytest.mark.parametrize("arrive", [Stepper.begin, lambda control, where: control.arrive("period", where)])
def test_giving_up_a_period_between_two_periods_drops_the_goal_alone(arrive):
    """A rewind that comes while the engine starts, waits at the fence or saves a checkpoint."""
    control, _ = stepper()
    goal = control.run("period", 5)
    answer = control.command(lambda: "done", abandon_period=True)
    control.raise_if_closed()  # at the fence: goes on waiting
    engine = threading.Thread(target=arrive, args=(control, "here"))
    engine.start()
    assert answer.result(5) == "done" and goal.done.done() and control.at == "period"
    control.run("period", 1)
    engine.join(5)
    assert not engine.is_alive()
    control.interrupting()  # the period that began is not given up


def test_a_command_that_gives_up_the_period_comes_before_a_goal_that_has_not_begun():
    resumed = threading.Event()
    control = Stepper(lambda *_: None, lambda goal: resumed.set())
    engine = threading.Thread(target=control.stand, args=("period", "here"))
    engine.start()
    while control.at is None:
        pass
    with control._changed:  # the engine does not get to see the goal before the command
        goal = control.run("period", 1000)
        answer = control.command(lambda: "done", abandon_period=True)
    assert answer.result(5) == "done" and goal.done.done() and not resumed.is_set()
    control.run("period", 1)
    engine.join(5)
    assert resumed.is_set()


def test_a_breakpoint_with_a_mistake_is_switched_off_and_named():
    control, told = stepper()
    control.run("period", 1)
    control.breakpoints.append(Breakpoint("group", lambda g: g.nothing, "typo"))
    engine = threading.Thread(target=control.break_on_group, args=(group(0), "group 0"))
    engine.start()
    while control.at is None:
        pass
    assert "typo (switched off: its condition raised AttributeError" in told[0]
    assert not control.breakpoints[0].enabled
    control.run("period", 1)
    engine.join(5)


def test_seeds_depend_on_run_period_group_and_sample_alone():
    seeds = {completion_seeds(run, period, g, 8) for run in (1, 2) for period in (0, 1) for g in (0, 1)}
    flat = {s for group_seeds in seeds for s in group_seeds}
    assert len(seeds) == 8 and len(flat) == 64 and all(0 <= s < 2**63 for s in flat)
    assert completion_seeds(1, 0, 0, 4) == completion_seeds(1, 0, 0, 8)[:4]


def test_intervals():
    assert union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert intersection([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]


def test_timing_of_a_period():
    spans = (
        Span("rollout-0", "generate", 0, 4, "group 0"),
        Span("rollout-1", "generate", 0, 6, "group 1"),
        Span("trainer", "microstep", 4, 8, "micro-step 0"),
        Span("trainer", "optimizer", 8, 9, ""),
        Span("rollout-0", "load", 9, 10, ""),
    )
    metrics = timing_metrics(PeriodState(0, 0, 2, "periodic", 0.0, (), spans=spans, depth=((4, 1), (8, 0))), 10.0, 2)
    assert metrics["step_time"] == 10
    assert metrics["idle_ratio/trainer"] == pytest.approx(0.5)
    assert metrics["idle_ratio/rollout"] == pytest.approx(1 - (5 + 6) / 20)
    assert metrics["overlap_ratio"] == pytest.approx(2 / 4)
    assert metrics["timing_s/synchronous_estimate"] == pytest.approx(6 + 4 + 2)
    assert metrics["weight_sync_time_s"] == pytest.approx(1)
    assert metrics["buffer_qsize"] == pytest.approx(0.4)


def story() -> list[ev.Event]:
    kinds = [
        ev.RunStarted(run_dir="r", task="t", model="m", config={}, version=0, period=0, workers=1, wall=0.0),
        ev.PeriodStarted(period=0, version=0, groups=2, generations=2, prompt_tokens=[3, 4], schedule="periodic"),
        ev.GroupDispatched(period=0, group=0, worker=0, version=0),
        ev.GroupDispatched(period=0, group=1, worker=0, version=0),
        ev.ProcessDied(name="rollout-0", exit_code=-9, requeued=[1], log="l", reason="killed"),
        ev.RowsFinished(period=0, group=0, worker=0, done=1, tokens=5),
        ev.GroupFinished(period=0, group=0, worker=0, version=0, lengths=[5, 6], finish_reasons=["stop", "length"]),
        ev.GroupScored(
            period=0,
            group=0,
            rewards=[1.0, float("nan")],
            by_function={"f": [1.0, None]},
            advantages=[0.0, 0.0],
            reward_mean=1.0,
            reward_std=None,
            seconds=0.1,
            depth=1,
        ),
        ev.MicroStep(
            period=0,
            index=0,
            iteration=0,
            groups=[0],
            tokens=20,
            completion_tokens=11,
            seconds=0.5,
            waited=0.1,
            depth=0,
            shared_prompt=True,
            stats={},
        ),
        ev.Stalled(period=0, waiting=["group 1: 0 of 2 completions done on rollout-0"], seconds=31.0),
    ]
    return [ev.from_json(ev.to_json(e)) for e in kinds]


def test_events_survive_json_and_reduce_to_the_state():
    state = state_of(story())
    period = state.current
    assert period is not None
    assert [g.status for g in period.groups] == ["trained", "waiting"]
    assert period.groups[0].rewards == (1.0, None)
    assert not state.processes["rollout-0"].alive
    assert state.stalled == ("group 1: 0 of 2 completions done on rollout-0",)
    json.loads(ev.to_json(story()[7]), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_reducer_is_pure():
    state = RunState()
    states = [state := reduce(state, e) for e in story()]
    again = RunState()
    for event, earlier in zip(story(), states, strict=True):
        again = reduce(again, event)
        assert again == earlier
    assert states[1].current.groups[0].status == "waiting", "later events left the earlier state alone"


def test_events_are_written_and_read_back_but_for_a_torn_last_line(tmp_path):
    log = ev.EventLog(tmp_path / "events.jsonl")
    for event in story():
        log.emit(event)
    log.close()
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event":"Notice","t":1,"te')
    read = list(ev.read_events(tmp_path / "events.jsonl"))
    assert [type(e) for e in read] == [type(e) for e in story()]
    assert all(b.t >= a.t >= 0 for a, b in pairwise(read))


@pytest.mark.parametrize("module", ["engine.engine", "engine.assembly", "config", "session", "views", "cli"])
def test_engine_config_and_views_import_without_torch_and_jupyter(module):
    code = (
        f"import sys, prl_notebook.{module}\n"
        "print([m for m in ('torch', 'transformers', 'IPython', 'ipywidgets', 'ipykernel') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
