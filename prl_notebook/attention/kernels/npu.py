"""Ascend's fused attention (torch_npu.npu_fusion_attention), in the two forms that can express shared prompts.

- TND, sparse_mode=3: all tokens as one sequence of segments, the queries [P | r1 | r2 ...] against the keys
  [P | P r1 | P r2 ...], causal from the lower right. No S x S mask; prompt keys are copied once per response.
- SBH, sparse_mode=1: the full mask. Taken when there are more segments than TND admits.

Checked against the operator's real schema and documented semantics on CPU; it has not been run on an NPU.

Shapes: see kernels/__init__.py; N = B*S flat tokens, M gathered key tokens.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from prl_notebook.attention.kernels import dense
from prl_notebook.attention.layout import Layout

MAX_SEGMENTS = 1024
"""TND's limit on the number of segments."""
COMPRESSED = 2048
"""Side of the triangular mask that sparse_mode 3 takes in place of one per segment."""


class Segments(NamedTuple):
    """State of the TND form."""

    keys_M: torch.Tensor
    """int64 flat token of each gathered key"""
    query_ends: list[int]
    key_ends: list[int]
    masked: torch.Tensor
    """bool [2048, 2048], True above the diagonal"""


class FullMask(NamedTuple):
    """State of the SBH form."""

    masked: torch.Tensor
    """bool [B, 1, S, S], True = may not attend"""


def prepare(layout: Layout, device: torch.device) -> Segments | FullMask:
    """The TND form where its limit on segments allows it."""
    spans = _spans(layout)
    return segments(spans, device) if len(spans) <= MAX_SEGMENTS else full_mask(layout, device)


def full_mask(layout: Layout, device: torch.device) -> FullMask:
    """State of the SBH form."""
    return FullMask(~dense.prepare(layout, device))


def segments(spans: list[tuple[range, range]], device: torch.device) -> Segments:
    """State of the TND form from (query tokens, prefix tokens) of each segment, in flat order."""
    keys = [np.concatenate((np.asarray(prefix), np.asarray(own))) for own, prefix in spans]
    masked = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)
    return Segments(
        torch.from_numpy(np.concatenate(keys).astype(np.int64)).to(device),
        list(accumulate(len(own) for own, _ in spans)),
        list(accumulate(len(k) for k in keys)),
        masked,
    )


def _spans(layout: Layout) -> list[tuple[range, range]]:
    """(query tokens, prefix tokens) of every segment; padding is a segment of its own, since no row may be empty."""
    S = layout.shape[1]
    spans = []
    for row, blocks in enumerate(layout.blocks):
        base = row * S
        for block in blocks:
            prompt = range(base + block.prompt_start, base + block.prompt_start + block.prompt_len)
            spans.append((prompt, range(0)))
            spans += [(range(base + r.start, base + r.start + r.length), prompt) for r in block.responses]
        if blocks[-1].end < S:
            spans.append((range(base + blocks[-1].end, base + S), range(0)))
    return spans


def attend(
    q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, state: Segments | FullMask, scale: float
) -> torch.Tensor:
    """o_BSHD"""
    import torch_npu  # Ascend only; importing it registers the operator

    B, H, S, D = q_BHSD.shape
    if isinstance(state, FullMask):
        q_SBX, k_SBX, v_SBX = (x.permute(2, 0, 1, 3).reshape(S, B, -1) for x in (q_BHSD, k_BGSD, v_BGSD))
        o_SBX = torch_npu.npu_fusion_attention(
            q_SBX, k_SBX, v_SBX, H, "SBH", atten_mask=state.masked, scale=scale, sparse_mode=1
        )[0]
        return o_SBX.view(S, B, H, D).transpose(0, 1)
    q_NHD, k_NGD, v_NGD = (x.transpose(1, 2).reshape(B * S, -1, D) for x in (q_BHSD, k_BGSD, v_BGSD))
    o_NHD = torch_npu.npu_fusion_attention(
        q_NHD,
        k_NGD[state.keys_M],
        v_NGD[state.keys_M],
        H,
        "TND",
        atten_mask=state.masked,
        scale=scale,
        sparse_mode=3,
        actual_seq_qlen=state.query_ends,
        actual_seq_kvlen=state.key_ends,
    )[0]
    return o_NHD.view(B, S, H, D)
