"""Log-probs and entropies of chosen tokens from a vocabulary that is split over tensor-parallel ranks.

The logits exist for one chunk of tokens at a time, forward and backward, and are never gathered: per chunk the ranks
exchange one maximum and one sum of three numbers a token. Left out on purpose: a gradient of the entropy, which no
loss of this package uses.

Shapes: T response tokens, H hidden size, V vocabulary entries of this rank, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CHUNK_BYTES = 64 << 20
"""Memory for the float32 logits of one chunk."""


def vocab_parallel_scores(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 log-prob [T] of each target under softmax(logits / temperature), and that distribution's entropy [T].

    The gradient that reaches `hidden_TH` is this rank's share: summing it over the group is the caller's
    (copy_to_tensor_model_parallel_region, or the sequence-parallel gather).

    Args:
        weight_VH: the rank's rows of the output matrix; rank r of the group holds entries r*V to (r+1)*V.
        target_T: int64 ids in the whole vocabulary.
    """
    return _Scores.apply(hidden_TH, weight_VH, target_T, temperature, group)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        target_T: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local_T = target_T - group.rank() * len(weight_VH)
        chunks = _chunks(len(target_T), len(weight_VH))
        log_normaliser_T = hidden_TH.new_empty(len(target_T), dtype=torch.float32)
        logprob_T, entropy_T = torch.empty_like(log_normaliser_T), torch.empty_like(log_normaliser_T)
        for c in chunks:
            logits_CV = _logits(hidden_TH[c], weight_VH, temperature)
            top_C = logits_CV.amax(-1)
            dist.all_reduce(top_C, dist.ReduceOp.MAX, group)
            logits_CV -= top_C[:, None]
            own_CV, target_C = _own(local_T[c], len(weight_VH))
            target_logit_C = logits_CV.gather(1, target_C[:, None])[:, 0] * own_CV
            exp_CV = logits_CV.exp()
            sums_3C = torch.stack([exp_CV.sum(-1), (exp_CV * logits_CV).sum(-1), target_logit_C])
            dist.all_reduce(sums_3C, group=group)
            total_C, weighted_C, target_logit_C = sums_3C
            log_total_C = total_C.log()
            logprob_T[c] = target_logit_C - log_total_C
            entropy_T[c] = log_total_C - weighted_C / total_C
            log_normaliser_T[c] = log_total_C + top_C
        ctx.save_for_backward(hidden_TH, weight_VH, local_T, log_normaliser_T)
        ctx.temperature, ctx.chunks = temperature, chunks
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, weight_VH, local_T, log_normaliser_T = ctx.saved_tensors
        grad_hidden_TH, grad_weight_VH = torch.zeros_like(hidden_TH), torch.zeros_like(weight_VH, dtype=torch.float32)
        for c in ctx.chunks:
            logits_CV = _logits(hidden_TH[c], weight_VH, ctx.temperature)
            own_C, target_C = _own(local_T[c], len(weight_VH))
            grad_CV = (logits_CV - log_normaliser_T[c, None]).exp_().mul_(-grad_T[c, None])
            grad_CV.scatter_add_(1, target_C[:, None], (grad_T[c] * own_C)[:, None])
            grad_CV = (grad_CV / ctx.temperature).to(hidden_TH.dtype)
            grad_hidden_TH[c] = grad_CV @ weight_VH
            grad_weight_VH += grad_CV.T @ hidden_TH[c]
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype), None, None, None


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden_CH @ weight_VH.T).float() / temperature


def _own(local_C: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a target lies in this rank's part, and a valid index in any case."""
    return (local_C >= 0) & (local_C < vocabulary), local_C.clamp(0, vocabulary - 1)
