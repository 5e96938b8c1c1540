"""The Session: stepping, running, pausing, interrupts, logs, closing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
import time

import psutil
import pytest
from small_runs import SMALL, events_of

from prl_notebook import Session, SessionError
from prl_notebook.engine import events as ev
from prl_notebook.runtime.local import ProcessDied


def test_steps_by_period_group_and_microstep(make_session):
    session = make_session()
    result = session.step()
    assert (result.period, result.policy_version) == (0, 1)
    assert result.metrics["reward"] > 0
    assert "reward" in str(result) and "overlap" in str(result) and "idle" in str(result)

    session.step("group")
    assert [s.status for s in session.state.current.groups].count("trained") == 1
    session.step("group", 2)
    assert [s.status for s in session.state.current.groups].count("trained") == 3
    session.step("microstep")
    assert [s.status for s in session.state.current.groups].count("trained") == 4
    assert session.state.version == 1, "the optimizer has not stepped yet"
    assert "optimizer step" in session.state.paused_at
    assert session.step().policy_version == 2

    assert len(session.groups) == 4
    record = session.inspect(2)
    assert set(record.completions[0].numbers) >= {"sampler", "policy", "old", "ratio", "entropy", "loss"}
    with pytest.raises(KeyError, match="groups there"):
        session.inspect(17)
    with pytest.raises(ValueError, match="a step is one of 'period', 'group', 'microstep'"):
        session.step("epoch")


def test_run_returns_at_once_and_can_be_paused_and_resumed(make_session):
    session = make_session()
    handle = session.run(periods=200)
    assert not handle.done
    with pytest.raises(RuntimeError, match=r"pause\(\) or wait\(\) first"):
        session.step()
    while not session.state.history:
        time.sleep(0.05)
    session.pause()
    stopped = handle.wait(timeout=30)
    assert 0 < stopped.policy_version + 1 < 200
    assert session.state.status == "paused"
    rest = session.resume()
    time.sleep(0.5)
    session.pause()
    assert rest.wait(timeout=30).policy_version >= stopped.policy_version


def test_works_inside_a_running_event_loop(make_session):
    async def cell():
        return make_session().step()

    assert asyncio.run(cell()).period == 0


def test_an_interrupt_while_waiting_leaves_the_session_paused_and_usable(make_session):
    session = make_session()
    session.step()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        session.run(10_000).wait()
    deadline = time.monotonic() + 20
    while session.state.status != "paused" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert session.state.status == "paused"
    assert session.step().policy_version > 1


def test_logs_and_unknown_process(make_session):
    session = make_session()
    session.step()
    assert isinstance(session.logs("rollout-0", tail=5), str)
    with pytest.raises(KeyError, match="rewards, rollout-0, trainer-0"):
        session.logs("rollout-7")


def test_close_ends_every_process_and_the_session_says_so(make_session):
    session = make_session()
    session.step()
    pids = session.pids
    assert len(pids) == 3
    session.close()
    assert not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in pids)
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.step()
    assert (session.run_dir / "report.html").stat().st_size > 1000
    assert isinstance(list(ev.read_events(session.run_dir / "events.jsonl"))[-1], ev.RunClosed)


def test_close_after_the_trainer_died_says_so_and_ends_the_rest(make_session):
    session = make_session()
    session.step()
    trainer = next(e.pid for e in events_of(session, ev.ProcessStarted) if e.name == "trainer-0")
    os.kill(trainer, signal.SIGKILL)
    with pytest.raises(ProcessDied, match="trainer-0 died with exit code -9"):
        session.close()
    assert not session.pids and (session.run_dir / "report.html").exists()


def test_a_forgotten_session_ends_its_processes(make_session, small_model, tmp_path):
    from small_runs import ROWS, digit_share

    session = Session(small_model, ROWS, digit_share, grpo=SMALL, run_dir=tmp_path / "forgotten")
    session.step()
    del session  # no_orphans looks whether anything is left


def test_breakpoints_stop_where_their_condition_is_true(make_session):
    session = make_session()
    point = session.breakpoint(on="group", when=lambda g: g.group == 2, name="group two")
    stopped = session.run(3).wait()
    assert stopped.breakpoint == "group two" and point.hits == 1
    assert "group 2 of period 0 is scored; next: train it" in stopped.where
    assert session.state.current.groups[2].status == "queued"
    point.enabled = False
    broken = session.breakpoint(on="period", when=lambda metrics: metrics["no such metric"], name="typo")
    stopped = session.step()
    assert "typo" in stopped.breakpoint and "KeyError" in stopped.breakpoint and not broken.enabled
    assert session.step().breakpoint is None


def test_every_completion_is_accounted_for(make_session):
    session = make_session()
    session.run(3).wait()
    session.close()
    dispatched = {(e.period, e.group) for e in events_of(session, ev.GroupDispatched)}
    finished = [(e.period, e.group) for e in events_of(session, ev.GroupFinished)]
    trained = [(e.period, g) for e in events_of(session, ev.MicroStep) for g in e.groups]
    assert dispatched == set(finished) == set(trained)
    assert len(finished) == len(set(finished)) == len(trained) == 12


def test_several_updates_a_period_with_a_reference(make_session):
    session = make_session(grpo=dataclasses.replace(SMALL, num_iterations=2, beta=0.1))
    session.run(2).wait()
    steps = events_of(session, ev.MicroStep)
    for period in (0, 1):
        first = [(e.index, e.groups) for e in steps if (e.period, e.iteration) == (period, 0)]
        second = [(e.index, e.groups) for e in steps if (e.period, e.iteration) == (period, 1)]
        assert first == second, "the second update sees the same micro-steps"
    assert [e.version for e in events_of(session, ev.OptimizerStepped)] == [0, 1, 1, 2]
    assert session.metrics[1]["kl"] > 0
    assert "reference" in session.groups[0].completions[0].numbers
