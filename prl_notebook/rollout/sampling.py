"""Drawing tokens: temperature, top-k, top-p and one inverse-CDF draw per row, with a random stream of each row's own.

Repetition penalties, minimum lengths and other logits processors are left out: the trainer could not reproduce their
probabilities from the model alone.

Shapes: B rows, V vocabulary, R tokens of one completion.
"""

from __future__ import annotations

import numpy as np
import torch

from prl_notebook.engine.types import Sampling


def uniforms(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers of a completion's random stream, float32 [count] in [0, 1).

    Number t draws token t, so a completion's randomness depends on its seed alone (Philox, Salmon et al. 2011).
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count, dtype=np.float32)


def warp(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """float32 logits of the sampling distribution: over the temperature, -inf outside top-k and then top-p.

    Order and ties are those of transformers' generate: tokens level with the k-th stay; the smallest set of likeliest
    tokens whose mass reaches top_p stays.
    """
    logits_BV = logits_BV.float() / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[1]:
        kth_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(descending=True, stable=True)
        probs_BV = sorted_BV.softmax(-1)
        outside_BV = probs_BV.cumsum(-1) - probs_BV >= sampling.top_p
        outside_BV[:, 0] = False  # a token with all the mass can round to 1 >= top_p
        logits_BV = logits_BV.masked_fill(outside_BV.scatter(1, order_BV, outside_BV), -torch.inf)
    return logits_BV


def sample(logits_BV: torch.Tensor, uniforms_B: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the CDF (on a CPU far cheaper than multinomial over a large vocabulary).

    Returns:
        ids_B (int64) and logprobs_B (float32): log-probs under exactly the distribution drawn from.
    """
    logits_BV = warp(logits_BV, sampling)
    logprobs_BV = logits_BV.log_softmax(-1)
    cdf_BV = logprobs_BV.exp().cumsum(-1)
    total_B1 = cdf_BV[:, -1:].clone()
    ids_B1 = torch.searchsorted(cdf_BV, uniforms_B[:, None] * total_B1, right=True)
    # The product can round up to the total, which would step past the last token that has probability.
    ids_B1 = torch.minimum(ids_B1, torch.searchsorted(cdf_BV, total_B1))
    return ids_B1[:, 0], logprobs_BV.gather(1, ids_B1)[:, 0]
