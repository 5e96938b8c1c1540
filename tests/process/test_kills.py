"""SIGKILL at random moments: nothing is lost, nothing changes, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from kills import Killer
from small_runs import ROWS, digit_share, events_of, final_weights

from prl_notebook import Rollout, Run, Session, SessionError
from prl_notebook.engine import events as ev
from prl_notebook.runtime.local import ProcessDied

EXACT = Run(reproducible=True, consume="prompt_order", max_restarts=1000, checkpoint_every=1, keep_checkpoints=2)
WORKERS = Rollout(workers=2, groups_in_flight=1)


def undisturbed(make_session, periods: int) -> bytes:
    session = make_session(run=EXACT)
    session.run(periods).wait()
    return final_weights(session)


@pytest.mark.strict
def test_killed_workers_and_reward_process_change_nothing(make_session):
    """A few kills; test_many_kills does the same at length."""
    _kill_while_running(make_session, periods=8, kills=3, pause=2.0)


@pytest.mark.slow
@pytest.mark.strict
@pytest.mark.timeout(900)
def test_many_kills_of_workers_and_reward_process_change_nothing(make_session):
    _kill_while_running(make_session, periods=60, kills=26, pause=5.0)


def _kill_while_running(make_session, periods: int, kills: int, pause: float) -> None:
    expected = undisturbed(make_session, periods)
    session = make_session(run=EXACT, rollout=WORKERS)
    session.step()
    killer = Killer(session, ("rollout-0", "rollout-1", "rewards"), kills, seed=1, pause=pause)
    killer.start()
    session.run(periods - 2).wait()
    while killer.is_alive():  # the last periods wait for the last kill
        time.sleep(0.1)
    session.step()
    died = events_of(session, ev.ProcessDied)
    assert len(killer.killed) == kills and len(died) >= kills
    trained = [(e.period, g) for e in events_of(session, ev.MicroStep) for g in e.groups]
    assert len(trained) == len(set(trained)) == 4 * periods, "every group is trained exactly once"
    assert final_weights(session) == expected


@pytest.mark.strict
def test_a_killed_trainer_stops_the_run_and_resumes_to_the_same_weights(make_session):
    _kill_trainers(make_session, periods=6, kills=1)


@pytest.mark.slow
@pytest.mark.strict
@pytest.mark.timeout(900)
def test_many_killed_trainers_resume_to_the_same_weights(make_session):
    _kill_trainers(make_session, periods=24, kills=6)


def _kill_trainers(make_session, periods: int, kills: int) -> None:
    expected = undisturbed(make_session, periods)
    session = make_session(run=EXACT)
    session.step()
    for kill in range(kills):
        killer = Killer(session, ("trainer-0",), 1, seed=kill, pause=0.5)
        handle = session.run(10_000)
        killer.start()
        killer.join()
        killed = time.monotonic()
        with pytest.raises(ProcessDied, match=r"trainer-0 died with exit code -9; the end of its log .*trainer-0.log"):
            handle.wait()
        assert time.monotonic() - killed < 10
        with pytest.raises(SessionError, match="the run has failed: trainer-0 died"):
            session.step()
        assert any(isinstance(e, ev.RunFailed) for e in ev.read_events(session.run_dir / "events.jsonl"))
        session.close()
        session = Session.resume(session.run_dir, ROWS, digit_share)
        if len(session.metrics) >= periods:
            break
    try:
        left = periods - len(session.metrics)
        if left > 0:
            session.run(left).wait()
        else:
            session.rewind(periods)
        assert final_weights(session) == expected
    finally:
        session.close()


SCRIPT = """
import sys, time
sys.path[:0] = {path!r}
from small_runs import ROWS, SMALL, digit_share
from prl_notebook import Rollout, Session
session = Session({model!r}, ROWS, digit_share, grpo=SMALL, rollout=Rollout(workers=2), run_dir={run_dir!r})
session.step()
print("READY", *session.pids, flush=True)
session.run(100000).wait()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_orphans_when_the_parent_ends(small_model, tmp_path, no_orphans, how):
    """As a kernel restart (SIGKILL, SIGTERM) or Ctrl-C in a script ends the parent in the middle of a period."""
    shared_before = set(Path("/dev/shm").glob("prl-*"))
    code = SCRIPT.format(path=[str(Path(__file__).parents[1])], model=str(small_model), run_dir=str(tmp_path / "run"))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    words = parent.stdout.readline().split()
    assert words[0] == "READY"
    pids = [int(w) for w in words[1:]]
    assert len(pids) == 4 and all(psutil.pid_exists(p) for p in pids)
    time.sleep(0.3)
    if how is signal.SIGINT:
        os.killpg(parent.pid, how)  # as a terminal does: to the whole foreground process group
    else:
        os.kill(parent.pid, how)
    parent.wait(timeout=30)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_runs(p) for p in pids):
        time.sleep(0.1)
    assert not any(_runs(p) for p in pids)
    assert set(Path("/dev/shm").glob("prl-*")) <= shared_before


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
