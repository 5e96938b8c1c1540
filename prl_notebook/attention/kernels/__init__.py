"""Attention kernels for a layout behind one signature, and the choice between them.

A kernel is a module with

    prepare(layout, device) -> state           index tensors, masks: once per layout
    attend(q_BHSD, k_BGSD, v_BGSD, state, scale) -> o_BSHD

`dense` is the reference, `split` computes prompts once from pieces (any device), `flex` is FlexAttention with a block
mask (CUDA), `npu` is Ascend's fused attention, and `causal` is plain causal attention for separate rows.

Shapes: B rows, S tokens per row, N read tokens, H query heads, G key/value heads (H a multiple of G), D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from prl_notebook.attention.kernels import causal, dense, flex, npu, split
from prl_notebook.attention.layout import Layout

KERNELS: dict[str, ModuleType] = {"causal": causal, "dense": dense, "flex": flex, "npu": npu, "split": split}


def choose(device: torch.device, layout: Layout, dtype: torch.dtype = torch.float32) -> str:
    """Name of the kernel for a layout on a device."""
    if layout.kind == "separate":
        return "causal"
    if device.type == "npu":
        return "npu"
    # FlexAttention compiles for CUDA only and has no float64.
    return "flex" if device.type == "cuda" and dtype != torch.float64 else "split"


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout made ready for one kernel on one device."""

    layout: Layout
    kernel: str
    device: torch.device
    state: Any
    last_layer: int | None = None
    last_state: Any = None
    """`state` for the last layer, where `split` leaves out queries that nobody reads"""
    read_N: torch.Tensor | None = None
    """flat tokens whose last hidden state is read; None: all"""

    @classmethod
    def of(cls, layout: Layout, device: torch.device, kernel: str, last_layer: int | None = None) -> Plan:
        """Prepare a layout.

        Args:
            last_layer: number of the model's last layer, if only `layout.source_T` is read of its output.

        Raises:
            ValueError: for an unknown kernel, or for `causal` with shared prompts.
        """
        if kernel not in KERNELS:
            raise ValueError(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
        if kernel == "causal" and layout.kind == "shared":
            raise ValueError("kernel='causal' would let a response see the responses packed before it")
        state = last_state = KERNELS[kernel].prepare(layout, device)
        if last_layer is None:
            return cls(layout, kernel, device, state)
        if kernel == "split":
            last_state = split.prepare(layout, device, last_layer=True)
        read_N = torch.from_numpy(np.unique(layout.source_T)).to(device)
        return cls(layout, kernel, device, state, last_layer, last_state, read_N)

    def attend(
        self, q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, scale: float, layer: int
    ) -> torch.Tensor:
        """o_BSHD"""
        state = self.last_state if layer == self.last_layer else self.state
        return KERNELS[self.kernel].attend(q_BHSD, k_BGSD, v_BGSD, state, scale)
