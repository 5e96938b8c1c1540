"""Who may attend to whom in a layout: the dense mask, and its block structure for views.

A token sees itself and what came before it of its own prompt and its own response, nothing of other responses or other
groups. Padding sees padding only, so that no row of the mask is empty (a softmax over nothing is NaN). The dense mask
is the reference the kernels are checked against; they do not build it.

Shapes: S tokens per row; Q, K: the same tokens as queries and keys.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from prl_notebook.attention.layout import Layout


class Tile(NamedTuple):
    """A rectangle of the mask in which attention is allowed: everywhere ("full") or up to the diagonal ("causal")."""

    queries: tuple[int, int]
    """start, stop"""
    keys: tuple[int, int]
    kind: Literal["full", "causal"]


def dense_mask(layout: Layout, row: int) -> np.ndarray:
    """bool [S, S] of one row; True where query (axis 0) may attend to key (axis 1)."""
    block_S, response_S = layout.block_BS[row], layout.response_BS[row]
    index_S = np.arange(layout.shape[1])
    causal_QK = index_S[:, None] >= index_S[None, :]
    same_block_QK = block_S[:, None] == block_S[None, :]
    visible_QK = (response_S[None, :] == 0) | (response_S[:, None] == response_S[None, :])
    return causal_QK & same_block_QK & visible_QK


def tiles(layout: Layout, row: int) -> list[Tile]:
    """The allowed tiles of one row without padding; together they are exactly the dense mask of its real tokens."""
    found = []
    for block in layout.blocks[row]:
        prompt = (block.prompt_start, block.prompt_start + block.prompt_len)
        found.append(Tile(prompt, prompt, "causal"))
        for r in block.responses:
            own = (r.start, r.start + r.length)
            found += [Tile(own, prompt, "full"), Tile(own, own, "causal")]
    return found
