"""Attention over part of the keys with its log-sum-exp, the merge of two parts, and the backward of one part.

With the output and log-sum-exp of the whole softmax, the backward of a part is that of plain attention: probabilities
are exp(score - lse) and the row sum of dO * O is the whole row's. So parts need not be kept, only the merged result.
On CPU this is PyTorch's flash kernel; elsewhere plain matrix products, a slice of queries at a time.

Shapes: C spans of L queries and P keys, H query heads, G key/value heads, D head dimension; causal parts have L = P.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_SLICE = 512
"""Queries per slice of the plain products; bounds the scores held at once."""
CAUSAL_BLOCK = 256
"""Causal spans are halved down to about this in the backward: PyTorch's CPU kernel computes blocks of 512 keys whole
and masks them afterwards."""


def lse_dtype(q: Tensor) -> torch.dtype:
    """Log-sum-exps of half precision inputs are float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def forward(q_CLHD: Tensor, k_CPGD: Tensor, v_CPGD: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """o_CLHD, lse_CLH"""
    kernel = _flash if q_CLHD.device.type == "cpu" else plain
    q_CHLD, k_CGPD, v_CGPD = (x.transpose(1, 2) for x in (q_CLHD, k_CPGD, v_CPGD))
    o_CHLD, lse_CHL = kernel(q_CHLD, k_CGPD, v_CGPD, causal, scale)
    return o_CHLD.transpose(1, 2), lse_CHL.transpose(1, 2)


def backward(
    do_CLHD: Tensor,
    q_CLHD: Tensor,
    k_CPGD: Tensor,
    v_CPGD: Tensor,
    o_CLHD: Tensor,
    lse_CLH: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """dq_CLHD, dk_CPGD, dv_CPGD of this part; o and lse are those of the whole softmax."""
    if causal and q_CLHD.shape[1] >= 2 * CAUSAL_BLOCK:
        return _backward_in_halves(do_CLHD, q_CLHD, k_CPGD, v_CPGD, o_CLHD, lse_CLH, scale)
    kernel = _flash_backward if q_CLHD.device.type == "cpu" else plain_backward
    do, q, k, v, o, lse = (x.transpose(1, 2) for x in (do_CLHD, q_CLHD, k_CPGD, v_CPGD, o_CLHD, lse_CLH))
    dq, dk, dv = kernel(do, q, k, v, o, lse, causal, scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _backward_in_halves(do_CLHD, q_CLHD, k_CPGD, v_CPGD, o_CLHD, lse_CLH, scale: float) -> tuple[Tensor, ...]:
    """Backward of a causal part as that of three: early on early keys, late on late keys, late on all early keys."""
    L = q_CLHD.shape[1]
    early, late = slice(0, L // 2), slice(L // 2, L)

    def of(queries: slice, keys: slice, causal: bool) -> tuple[Tensor, ...]:
        do, q, o, lse = (x[:, queries] for x in (do_CLHD, q_CLHD, o_CLHD, lse_CLH))
        return backward(do, q, k_CPGD[:, keys], v_CPGD[:, keys], o, lse, causal, scale)

    (dq_early, dk_early, dv_early), (dq_late, dk_late, dv_late) = of(early, early, True), of(late, late, True)
    dq_below, dk_below, dv_below = of(late, early, False)
    halves = (dq_early, dq_late + dq_below), (dk_early + dk_below, dk_late), (dv_early + dv_below, dv_late)
    return tuple(torch.cat(pair, 1) for pair in halves)


def merge(a_CLHD: Tensor, a_lse_CLH: Tensor, b_CLHD: Tensor, b_lse_CLH: Tensor) -> tuple[Tensor, Tensor]:
    """o_CLHD, lse_CLH over the union of two disjoint key sets."""
    b_weight_CLH = (b_lse_CLH - a_lse_CLH).sigmoid().to(a_CLHD.dtype)
    return torch.lerp(a_CLHD, b_CLHD, b_weight_CLH[..., None]), torch.logaddexp(a_lse_CLH, b_lse_CLH)


# The public scaled_dot_product_attention runs these very operators on CPU but hides the log-sum-exp.


def _flash(q_CHLD: Tensor, k_CGPD: Tensor, v_CGPD: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_CHLD, k_CGPD, v_CGPD, 0.0, causal, scale=scale)


def _flash_backward(do_CHLD, q_CHLD, k_CGPD, v_CGPD, o_CHLD, lse_CHL, causal: bool, scale: float):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do_CHLD, q_CHLD, k_CGPD, v_CGPD, o_CHLD, lse_CHL, 0.0, causal, scale=scale
    )


def plain(q_CHLD: Tensor, k_CGPD: Tensor, v_CGPD: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """o_CHLD, lse_CHL"""
    k_CHPD, v_CHPD = _per_query_head(k_CGPD, q_CHLD), _per_query_head(v_CGPD, q_CHLD)
    outputs, lses = [], []
    for start in range(0, q_CHLD.shape[2], QUERY_SLICE):
        scores = _scores(q_CHLD[:, :, start : start + QUERY_SLICE], k_CHPD, start, causal, scale)
        lse = scores.logsumexp(-1)
        outputs.append((scores - lse[..., None]).exp().to(v_CHPD.dtype) @ v_CHPD)
        lses.append(lse)
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def plain_backward(
    do_CHLD: Tensor, q_CHLD: Tensor, k_CGPD: Tensor, v_CGPD: Tensor, o_CHLD: Tensor, lse_CHL: Tensor, causal, scale
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_CHLD, dk_CGPD, dv_CGPD"""
    k_CHPD, v_CHPD = _per_query_head(k_CGPD, q_CHLD), _per_query_head(v_CGPD, q_CHLD)
    dq = []
    dk_CHPD, dv_CHPD = torch.zeros_like(k_CHPD), torch.zeros_like(v_CHPD)
    for start in range(0, q_CHLD.shape[2], QUERY_SLICE):
        part = slice(start, start + QUERY_SLICE)
        q, do, o, lse = q_CHLD[:, :, part], do_CHLD[:, :, part], o_CHLD[:, :, part], lse_CHL[:, :, part]
        p = (_scores(q, k_CHPD, start, causal, scale) - lse[..., None]).exp()
        dv_CHPD += p.to(do.dtype).transpose(-1, -2) @ do
        row_sum = (do * o).sum(-1, keepdim=True)
        ds = (p * (do @ v_CHPD.transpose(-1, -2) - row_sum)).to(q.dtype)
        dq.append(ds @ k_CHPD * scale)
        dk_CHPD += ds.transpose(-1, -2) @ q * scale
    heads = (k_CGPD.shape[1], -1)
    return torch.cat(dq, 2), dk_CHPD.unflatten(1, heads).sum(2), dv_CHPD.unflatten(1, heads).sum(2)


def _per_query_head(x_CGPD: Tensor, q_CHLD: Tensor) -> Tensor:
    """x_CHPD: key/value heads repeated for the query heads that share them, as the CPU kernel does by itself."""
    sharing = q_CHLD.shape[1] // x_CGPD.shape[1]
    return x_CGPD.unsqueeze(2).expand(-1, -1, sharing, -1, -1).flatten(1, 2)  # no copy where none share


def _scores(q: Tensor, k: Tensor, start: int, causal: bool, scale: float) -> Tensor:
    """Scores of a slice of queries in lse_dtype, -inf above the diagonal of a causal part."""
    scores = (q @ k.transpose(-1, -2)).to(lse_dtype(q)) * scale
    if causal:
        above = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(start + 1)
        scores = scores.masked_fill(above, float("-inf"))
    return scores
