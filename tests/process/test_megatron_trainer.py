"""The trainer on the real megatron-core over gloo against the torch trainer: same log-probs, gradients and steps.

Tolerances are those of float32 sums in another order; the models are tiny and random, see megatron_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_cases import PERIODS, Reference, make_config, make_period, torch_reference
from megatron_ranks import Ranks

from prl_notebook.config import Config
from prl_notebook.engine.types import Group
from prl_notebook.training.trainer import MicroStepReport
from prl_notebook.weights import open_version

pytestmark = pytest.mark.megatron

PARALLEL: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "dp2": {"data_parallel": 2},
    "tp2pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}


@pytest.fixture(scope="module")
def reference() -> Callable[..., Reference]:
    known: dict[Any, Reference] = {}

    def get(folder: Path, **options: Any) -> Reference:
        key = (folder, repr(options))
        if key not in known:
            torch.set_num_threads(1)
            known[key] = torch_reference(folder, make_config("torch", **options))
        return known[key]

    return get


def one_step(groups: list[Group]) -> list[list[Group]]:
    return [groups]


def step_by_step(groups: list[Group]) -> list[list[Group]]:
    """One group at a time, last first: with two replicas one of them has nothing to do in any step."""
    return [[group] for group in reversed(groups)]


def run_and_compare(
    ranks: Ranks, config: Config, expected: Reference, micro_steps: Callable[[list[Group]], list[list[Group]]]
) -> None:
    """Gradient of the first period, then per-token numbers and metrics of `PERIODS` periods."""
    gradient = ranks.on_all("whole_gradient", micro_steps(make_period(0)))[0]
    assert gradient.keys() == expected.gradient.keys()
    for name, g in expected.gradient.items():
        np.testing.assert_allclose(gradient[name], g, atol=2e-6, rtol=2e-4, err_msg=name)

    reports, updates = iter(expected.reports), iter(expected.updates)
    for number in range(PERIODS):
        ranks.begin_period(number, number, 4)
        for update in range(config.grpo.num_iterations):
            found = [ranks.accumulate(groups, detail=True) for groups in micro_steps(make_period(number))]
            compare_reports(found, next(reports))
            done, wanted = ranks.finish_update(last=update == config.grpo.num_iterations - 1), next(updates)
            assert done.version == wanted.version
            assert done.metrics.keys() == wanted.metrics.keys()
            for name, value in wanted.metrics.items():
                assert done.metrics[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name


def compare_reports(found: list[MicroStepReport], expected: MicroStepReport) -> None:
    assert sorted(g for report in found for g in report.groups) == sorted(expected.groups)
    assert sum(report.completion_tokens for report in found) == expected.completion_tokens
    assert sum(report.tokens for report in found) == expected.tokens
    assert sum(report.loss_sum for report in found) == pytest.approx(expected.loss_sum, rel=1e-4, abs=1e-4)
    details = sorted((d for report in found for d in report.detail), key=lambda d: (d.group, d.completion))
    assert len(details) == len(expected.detail)
    for mine, theirs in zip(details, expected.detail, strict=True):
        assert (mine.group, mine.completion) == (theirs.group, theirs.completion)
        for field in ("policy_R", "old_R", "reference_R", "ratio_R", "kl_R", "entropy_R", "loss_R", "mask_R"):
            found_R, wanted_R = getattr(mine, field), getattr(theirs, field)
            if wanted_R is None:
                assert found_R is None, field
            else:
                np.testing.assert_allclose(found_R, wanted_R, atol=2e-5, err_msg=field)


def compare_weights(ranks: Ranks, expected: dict[str, torch.Tensor], directory: Path) -> None:
    published = open_version(ranks.publish(str(directory)))
    assert published.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(published[name], weight, atol=5e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_three_periods_equal_the_torch_trainer(pool, rank_model, reference, tmp_path, parallel, tied, shared):
    folder = rank_model("qwen3", tied)
    expected = reference(folder, shared_prompt=shared)
    config = make_config(shared_prompt=shared, **PARALLEL[parallel])
    with pool.trainer(folder, config) as ranks:
        run_and_compare(ranks, config, expected, one_step)
        compare_weights(ranks, expected.weights, tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("parallel", ["tp2", "pp2"])
def test_other_architectures(pool, rank_model, reference, tmp_path, parallel, kind):
    folder = rank_model(kind, tied=True)
    expected = reference(folder, shared_prompt=True)
    config = make_config(shared_prompt=True, **PARALLEL[parallel])
    with pool.trainer(folder, config) as ranks:
        run_and_compare(ranks, config, expected, one_step)
        compare_weights(ranks, expected.weights, tmp_path)


@pytest.mark.parametrize("parallel", ["dp2", "tp2pp2"])
def test_replicas_without_work_neither_hang_nor_change_the_result(pool, rank_model, reference, parallel):
    expected = reference(rank_model(), shared_prompt=True)
    config = make_config(shared_prompt=True, **PARALLEL[parallel])
    with pool.trainer(rank_model(), config) as ranks:
        run_and_compare(ranks, config, expected, step_by_step)


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": True, "shared_prompt": True},
        {"sequence_parallel": True, "shared_prompt": False},
        {"gradient_checkpointing": True, "shared_prompt": True},
        {"gradient_checkpointing": True, "sequence_parallel": True, "shared_prompt": True},
    ],
    ids=lambda options: "-".join(name for name, value in options.items() if value),
)
@pytest.mark.parametrize("parallel", ["tp2", "tp2pp2"])
def test_sequence_parallel_and_recompute(pool, rank_model, reference, parallel, options):
    expected = reference(rank_model(), shared_prompt=options["shared_prompt"])
    config = make_config(**options, **PARALLEL[parallel])
    with pool.trainer(rank_model(), config) as ranks:
        run_and_compare(ranks, config, expected, one_step)


@pytest.mark.parametrize(
    "grpo",
    [
        {"num_iterations": 2, "epsilon": 0.001},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
        {"loss_type": "cispo", "beta": 0.0},
        {"loss_type": "dr_grpo", "kl_estimator": "k1", "mask_truncated_completions": True},
    ],
    ids=["two updates", "sequence level", "cispo", "dr_grpo"],
)
@pytest.mark.parametrize("parallel", ["tp2", "pp2", "dp2"])
def test_algorithms(pool, rank_model, reference, parallel, grpo):
    expected = reference(rank_model(), grpo=grpo, shared_prompt=True)
    config = make_config(grpo=grpo, shared_prompt=True, **PARALLEL[parallel])
    with pool.trainer(rank_model(), config) as ranks:
        run_and_compare(ranks, config, expected, one_step)


def test_another_reference_and_an_old_policy_that_always_runs(pool, rank_model, tmp_path):
    other = rank_model(seed=1)
    options = {"shared_prompt": True, "old_policy": "always"}
    torch.set_num_threads(1)
    expected = torch_reference(rank_model(), make_config("torch", **options), reference_path=other)
    config = make_config(**options, **PARALLEL["tp2pp2"])
    with pool.trainer(rank_model(), config, reference_path=other) as ranks:
        run_and_compare(ranks, config, expected, one_step)
