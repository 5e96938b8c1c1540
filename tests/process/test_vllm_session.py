"""Whole runs with vLLM workers: exact, whatever the schedule, the number of workers, or a SIGKILL in mid-generation."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from small_runs import SMALL, events_of, final_weights, required
from vllm_cases import make_model

from prl_notebook import Rollout, Run, Session
from prl_notebook.engine import events as ev
from prl_notebook.tasks.smollm2 import addition_reward, addition_rows, smollm2_model_path, smollm2_preset

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
MISMATCH = "sampling/sampling_logp_difference/max"


@pytest.fixture(autouse=True)
def vllm_is_there() -> None:
    required(importlib.util.find_spec("vllm") is not None, "vLLM is not installed; see the README's install lines")


def exact(schedule: str) -> Run:
    return Run(reproducible=True, consume="prompt_order", schedule=schedule, devices="cpu")


@pytest.mark.strict
def test_schedules_workers_and_a_kill_end_in_the_same_weights(make_session, tmp_path):
    make_model(tmp_path / "model", tied=True)  # vLLM's CPU attention has no heads as small as the other tests' model's
    model, two = tmp_path / "model", Rollout(engine="vllm", workers=2, groups_in_flight=1)
    synchronous = make_session(model=model, run=exact("synchronous"), rollout=Rollout(engine="vllm"))
    synchronous.run(3).wait()
    assert [m[MISMATCH] < 1e-4 for m in synchronous.metrics] == [True] * 3
    versions = [e.version for e in events_of(synchronous, ev.PeriodFinished)]

    periodic = make_session(model=model, run=exact("periodic"), rollout=two)
    periodic.step()
    run = periodic.run(2)
    os.kill(periodic.state.processes["rollout-0"].pid, signal.SIGKILL)
    run.wait()
    (died,) = events_of(periodic, ev.ProcessDied)
    assert died.name == "rollout-0"
    assert [e.version for e in events_of(periodic, ev.PeriodFinished)] == versions
    assert final_weights(periodic) == final_weights(synchronous)


@pytest.mark.slow
def test_two_periods_of_smollm2(tmp_path, no_orphans):
    session = Session(
        model=smollm2_model_path(),
        dataset=addition_rows(64),
        reward_funcs=addition_reward,
        grpo=smollm2_preset().grpo,
        rollout=Rollout(engine="vllm", options={"max_model_len": 128}),
        run=Run(devices="cpu"),
        run_dir=tmp_path / "run",
    )
    session.run(2).wait()
    assert [m[MISMATCH] < 1e-4 for m in session.metrics] == [True, True]
    assert all(m["reward"] >= 0 for m in session.metrics)
    session.close()


def test_the_bundled_model_runs_on_vllm(tmp_path, no_orphans):
    session = Session(rollout=Rollout(engine="vllm"), run=Run(devices="cpu"), run_dir=tmp_path / "run", seed=SMALL.seed)
    result = session.step()
    assert result.metrics[MISMATCH] < 1e-4
    assert result.metrics["completions/mean_length"] > 1
    session.close()
