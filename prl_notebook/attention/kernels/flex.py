"""FlexAttention with the layout's mask as a block mask: CUDA, forward and backward; on CPU forward only.

FlexAttention skips blocks of 128 x 128 pairs that the mask empties, so responses cost nothing towards each other.
Compiled on CUDA; uncompiled elsewhere, where it serves to check the mask.

Shapes: see kernels/__init__.py.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from prl_notebook.attention.layout import Layout


def prepare(layout: Layout, device: torch.device) -> BlockMask:
    """Block mask of the layout."""
    block_BS = torch.from_numpy(layout.block_BS).to(device)
    response_BS = torch.from_numpy(layout.response_BS).to(device)

    def may_attend(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same_block = block_BS[b, q] == block_BS[b, kv]
        visible = (response_BS[b, kv] == 0) | (response_BS[b, q] == response_BS[b, kv])
        return (q >= kv) & same_block & visible

    B, S = layout.shape
    return create_block_mask(may_attend, B, None, S, S, device=device)


def attend(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, state: BlockMask, scale: float) -> Tensor:
    """o_BSHD"""
    kernel = _compiled() if q_BHSD.is_cuda else flex_attention
    gqa = q_BHSD.shape[1] != k_BGSD.shape[1]
    return kernel(q_BHSD, k_BGSD, v_BGSD, block_mask=state, scale=scale, enable_gqa=gqa).transpose(1, 2)


@cache
def _compiled():
    # dynamic: every layout has another S.
    return torch.compile(flex_attention, dynamic=True)
