"""Drawing tokens: the distribution is the one asked for, and each row's randomness is its own."""

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from prl_notebook.engine.types import Sampling
from prl_notebook.rollout.sampling import sample, uniforms, warp


@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0), (0.7, 20, 0.9), (1.3, 0, 0.5), (0.5, 7, 1.0)])
def test_distribution_is_that_of_transformers_warpers(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(50, 60)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    got = warp(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(got.softmax(-1), expected.softmax(-1), atol=1e-6, rtol=0)


def test_frequencies_follow_probabilities() -> None:
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.95)
    logits = torch.tensor([[1.0, 0.2, -0.5, 2.0, 0.7, -1.0, 1.4]])
    draws = 40_000
    u = torch.from_numpy(uniforms(7, draws))
    ids, logprobs = sample(logits.expand(draws, -1), u, sampling)
    probabilities = warp(logits, sampling).softmax(-1)[0].double()
    counts = torch.bincount(ids, minlength=7).double()
    kept = probabilities > 0
    assert not counts[~kept].any()
    expected = probabilities[kept] * draws
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi_square < 20  # 99.9 % quantile is 18.5 with 4 degrees of freedom; 40 000 draws see a bias of 1 %
    torch.testing.assert_close(logprobs.exp().double(), probabilities[ids], atol=1e-6, rtol=0)


def test_extreme_uniforms_never_pick_impossible_tokens() -> None:
    logits = torch.full((2, 8), -torch.inf)
    logits[:, 2:5] = torch.tensor([0.0, 1.0, 0.3])
    ids, logprobs = sample(logits, torch.tensor([0.0, 1 - 2**-24]), Sampling())
    assert ids.tolist() == [2, 4]
    assert logprobs.isfinite().all()


def test_a_certain_token_survives_top_p() -> None:
    logits = torch.tensor([[80.0, 0.0, -5.0]])
    ids, logprobs = sample(logits, torch.tensor([0.999]), Sampling(top_p=0.1))
    assert ids.tolist() == [0]
    assert logprobs.tolist() == [0.0]


def test_stream_of_a_seed_is_one_sequence() -> None:
    assert np.array_equal(uniforms(5, 100)[:10], uniforms(5, 10))
    assert not np.array_equal(uniforms(5, 10), uniforms(6, 10))
    u = np.stack([uniforms(seed, 1) for seed in range(2000)])  # first draws of neighbouring seeds are unrelated
    assert 0.47 < u.mean() < 0.53
    assert abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 0.07
