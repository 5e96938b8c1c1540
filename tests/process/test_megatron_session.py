"""Whole GRPO runs of the bundled model with the trainer on megatron-core, next to the same runs on torch.

The engines agree to float32 rounding, so log-probs of equal weights differ by 1e-6 and weights drift apart by as much a
step; a completion differs only where a random number falls between two such probabilities.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
from kills import Killer
from small_runs import ROWS, digit_share, required

from prl_notebook import Session, Trainer
from prl_notebook.config import Rollout, Run
from prl_notebook.runtime.local import ProcessDied, RemoteError
from prl_notebook.session import SessionError

pytestmark = pytest.mark.megatron

PERIODS = 5
MEGATRON = {"engine": "megatron", "tokens_per_microstep": 512, "threads": 1}


def run(folder: Path, trainer: Trainer, rollout: Rollout, **settings: Any) -> list[dict[str, float]]:
    """Metrics of a short run of the bundled task."""
    sections = {"trainer": trainer, "rollout": rollout, "run": Run(reproducible=True, checkpoint_every=0)}
    with Session(run_dir=folder, prompts_per_period=8, warmup_steps=0, **sections, **settings) as session:
        session.run(PERIODS).wait(200)
        return session.metrics


def compare_curves(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == PERIODS
    for mine, theirs in zip(found, expected, strict=True):
        # 64 completions a period: one of them that turns from wrong to right would move the reward by 1/64.
        assert mine["reward"] == pytest.approx(theirs["reward"], abs=1e-6)
        assert mine["completions/mean_length"] == pytest.approx(theirs["completions/mean_length"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["kl"] == pytest.approx(theirs["kl"], rel=1e-2, abs=1e-6)
        assert mine["sampling/sampling_logp_difference/max"] < 1e-4


def test_the_reward_curve_is_the_torch_trainers(tmp_path, no_orphans):
    rollout = Rollout(threads=1)
    expected = run(tmp_path / "torch", Trainer(tokens_per_microstep=512, threads=1), rollout, beta=0.02)
    found = run(tmp_path / "tp2", Trainer(**MEGATRON, tensor_parallel=2), rollout, beta=0.02)
    compare_curves(found, expected)
    assert max(m["grad_norm"] for m in found) > 0


def test_the_reward_curve_with_vllm_workers(tmp_path, no_orphans):
    required(importlib.util.find_spec("vllm") is not None, "vllm is not installed")
    rollout = Rollout(engine="vllm", threads=1)
    expected = run(tmp_path / "torch", Trainer(tokens_per_microstep=512, threads=1), rollout, beta=0.02)
    found = run(tmp_path / "pp2", Trainer(**MEGATRON, pipeline_parallel=2), rollout, beta=0.02)
    compare_curves(found, expected)


def test_a_killed_rank_ends_the_run_within_seconds_and_the_run_resumes(make_session):
    trainer, often = Trainer(**MEGATRON, data_parallel=2), Run(checkpoint_every=1)
    session = make_session(trainer=trainer, run=often)
    session.step()
    handle = session.run(10_000)
    killer = Killer(session, ("trainer-1",), kills=1, seed=0, pause=0.5)
    killer.start()
    killer.join()
    killed = time.monotonic()
    with pytest.raises((ProcessDied, RemoteError), match="trainer-"):
        handle.wait(60)
    assert time.monotonic() - killed < 10
    with pytest.raises(SessionError, match="the run has failed: trainer-"):
        session.step()
    session.close()
    with Session.resume(session.run_dir, ROWS, digit_share) as resumed:
        assert resumed.step().policy_version >= 2
