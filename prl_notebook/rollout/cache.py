"""The key-value cache of a batch whose rows have different lengths, join at any step and leave when done.

Row r keeps its token at position p in slot p (left-aligned), so joining is a copy, leaving moves the last row
into the hole, and masking goes by length: no pad token exists. Every key is kept, also beyond a sliding window; the
window is the mask's business. Paging and sharing a prompt's keys between its rows are left out.

Shapes: B rows of one call, R rows stored, P prompt length, T positions, H key-value heads, G query heads per
key-value head, D head dimension.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "prl_rollout"
"""Name under which `decode_attention` is registered with transformers."""
LENGTH_STEP = 64
"""Storage grows by multiples of this many positions."""


class RowLayer(DynamicLayer):
    """Keys and values of one layer, [R, H, T, D]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cache: RowCache):
        super().__init__()
        self.cache = cache

    def reserve(self, rows: int, length: int, like: DynamicLayer) -> None:
        """Grow to [rows, length], with the heads, dtype and device of `like` (which may be this layer)."""
        grown = []
        for name in ("keys", "values"):
            like_BHTD = getattr(like, name)
            # Zeros, not empty: masked slots still enter the kernels, where 0 * NaN would be NaN.
            store_RHTD = like_BHTD.new_zeros(rows, like_BHTD.shape[1], length, like_BHTD.shape[3])
            if self.is_initialized:
                old_RHTD = getattr(self, name)
                store_RHTD[: old_RHTD.shape[0], :, : old_RHTD.shape[2]] = old_RHTD
            grown.append(store_RHTD)
        self.keys, self.values = grown
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one new token per row ([B, H, 1, D]); returns everything the rows hold, [B, H, T, D]."""
        cache = self.cache
        rows = slice(cache.first, cache.first + len(cache.positions_B))
        self.keys[cache.rows_B, :, cache.positions_B] = key_states[:, :, 0]
        self.values[cache.rows_B, :, cache.positions_B] = value_states[:, :, 0]
        return self.keys[rows, :, : cache.length], self.values[rows, :, : cache.length]

    def get_seq_length(self) -> int:
        return self.cache.length - 1


class RowCache(Cache):
    """A transformers `Cache` of R rows; `select` says which rows the next forward pass advances by one token."""

    layers: list[Any]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.capacity = (0, 0)
        """Rows and positions stored."""
        self.first = self.length = 0
        self.rows_B = self.positions_B = torch.empty(0, dtype=torch.long)

    def join(self, first: int, count: int, prefilled: Cache, index: int, length: int) -> None:
        """Copy a prompt, row `index` of a prefilled cache ([B, H, P, D]), into `count` rows from `first` on."""
        self.reserve(first + count, length + 1, like=prefilled)
        rows = slice(first, first + count)
        for layer, source in zip(self.layers, cast(list[Any], prefilled.layers), strict=True):
            layer.keys[rows, :, :length] = source.keys[index, :, :length]
            layer.values[rows, :, :length] = source.values[index, :, :length]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` positions of some rows over others (the two sets are disjoint)."""
        for layer in self.layers:
            layer.keys[targets, :, :length] = layer.keys[sources, :, :length]
            layer.values[targets, :, :length] = layer.values[sources, :, :length]

    def select(self, first: int, positions_B: torch.Tensor, length: int) -> None:
        """Let the next forward pass write position `positions_B[b]` of row `first + b` and read `length` positions."""
        self.reserve(first + len(positions_B), length, like=self)
        self.first, self.length, self.positions_B = first, length, positions_B
        self.rows_B = torch.arange(first, first + len(positions_B), device=positions_B.device)

    def reserve(self, rows: int, length: int, like: Cache) -> None:
        """Make room for [rows, length]; `like` is a cache of the same model, for heads, dtype and device."""
        if rows <= self.capacity[0] and length <= self.capacity[1]:
            return
        # Half as much again, so that neither growing completions nor joining groups copy everything at every step.
        if rows > self.capacity[0]:
            rows += rows // 2
        if length > self.capacity[1]:
            length = -(-length * 3 // (2 * LENGTH_STEP)) * LENGTH_STEP
        self.capacity = max(rows, self.capacity[0]), max(length, self.capacity[1])
        self.layers = self.layers or [RowLayer(self) for _ in like.layers]
        for layer, other in zip(self.layers, like.layers, strict=True):
            layer.reserve(*self.capacity, like=other)


def decode_mask(positions_B: torch.Tensor, length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, 1, T]: a row sees the positions up to its own, `window` of them if that is given."""
    age_BT = positions_B[:, None] - torch.arange(length, device=positions_B.device)
    hidden_BT = age_BT < 0 if window is None else (age_BT < 0) | (age_BT >= window)
    mask_BT = torch.zeros(hidden_BT.shape, dtype=dtype, device=hidden_BT.device).masked_fill_(hidden_BT, -torch.inf)
    return mask_BT[:, None, None]


def decode_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA attention, but one-token queries are folded by key-value head instead of repeating the keys.

    The G query heads that share a key-value head see the same keys under the same mask, so they go in as G queries:
    [B, H * G, 1, D] becomes [B, H, G, D] and no key is copied.
    """
    if query.shape[2] != 1 or attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    query_BHGD = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    out_BHGD = F.scaled_dot_product_attention(query_BHGD, key, value, attn_mask=attention_mask, scale=scaling)
    return out_BHGD.reshape(len(query), 1, query.shape[1], value.shape[3]), None


AttentionInterface.register(ATTENTION, decode_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
