"""Plain causal attention, right for separate rows: right padding comes after every real token, so none sees it.

Shapes: see kernels/__init__.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from prl_notebook.attention.layout import Layout


def prepare(layout: Layout, device: torch.device) -> None:
    """Nothing to prepare."""


def attend(q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, state: None, scale: float) -> torch.Tensor:
    """o_BSHD"""
    gqa = q_BHSD.shape[1] != k_BGSD.shape[1]
    o_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, scale=scale, enable_gqa=gqa)
    return o_BHSD.transpose(1, 2)
