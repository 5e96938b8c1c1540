"""Shared-prompt attention from pieces: every prompt once, every response against [prompt; itself], no S x S mask.

Attention over a union of disjoint key sets is the mean of the attentions over each set, weighted by their softmax
denominators (log-sum-exp), as in online softmax (Milakov & Gimelshein 2018) and FlashAttention (Dao et al. 2022).
Two kinds of pieces cover a layout:

- self: causal attention within a span (a prompt, a response); spans of similar length share one batched call;
- cross: all responses of a group, as one long query, against the prompt's keys, unmasked.

In the last layer nobody reads what a prompt's tokens come to, but the last one's, which predicts every first response
token. So there are no self pieces of prompts there, and the cross pieces' query begins with that token.

The backward of a piece needs only the merged output and log-sum-exp, so nothing of size queries x keys is kept.

Shapes: N = B*S flat tokens (M of keys where they differ), H query heads, G key/value heads, D head dimension;
within a piece: C spans of L tokens, at most P keys each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prl_notebook.attention.kernels import partial
from prl_notebook.attention.layout import Layout

FILL = 0.75
"""Spans share a bucket while the shortest has at least this share of the longest one's tokens,"""
PIECE_PAIRS = 8192
"""or while padding wastes fewer (query, key) pairs than this: about what a piece of its own costs on a CPU."""


class Tokens(NamedTuple):
    """Flat tokens of C spans, padded to one length L by repeating each span's last token."""

    at: slice | Tensor
    """of all C*L tokens; a slice where they are contiguous (no copy)"""
    spans: int
    real: Tensor | None = None
    """int64 positions among the C*L that are not padding; None when all are real"""
    real_at: Tensor | None = None
    """at[real]"""

    def take(self, x_NHD: Tensor) -> Tensor:
        """x_CLHD"""
        taken = x_NHD[self.at] if isinstance(self.at, slice) else x_NHD.index_select(0, self.at)
        return taken.unflatten(0, (self.spans, -1))

    def take_real(self, x_NHD: Tensor) -> Tensor:
        """x_CLHD with zeros at padding: a repeated token must not count twice in a gradient."""
        if self.real is None:
            return self.take(x_NHD)
        x_CLHD = x_NHD.new_zeros(self.at.shape[0], *x_NHD.shape[1:])  # type: ignore[union-attr]
        x_CLHD[self.real] = x_NHD.index_select(0, self.real_at)  # type: ignore[arg-type]
        return x_CLHD.unflatten(0, (self.spans, -1))

    def put(self, x_NHD: Tensor, y_CLHD: Tensor) -> None:
        """Write the real tokens of y into x."""
        index, y_LHD = self._real_only(y_CLHD)
        x_NHD[index] = y_LHD

    def add_to(self, x_NHD: Tensor, y_CLHD: Tensor) -> None:
        """Add the real tokens of y into x; no token occurs twice among them."""
        index, y_LHD = self._real_only(y_CLHD)
        x_NHD[index] += y_LHD

    def _real_only(self, y_CLHD: Tensor) -> tuple[slice | Tensor, Tensor]:
        y_LHD = y_CLHD.flatten(0, 1)
        return (self.at, y_LHD) if self.real is None else (self.real_at, y_LHD.index_select(0, self.real))  # type: ignore[return-value]


class Piece(NamedTuple):
    """Attention of some queries over some keys. A query token is in one self piece at most."""

    queries: Tokens
    keys: Tokens
    causal: bool


def prepare(layout: Layout, device: torch.device, last_layer: bool = False) -> list[Piece]:
    """Self pieces first, then one cross piece per group."""
    S = layout.shape[1]
    spans: list[tuple[int, int]] = []
    cross = []
    for row, block in layout.iter_blocks():
        prompt, prompt_end = row * S + block.prompt_start, row * S + block.prompt_start + block.prompt_len
        if not last_layer:
            spans.append((prompt, block.prompt_len))
        spans += [(row * S + r.start, r.length) for r in block.responses]
        queries = Tokens(slice(prompt_end - last_layer, row * S + block.end), 1)
        cross.append(Piece(queries, Tokens(slice(prompt, prompt_end), 1), causal=False))
    self_pieces = [Piece(tokens, tokens, causal=True) for tokens in bucket(spans, device)]
    return self_pieces + cross


def prepare_responses(layout: Layout, device: torch.device) -> list[Piece]:
    """Pieces of one group's responses alone: the queries leave the prompt out, the keys hold it first."""
    ((_, block),) = layout.iter_blocks()
    P, spans = block.prompt_len, [(r.start, r.length) for r in block.responses]
    queries = bucket([(start - P, length) for start, length in spans], device)
    own = [Piece(q, k, causal=True) for q, k in zip(queries, bucket(spans, device), strict=True)]
    return [*own, Piece(Tokens(slice(0, block.end - P), 1), Tokens(slice(0, P), 1), causal=False)]


def bucket(spans: list[tuple[int, int]], device: torch.device) -> Iterator[Tokens]:
    """Group (start, length) spans of similar length, longest first."""
    spans = sorted(spans, key=lambda span: (-span[1], span[0]))
    while spans:
        longest, wasted, count = spans[0][1], 0, 0
        for _, length in spans:
            wasted += longest**2 - length**2
            if length < FILL * longest and wasted > PIECE_PAIRS:
                break
            count += 1
        yield _tokens(spans[:count], longest, device)
        spans = spans[count:]


def _tokens(spans: list[tuple[int, int]], longest: int, device: torch.device) -> Tokens:
    starts_C, lengths_C = (np.asarray(column) for column in zip(*spans, strict=True))
    if (lengths_C == longest).all() and (np.diff(starts_C) == longest).all():
        return Tokens(slice(int(starts_C[0]), int(starts_C[-1]) + longest), len(spans), None)
    offset_L = np.arange(longest)
    index_CL = starts_C[:, None] + np.minimum(offset_L, lengths_C[:, None] - 1)
    real = torch.from_numpy(np.flatnonzero(offset_L < lengths_C[:, None])).to(device)
    index = torch.from_numpy(index_CL.reshape(-1)).to(device)
    return Tokens(index, len(spans)) if len(real) == len(index) else Tokens(index, len(spans), real, index[real])


def attend(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, state: list[Piece], scale: float) -> Tensor:
    """o_BSHD; zero at tokens outside all queries (padding)."""
    B, H, S, D = q_BHSD.shape
    flat = (x.transpose(1, 2).reshape(-1, x.shape[1], D) for x in (q_BHSD, k_BGSD, v_BGSD))
    return _Pieces.apply(*flat, state, scale).view(B, S, H, D)


class _Pieces(torch.autograd.Function):
    """o_NHD of q_NHD, k_MGD, v_MGD over all pieces."""

    @staticmethod
    def forward(ctx, q_NHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, pieces: list[Piece], scale: float) -> Tensor:
        o_NHD = torch.zeros_like(q_NHD)
        lse_NH = q_NHD.new_full(q_NHD.shape[:2], float("-inf"), dtype=partial.lse_dtype(q_NHD))
        for queries, keys, causal in pieces:
            q_CLHD, k_CPGD, v_CPGD = queries.take(q_NHD), keys.take(k_MGD), keys.take(v_MGD)
            o_CLHD, lse_CLH = partial.forward(q_CLHD, k_CPGD, v_CPGD, causal, scale)
            if not causal:
                o_CLHD, lse_CLH = partial.merge(o_CLHD, lse_CLH, queries.take(o_NHD), queries.take(lse_NH))
            queries.put(o_NHD, o_CLHD)
            queries.put(lse_NH, lse_CLH)
        ctx.save_for_backward(q_NHD, k_MGD, v_MGD, o_NHD, lse_NH)
        ctx.pieces, ctx.scale = pieces, scale
        return o_NHD

    @staticmethod
    def backward(ctx, do_NHD: Tensor):  # type: ignore[override]
        q_NHD, k_MGD, v_MGD, o_NHD, lse_NH = ctx.saved_tensors
        dq_NHD, dk_MGD, dv_MGD = torch.zeros_like(q_NHD), torch.zeros_like(k_MGD), torch.zeros_like(v_MGD)
        for queries, keys, causal in ctx.pieces:
            q_CLHD, k_CPGD, v_CPGD = queries.take(q_NHD), keys.take(k_MGD), keys.take(v_MGD)
            o_CLHD, lse_CLH, do_CLHD = queries.take(o_NHD), queries.take(lse_NH), queries.take_real(do_NHD)
            dq, dk, dv = partial.backward(do_CLHD, q_CLHD, k_CPGD, v_CPGD, o_CLHD, lse_CLH, causal, ctx.scale)
            write = Tokens.put if causal else Tokens.add_to  # self pieces come first, and no token is in two of them
            write(queries, dq_NHD, dq)
            write(keys, dk_MGD, dk)
            write(keys, dv_MGD, dv)
        return dq_NHD, dk_MGD, dv_MGD, None, None
