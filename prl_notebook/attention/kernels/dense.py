"""Reference kernel: attention under the dense S x S mask. Correct, simple, and slow for long rows.

Shapes: see kernels/__init__.py.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from prl_notebook.attention.layout import Layout
from prl_notebook.attention.mask import dense_mask


def prepare(layout: Layout, device: torch.device) -> torch.Tensor:
    """bool [B, 1, S, S], True = may attend."""
    mask_BSS = np.stack([dense_mask(layout, row) for row in range(layout.shape[0])])
    return torch.from_numpy(mask_BSS).to(device)[:, None]


def attend(
    q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, state: torch.Tensor, scale: float
) -> torch.Tensor:
    """o_BSHD"""
    gqa = q_BHSD.shape[1] != k_BGSD.shape[1]
    o_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, attn_mask=state, scale=scale, enable_gqa=gqa)
    return o_BHSD.transpose(1, 2)
