"""Whole runs with vLLM workers: they learn, exactly, whatever the schedule, the number of workers, or a SIGKILL."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import psutil
import pytest
from small_runs import SMALL, events_of, final_weights, required
from vllm_cases import make_model

from prl_notebook import Rollout, Run, Session, load_run
from prl_notebook.engine import events as ev
from prl_notebook.tasks.smollm2 import addition_reward, addition_rows, smollm2_model_path, smollm2_preset
from prl_notebook.views import curves, queue, timeline
from prl_notebook.views.base import number

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
MISMATCH = "sampling/sampling_logp_difference/max"
PERIODS = 12
"""The mean reward then is about .75, from .27; with the preset's learning rate it takes twice as many."""


def vllm_is_there() -> None:
    required(importlib.util.find_spec("vllm") is not None, "vLLM is not installed; see the README's install lines")


@dataclass
class Watched:
    """A finished run of the bundled model, and what its two workers were seen to do meanwhile."""

    session: Session
    cores: set[tuple[int, int]] = field(default_factory=set)
    """cores of both workers at moments when both were sampling"""
    busy: list[float] = field(default_factory=list)
    """seconds of computing per second, of each worker"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    vllm_is_there()
    session = Session(
        rollout=Rollout(engine="vllm", workers=2, threads=1),
        run_dir=tmp_path_factory.mktemp("bundled") / "run",
        devices="cpu",
        seed=1,
        learning_rate=6e-4,
        warmup_steps=2,
    )
    session.step()
    seen = Watched(session)
    workers = [psutil.Process(session.state.processes[f"rollout-{n}"].pid) for n in range(2)]
    began, before = time.monotonic(), [sum(worker.cpu_times()[:2]) for worker in workers]
    run = session.run(PERIODS - 1)
    while not run.done:
        period = session.state.current
        if period and {g.worker for g in period.groups if g.status == "generating"} == {0, 1}:
            seen.cores.add((workers[0].cpu_num(), workers[1].cpu_num()))
        time.sleep(0.01)
    run.wait()
    seconds = time.monotonic() - began
    seen.busy = [(sum(w.cpu_times()[:2]) - b) / seconds for w, b in zip(workers, before, strict=True)]
    yield seen
    session.close()
    assert not any(worker.is_running() for worker in workers)


def test_the_bundled_model_learns_on_vllm(watched):
    rewards = [m["reward"] for m in watched.session.metrics]
    assert len(rewards) == PERIODS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
    assert all(m[MISMATCH] < 1e-4 for m in watched.session.metrics)


def test_two_workers_compute_side_by_side_on_one_core_each(watched):
    served = [e.worker for e in events_of(watched.session, ev.GroupFinished)]
    assert min(served.count(0), served.count(1)) > len(served) / 4
    assert all(0.1 < busy < 1.1 for busy in watched.busy), watched.busy
    assert any(first != second for first, second in watched.cores), "both were on one core all the time"


def test_views_show_vllm_workers_and_the_mismatch(watched):
    for state in (watched.session.state, load_run(watched.session.run_dir).state):
        shown = curves(state)
        for name, title in (
            ("sampling/sampling_logp_difference/max", "Sampler and trainer: log-prob difference"),
            ("sampling/sampling_logp_difference/mean", "Sampler and trainer: log-prob difference"),
            ("sampling/importance_sampling_ratio/mean", "Sampler and trainer: probability ratio"),
        ):
            value = number(state.history[-1][1][name])
            assert title in shown.html and value in shown.html
            (line,) = [line for line in shown.text.splitlines() if name in line]
            assert value in line
        for view in (queue(state), timeline(state)):
            assert all(f"rollout-{n}" in view.html for n in range(2))


def exact(schedule: str) -> Run:
    return Run(reproducible=True, consume="prompt_order", schedule=schedule, devices="cpu")


@pytest.mark.strict
def test_schedules_workers_and_a_kill_end_in_the_same_weights(make_session, tmp_path):
    vllm_is_there()
    make_model(tmp_path / "model", tied=True)  # vLLM's CPU attention has no heads as small as the other tests' model's
    long = {"model": tmp_path / "model", "grpo": replace(SMALL, max_completion_length=120)}
    synchronous = make_session(run=exact("synchronous"), rollout=Rollout(engine="vllm"), **long)
    synchronous.run(3).wait()
    assert [m[MISMATCH] < 1e-4 for m in synchronous.metrics] == [True] * 3
    versions = [e.version for e in events_of(synchronous, ev.PeriodFinished)]

    two = Rollout(engine="vllm", workers=2, groups_in_flight=1)
    periodic = make_session(run=exact("periodic"), rollout=two, **long)
    periodic.step()
    run = periodic.run(2)
    while not (halfway := _half_sampled_by(periodic, 0)):
        assert not run.done, "no group was seen half sampled"
        time.sleep(0.001)
    os.kill(periodic.state.processes["rollout-0"].pid, signal.SIGKILL)
    run.wait()
    (died,) = events_of(periodic, ev.ProcessDied)
    assert (died.name, died.requeued) == ("rollout-0", halfway)
    dispatched = [(e.period, e.group) for e in events_of(periodic, ev.GroupDispatched)]
    assert len(dispatched) == len(set(dispatched)) + 1, "once more, and nothing else"
    assert [e.version for e in events_of(periodic, ev.PeriodFinished)] == versions
    assert final_weights(periodic) == final_weights(synchronous)


def _half_sampled_by(session: Session, worker: int) -> list[int]:
    """Groups of which this worker has finished some completions and is sampling the others."""
    groups = session.state.current.groups
    return [g.group for g in groups if g.worker == worker and g.status == "generating" and 0 < g.done < 3]


@pytest.mark.slow
def test_two_periods_of_smollm2(tmp_path, no_orphans):
    vllm_is_there()
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
