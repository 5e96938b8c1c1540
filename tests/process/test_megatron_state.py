"""Checkpoints that other parallel sizes and the torch engine resume, published weights, verify, and failing ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from megatron_cases import make_config, make_period
from megatron_ranks import RankPool

from prl_notebook.engine.trainer_group import TrainerGroup
from prl_notebook.runtime.local import ProcessDied, RemoteError
from prl_notebook.training.torch_trainer import TorchTrainer
from prl_notebook.weights import checksum, named_weights, open_version

pytestmark = pytest.mark.megatron

TP2PP2 = {"tensor_parallel": 2, "pipeline_parallel": 2}


def train(trainer, periods: range) -> None:
    for number in periods:
        trainer.begin_period(number, number, 4)
        trainer.accumulate(make_period(number))
        trainer.finish_update()


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=5e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def uninterrupted(rank_model) -> dict[str, torch.Tensor]:
    """Weights after four periods of the torch trainer."""
    torch.set_num_threads(1)
    trainer = TorchTrainer(rank_model(tied=True), make_config("torch"))
    train(trainer, range(4))
    return named_weights(trainer.models.policy)


@pytest.mark.parametrize("second", [{}, {"data_parallel": 2}, TP2PP2], ids=["tp1", "dp2", "tp2pp2"])
@pytest.mark.parametrize("first", [TP2PP2, {"data_parallel": 2}], ids=["tp2pp2", "dp2"])
def test_a_checkpoint_resumes_with_other_parallel_sizes(pool, rank_model, tmp_path, uninterrupted, first, second):
    with pool.trainer(rank_model(tied=True), make_config(**first)) as ranks:
        train(ranks, range(2))
        ranks.save(tmp_path / "checkpoint")
    assert not list(tmp_path.rglob("*.p*t")), "checkpoints hold no pickles"
    with pool.trainer(rank_model(tied=True), make_config(**second)) as ranks:
        assert ranks.load(tmp_path / "checkpoint") == 2
        train(ranks, range(2, 4))
        assert_same_weights(open_version(ranks.publish(str(tmp_path))), uninterrupted)


def test_checkpoints_go_between_the_engines(pool, rank_model, tmp_path, uninterrupted):
    torch_trainer = TorchTrainer(rank_model(tied=True), make_config("torch"))
    train(torch_trainer, range(1))
    torch_trainer.save(tmp_path / "from_torch")
    with pool.trainer(rank_model(tied=True), make_config(tensor_parallel=2)) as ranks:
        assert ranks.load(tmp_path / "from_torch") == 1
        train(ranks, range(1, 3))
        ranks.save(tmp_path / "from_megatron")
    assert torch_trainer.load(tmp_path / "from_megatron") == 3
    train(torch_trainer, range(3, 4))
    assert_same_weights(named_weights(torch_trainer.models.policy), uninterrupted)


def test_bfloat16_keeps_float32_masters_through_a_checkpoint(pool, rank_model, tmp_path):
    config = make_config(dtype="bfloat16", data_parallel=2)
    with pool.trainer(rank_model(), config) as ranks:
        train(ranks, range(2))
        ranks.save(tmp_path / "checkpoint")
        train(ranks, range(2, 4))
        expected = open_version(ranks.publish(str(tmp_path)))
    with pool.trainer(rank_model(), config) as ranks:
        ranks.load(tmp_path / "checkpoint")
        train(ranks, range(2, 4))
        resumed = ranks.publish(str(tmp_path / ".."))
    assert resumed.checksum == checksum(expected)


def test_a_checkpoint_of_another_reference_is_refused(pool, rank_model, tmp_path):
    with pool.trainer(rank_model(), make_config(tensor_parallel=2)) as ranks:
        ranks.save(tmp_path / "checkpoint")
    with pool.trainer(rank_model(), make_config(tensor_parallel=2), reference_path=rank_model(seed=1)) as ranks:
        answers = [remote.submit("call", "load", tmp_path / "checkpoint") for remote in ranks.remotes]
        for answer in answers:
            with pytest.raises(RemoteError, match="was trained with the reference"):
                answer.result(60)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_version_0_is_published_bit_for_bit(pool, rank_model, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(rank_model(tied=tied), dtype=torch.float32)
    with pool.trainer(rank_model(tied=tied), make_config(**TP2PP2)) as ranks:
        ref = ranks.publish(str(tmp_path))
    assert (ref.version, ref.checksum) == (0, checksum(named_weights(model)))


def test_verify_compares_gradients_and_changes_nothing(pool, rank_model, tmp_path):
    groups = make_period(0)
    with pool.trainer(rank_model(), make_config(tensor_parallel=2, data_parallel=2)) as ranks:
        ranks.begin_period(0, 0, 4)
        ranks.accumulate(groups[:2])
        yardstick = ranks.gradient([groups], yardstick=True)
        assert yardstick["norm"] > 0
        assert ranks.gradient([groups])["bitwise"]
        other = ranks.gradient([[g] for g in reversed(groups)])
        assert 0 < other["relative_error"] < 1e-6
        ranks.accumulate(groups[2:])
        norm = ranks.finish_update().metrics["grad_norm"]
        assert norm == pytest.approx(yardstick["norm"], rel=1e-5)


def test_what_must_not_be_trained_is_refused_on_every_rank_and_the_trainer_goes_on(pool, rank_model):
    with pool.trainer(rank_model(), make_config(**TP2PP2)) as ranks:
        ranks.begin_period(0, 0, 4)
        stale = [remote.submit("call", "accumulate", make_period(0, version=7)) for remote in ranks.remotes]
        for answer in stale:
            with pytest.raises(RemoteError, match="was sampled by policy version 7"):
                answer.result(60)
        ranks.accumulate(make_period(0))
        assert ranks.finish_update().version == 1


def test_a_gradient_that_is_not_finite_raises_on_every_rank_and_leaves_the_policy(pool, rank_model, tmp_path):
    with pool.trainer(rank_model(), make_config(**TP2PP2)) as ranks:
        before = ranks.publish(str(tmp_path)).checksum
        ranks.begin_period(0, 0, 4)
        groups = make_period(0)
        for group in groups:
            group.advantages_K = np.full(len(group.completions), 1e38)
        ranks.accumulate(groups)
        steps = [remote.submit("call", "finish_update") for remote in ranks.remotes]
        for step in steps:
            with pytest.raises(RemoteError, match="policy is unchanged"):
                step.result(60)
        assert ranks.publish(str(tmp_path)).checksum == before


def test_nothing_listens_beyond_the_loopback_interface(pool, rank_model):
    with pool.trainer(rank_model(), make_config(**TP2PP2)) as ranks:
        addresses = {address for found in ranks.on_all("listening") for address in found}
    assert addresses <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("dies", [True, False], ids=["killed", "raises"])
def test_a_failing_rank_ends_the_group_within_seconds(tmp_path, rank_model, dies):
    """Peers of the failing rank raise or wait for it in a collective; the engine's group of ranks ends them all."""
    pool = RankPool(tmp_path)
    try:
        with (
            pytest.raises((ProcessDied, RemoteError)) as failure,
            pool.trainer(rank_model(), make_config(**TP2PP2)) as ranks,
        ):
            ranks.begin_period(0, 0, 4)
            started = time.monotonic()
            TrainerGroup(ranks.remotes).call("fail_in_a_micro_step", 3, dies, make_period(0))
        assert time.monotonic() - started < 10
        if not dies:
            assert "ArithmeticError: on purpose" in "".join(failure.value.__notes__)
        assert pool.runtime.pids() == []
    finally:
        pool.close()
