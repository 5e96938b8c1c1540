"""The trainer on the real megatron-core over gloo against the torch trainer: same log-probs, gradients and steps.

Tolerances are those of float32 sums in another order; the models are tiny and random, see megatron_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_cases import PERIODS, Reference, make_config, make_period, save_model, torch_reference
from megatron_ranks import RankPool, Ranks

from prl_notebook.config import Config
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
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    ranks = RankPool(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(kind: str = "qwen3", tied: bool = False, seed: int = 0) -> Path:
        return save_model(root / f"{kind}-{tied}-{seed}", kind, tied, seed)

    return make


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


def run_and_compare(ranks: Ranks, config: Config, expected: Reference, micro_steps: Callable[[list], list]) -> None:
    """Gradient, per-token numbers, metrics and weights of `PERIODS` periods."""
    gradient = ranks.on_all("whole_gradient", micro_steps(make_period(0)))[0]
    assert gradient.keys() == expected.gradient.keys()
    for name, g in expected.gradient.items():
        np.testing.assert_allclose(gradient[name], g, atol=2e-6, rtol=2e-4, err_msg=name)

    reports = iter(expected.reports)
    updates = iter(expected.updates)
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


def compare_reports(found: list, expected: Any) -> None:
    assert sorted(g for report in found for g in report.groups) == sorted(expected.groups)
    assert sum(report.completion_tokens for report in found) == expected.completion_tokens
    assert sum(report.loss_sum for report in found) == pytest.approx(expected.loss_sum, rel=1e-4, abs=1e-4)
    details = sorted((d for report in found for d in report.detail), key=lambda d: (d.group, d.completion))
    assert len(details) == len(expected.detail)
    for mine, theirs in zip(details, expected.detail, strict=True):
        assert (mine.group, mine.completion, mine.advantage) == (
            theirs.group,
            theirs.completion,
            pytest.approx(theirs.advantage),
        )
        for field in ("policy_R", "old_R", "reference_R", "ratio_R", "kl_R", "entropy_R", "loss_R", "mask_R"):
            np.testing.assert_allclose(getattr(mine, field), getattr(theirs, field), atol=2e-5, err_msg=field)


def compare_weights(ranks: Ranks, expected: dict[str, torch.Tensor], directory: Path) -> None:
    published = open_version(ranks.publish(str(directory)))
    assert published.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(published[name], weight, atol=5e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("parallel", PARALLEL)
def test_three_periods_equal_the_torch_trainer(pool, model, reference, tmp_path, parallel, tied, shared):
    folder = model("qwen3", tied)
    expected = reference(folder, shared_prompt=shared)
    config = make_config(shared_prompt=shared, **PARALLEL[parallel])
    with pool.trainer(folder, config) as ranks:
        run_and_compare(ranks, config, expected, lambda groups: [groups])
        compare_weights(ranks, expected.weights, tmp_path)
