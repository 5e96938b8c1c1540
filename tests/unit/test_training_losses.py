"""Losses on flat tokens: masks, clipping, KL estimators, truncated importance sampling.

Shapes: T tokens, S completions, V a vocabulary small enough to sum over.
"""

import logging

import numpy as np
import pytest
import torch
from training_cases import make_config

from prl_notebook.training.losses import LossInputs, token_losses, warn_about_kl
from prl_notebook.training.metrics import UpdateMetrics
from prl_notebook.training.normalisers import denominator, sequence_weights

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "cispo")


def inputs(policy_T, sequence_T=None, advantage_S=(1.0,), mask_T=None, **others) -> LossInputs:
    policy_T = torch.as_tensor(policy_T, dtype=torch.float64)
    ones_T = torch.ones(len(policy_T), dtype=torch.bool)
    defaults = {
        "old_T": policy_T.detach(),
        "reference_T": None,
        "sampler_T": policy_T.detach(),
        "sequence_T": torch.zeros(len(policy_T), dtype=torch.long) if sequence_T is None else torch.tensor(sequence_T),
        "mask_T": ones_T if mask_T is None else torch.tensor(mask_T),
        "kl_mask_T": ones_T,
        "advantage_S": torch.tensor(advantage_S, dtype=torch.float64),
    }
    return LossInputs(policy_T=policy_T, **defaults | others)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_fully_masked_batch_is_a_finite_zero_that_backward_accepts(loss_type, level):
    grpo = make_config(loss_type=loss_type, importance_sampling_level=level, beta=0.1).grpo
    policy_T = torch.tensor([-1.0, -float("inf"), -800.0], dtype=torch.float64, requires_grad=True)
    x = inputs(policy_T, mask_T=[False] * 3, old_T=torch.tensor([-9e3, -1.0, 0.0]), reference_T=torch.zeros(3).double())
    result = token_losses(x, grpo)
    total = (result.loss_T * sequence_weights(grpo, x.tokens_S)[x.sequence_T] * x.mask_T).sum()
    total.backward()
    assert total.item() == 0
    assert torch.equal(policy_T.grad, torch.zeros(3, dtype=torch.float64))
    metrics = UpdateMetrics(level == "sequence", loss_type == "cispo")
    metrics.add(x, result, torch.zeros(3), total.item())
    assert np.isfinite(list(metrics.result(denominator(grpo, 3, metrics.tokens)).values())).all()


def test_clipping_stops_the_gradient_only_where_the_surrogate_is_clipped():
    grpo = make_config(epsilon=0.2, epsilon_high=0.3).grpo
    policy_T = torch.log(torch.tensor([1.29, 1.31, 0.79, 1.31], dtype=torch.float64)).requires_grad_()
    x = inputs(policy_T, [0, 0, 1, 1], (1.0, -1.0), old_T=torch.zeros(4).double())
    result = token_losses(x, grpo)
    result.loss_T.sum().backward()
    torch.testing.assert_close(policy_T.grad, torch.tensor([-1.29, 0.0, 0.0, 1.31], dtype=torch.float64))
    assert result.high_clipped_T.tolist() == [False, True, False, False]
    assert result.low_clipped_T.tolist() == [False, False, True, False]


def test_cispo_caps_the_weight_and_keeps_every_gradient():
    grpo = make_config(loss_type="cispo", epsilon_high=1.5).grpo
    policy_T = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    token_losses(inputs(policy_T, old_T=torch.tensor([-3.0, -2.0])), grpo).loss_T.sum().backward()
    assert policy_T.grad.tolist() == [-1.5, -1.0]


def test_sequence_level_ratio_is_the_geometric_mean_of_counted_tokens():
    grpo = make_config(importance_sampling_level="sequence").grpo
    x = inputs(
        torch.tensor([0.2, 0.4, 9.0, 0.0]), [0, 0, 0, 1], (1.0, 1.0), [True, True, False, True], old_T=torch.zeros(4)
    )
    torch.testing.assert_close(token_losses(x, grpo).ratio_T.log(), torch.tensor([0.3, 0.3, 0.3, 0.0]).double())


def test_truncated_importance_sampling_weighs_by_trainer_over_sampler():
    grpo = make_config(importance_sampling_correction=True, importance_sampling_cap=2.0).grpo
    sampler_T = torch.log(torch.tensor([0.5, 0.1, 0.8, float("nan")], dtype=torch.float64))
    x = inputs(torch.full((4,), 0.4).log(), sampler_T=sampler_T)
    torch.testing.assert_close(
        token_losses(x, grpo).loss_T, -torch.tensor([0.8, 2.0, 0.5, 1.0]).double(), rtol=1e-6, atol=0
    )


def expected_kl_gradient(estimator: str, corrected: bool) -> torch.Tensor:
    """Exact expectation, over tokens drawn from the policy, of the KL loss's gradient with respect to logits [V]."""
    grpo = make_config(kl_estimator=estimator, use_bias_correction_kl=corrected, beta=1.0).grpo
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    logprob_V = logits_V.log_softmax(-1)
    x = inputs(logprob_V, reference_T=reference_logprobs(), advantage_S=(0.0,))
    (logprob_V.detach().exp() * token_losses(x, grpo).loss_T).sum().backward()
    return logits_V.grad


def reference_logprobs() -> torch.Tensor:
    return torch.tensor([-0.5, 0.7, 0.2, -1.0], dtype=torch.float64).log_softmax(-1)


def kl_gradient(forward: bool) -> torch.Tensor:
    logits_V = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    p, q = logits_V.log_softmax(-1), reference_logprobs()
    (q.exp() * (q - p) if forward else p.exp() * (p - q)).sum().backward()
    return logits_V.grad


def test_gradient_of_each_kl_estimator():
    torch.testing.assert_close(expected_kl_gradient("k1", False), torch.zeros(4).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(expected_kl_gradient("k2", False), kl_gradient(forward=False))
    torch.testing.assert_close(expected_kl_gradient("k3", False), kl_gradient(forward=True))
    for estimator in ("k1", "k2", "k3"):
        torch.testing.assert_close(expected_kl_gradient(estimator, True), kl_gradient(forward=False))


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"kl_estimator": "k1", "beta": 0.1, "use_bias_correction_kl": False}, True),
        ({"kl_estimator": "k1", "beta": 0.1, "importance_sampling_level": "sequence"}, True),
        ({"kl_estimator": "k1", "beta": 0.1}, False),
        ({"kl_estimator": "k1", "beta": 0.0, "use_bias_correction_kl": False}, False),
        ({"kl_estimator": "k3", "beta": 0.1, "use_bias_correction_kl": False}, False),
    ],
)
def test_k1_as_a_loss_warns(caplog, fields, warned):
    with caplog.at_level(logging.WARNING):
        warn_about_kl(make_config(**fields).grpo)
    assert ("zero expected gradient" in caplog.text) == warned


def test_metrics_do_not_depend_on_the_split():
    grpo = make_config(beta=0.1).grpo
    generator = torch.Generator().manual_seed(0)

    def random_T() -> torch.Tensor:
        return torch.randn(9, generator=generator, dtype=torch.float64)

    policy_T, old_T, sampler_T, reference_T, entropy_T = (random_T() for _ in range(5))
    sequence_T = torch.tensor([0, 0, 1, 2, 2, 2, 3, 3, 3])
    advantage_S = torch.tensor([1.0, -1.0, 2.0, -2.0], dtype=torch.float64)

    def totals(cuts: list[tuple[int, int]]) -> UpdateMetrics:
        metrics = UpdateMetrics(False, False)
        for first, last in cuts:
            keep = (sequence_T >= first) & (sequence_T < last)
            x = LossInputs(
                policy_T[keep],
                old_T[keep],
                reference_T[keep],
                sampler_T[keep],
                sequence_T[keep] - first,
                torch.ones(int(keep.sum()), dtype=torch.bool),
                torch.ones(int(keep.sum()), dtype=torch.bool),
                advantage_S[first:last],
            )
            result = token_losses(x, grpo)
            metrics.add(x, result, entropy_T[keep], result.loss_T.sum().item())
        return metrics

    whole = totals([(0, 4)])
    expected = whole.result(9.0)
    assert totals([(0, 1), (1, 3), (3, 4)]).result(9.0) == pytest.approx(expected, rel=1e-12)
    first, second = totals([(0, 2)]), totals([(2, 4)])
    first.merge(second)
    assert first.result(9.0) == pytest.approx(expected, rel=1e-12)
    assert expected["clip_ratio/region_mean"] > 0
