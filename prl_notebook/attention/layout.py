"""Layout of one forward pass: which packed token is prompt, response or padding, and which logits predict what.

A *shared* layout holds [prompt | r1 | ... | rK] per group, several groups per row; position ids restart at the prompt's
length for each response and the last prompt token predicts the first token of every response. A *separate* layout
holds one [prompt | r] per row. Both are described by the same blocks and the same flat target arrays, so a trainer
has one path for both. Numpy only: views draw layouts where there is no torch. What attention does with a layout is
left to mask.py and kernels/.

Shapes: B rows, S tokens per row (right padded), T response tokens of the pass, in sequence order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from prl_notebook.engine.types import Group

GroupLike = Group | tuple[int, Sequence[int], Sequence[Sequence[int]]]
"""A group, or (group id, prompt ids, ids of each response)."""


class Response(NamedTuple):
    """The packed tokens [start, start + length) of one completion."""

    start: int
    length: int
    completion: int
    """Index within its group."""
    sequence: int
    """Running number within the layout; indexes `Layout.sequences`."""


class Block(NamedTuple):
    """A prompt and the responses that attend to it, contiguous within one row."""

    group: int
    prompt_start: int
    prompt_len: int
    responses: tuple[Response, ...]

    @property
    def end(self) -> int:
        return self.prompt_start + self.prompt_len + sum(r.length for r in self.responses)


@dataclass(frozen=True, eq=False)
class Layout:
    """One forward pass of packed tokens. Build it with `pack` or `split`."""

    kind: Literal["shared", "separate"]
    input_ids_BS: np.ndarray
    """int64; padding holds id 0, which no real token attends to."""
    blocks: tuple[tuple[Block, ...], ...]
    """Per row, in packed order."""
    sequences: tuple[tuple[int, int], ...]
    """(group, completion) of each sequence, in the order the groups were given."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens per row)."""
        return self.input_ids_BS.shape  # type: ignore[return-value]

    @cached_property
    def position_ids_BS(self) -> np.ndarray:
        """int64; 0 at padding."""
        position_BS = np.zeros(self.shape, np.int64)
        for row, block in self.iter_blocks():
            prompt_end = block.prompt_start + block.prompt_len
            position_BS[row, block.prompt_start : prompt_end] = np.arange(block.prompt_len)
            for r in block.responses:
                position_BS[row, r.start : r.start + r.length] = block.prompt_len + np.arange(r.length)
        return position_BS

    @cached_property
    def block_BS(self) -> np.ndarray:
        """int32 number of the token's block within its row; -1 at padding."""
        block_BS = np.full(self.shape, -1, np.int32)
        for row, blocks in enumerate(self.blocks):
            for number, block in enumerate(blocks):
                block_BS[row, block.prompt_start : block.end] = number
        return block_BS

    @cached_property
    def response_BS(self) -> np.ndarray:
        """int32; 0 for prompt tokens, 1.. for the responses of a block, -1 at padding."""
        response_BS = np.where(self.block_BS < 0, -1, 0).astype(np.int32)
        for row, block in self.iter_blocks():
            for number, r in enumerate(block.responses, start=1):
                response_BS[row, r.start : r.start + r.length] = number
        return response_BS

    @cached_property
    def source_T(self) -> np.ndarray:
        """int64 flat index b*S+s of the token whose logits predict each response token."""
        shifted = [
            np.concatenate(([prompt_last], np.arange(start, start + length - 1)))
            for prompt_last, start, length in self._spans
        ]
        return np.concatenate(shifted).astype(np.int64) if shifted else np.zeros(0, np.int64)

    @cached_property
    def target_ids_T(self) -> np.ndarray:
        """int64 ids of the response tokens."""
        flat = self.input_ids_BS.reshape(-1)
        spans = [flat[start : start + length] for _, start, length in self._spans]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    @cached_property
    def sequence_T(self) -> np.ndarray:
        """int64 sequence number of each response token; never falls."""
        return np.repeat(np.arange(len(self.sequences)), self.lengths)

    @cached_property
    def token_T(self) -> np.ndarray:
        """int64 index of each response token within its completion."""
        return np.concatenate([np.arange(n) for n in self.lengths]) if self.sequences else np.zeros(0, np.int64)

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each sequence."""
        return [length for _, _, length in self._spans]

    @property
    def tokens(self) -> int:
        """Tokens of the pass without padding."""
        return int((self.block_BS >= 0).sum())

    def iter_blocks(self) -> Iterator[tuple[int, Block]]:
        """(row, block) of every block in packed order."""
        return ((row, block) for row, blocks in enumerate(self.blocks) for block in blocks)

    @cached_property
    def _spans(self) -> list[tuple[int, int, int]]:
        """Per sequence: flat index of the last prompt token, flat start, length."""
        S = self.shape[1]
        spans = {
            r.sequence: (row * S + block.prompt_start + block.prompt_len - 1, row * S + r.start, r.length)
            for row, block in self.iter_blocks()
            for r in block.responses
        }
        return [spans[n] for n in range(len(self.sequences))]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data; `from_dict` reads it back."""
        return {
            "kind": self.kind,
            "input_ids": self.input_ids_BS.tolist(),
            "blocks": [[[*block[:3], [list(r) for r in block.responses]] for block in row] for row in self.blocks],
            "sequences": [list(pair) for pair in self.sequences],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Layout:
        blocks = tuple(
            tuple(
                Block(group, start, length, tuple(Response(*r) for r in responses))
                for group, start, length, responses in row
            )
            for row in data["blocks"]
        )
        sequences = tuple((group, completion) for group, completion in data["sequences"])
        return cls(data["kind"], np.asarray(data["input_ids"], np.int64), blocks, sequences)


class _Piece(NamedTuple):
    """A group, or some of its completions."""

    group: int
    prompt_ids: Sequence[int]
    responses: list[tuple[int, Sequence[int]]]
    """(completion index, ids)"""

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + sum(len(ids) for _, ids in self.responses)


def pack(groups: Iterable[GroupLike], *, shared: bool, tokens_per_row: int | None = None) -> Layout:
    """Lay the groups out for one forward pass.

    Args:
        groups: what to pack; sequences are numbered in this order, completion by completion.
        shared: one prompt per group, or one row per completion.
        tokens_per_row: shared layouts only: start another row when a group would not fit; None packs a single row,
            which needs no padding.

    Raises:
        ValueError: naming the group that has no prompt, an empty response, or does not fit into a row.
    """
    return _pack(_pieces(groups), shared, tokens_per_row)


def repack(layout: Layout, *, shared: bool) -> Layout:
    """The completions of a layout in the other layout, in one row if shared.

    Parts of a group come together; completions keep their numbers.
    """
    pieces: dict[int, _Piece] = {}
    for row, block in layout.iter_blocks():
        ids_S = layout.input_ids_BS[row]
        prompt_ids = ids_S[block.prompt_start : block.prompt_start + block.prompt_len].tolist()
        piece = pieces.setdefault(block.group, _Piece(block.group, prompt_ids, []))
        piece.responses.extend((r.completion, ids_S[r.start : r.start + r.length].tolist()) for r in block.responses)
    return _pack([p._replace(responses=sorted(p.responses)) for p in pieces.values()], shared, None)


def split(groups: Iterable[GroupLike], budget: int, *, shared: bool) -> list[Layout]:
    """Layouts of at most `budget` tokens each (padding included), a function of the inputs alone.

    Shared layouts take whole groups in the order given; a group above the budget is cut between completions and its
    prompt is computed once per part (attention.prefix computes it once altogether). Separate layouts take completions
    sorted by length, so that rows of one pass need little padding. A prompt with a single completion is never cut: it
    makes a layout of its own even above the budget.
    """
    if budget < 1:
        raise ValueError(f"budget={budget} must be at least 1 token")
    pieces = _pieces(groups)
    parts: list[list[_Piece]] = []
    if shared:
        for piece in [part for whole in pieces for part in _cut(whole, budget)]:
            if parts and sum(p.tokens for p in parts[-1]) + piece.tokens <= budget:
                parts[-1].append(piece)
            else:
                parts.append([piece])
    else:
        for single in sorted(_singles(pieces), key=lambda p: -p.tokens):
            if parts and (len(parts[-1]) + 1) * parts[-1][0].tokens <= budget:
                parts[-1].append(single)
            else:
                parts.append([single])
    return [_pack(part, shared, None) for part in parts]


def _pieces(groups: Iterable[GroupLike]) -> list[_Piece]:
    pieces = []
    for g in groups:
        if isinstance(g, Group):
            g = (g.group, g.prompt_ids, [c.ids_R for c in g.completions])  # type: ignore[misc,assignment]
        group, prompt_ids, responses = g  # type: ignore[misc]
        if not len(prompt_ids):
            raise ValueError(f"group {group} has an empty prompt: nothing predicts its first response token")
        if not len(responses):
            raise ValueError(f"group {group} has no response")
        for completion, ids in enumerate(responses):
            if not len(ids):
                raise ValueError(f"group {group}, completion {completion} is empty: it has no token to train on")
        pieces.append(_Piece(group, prompt_ids, list(enumerate(responses))))
    return pieces


def _singles(pieces: Iterable[_Piece]) -> list[_Piece]:
    return [piece._replace(responses=[response]) for piece in pieces for response in piece.responses]


def _cut(piece: _Piece, budget: int) -> list[_Piece]:
    parts: list[_Piece] = []
    for single in _singles([piece]):
        if parts and parts[-1].tokens + len(single.responses[0][1]) <= budget:
            parts[-1].responses.extend(single.responses)
        else:
            parts.append(single)
    return parts


def _pack(pieces: list[_Piece], shared: bool, tokens_per_row: int | None) -> Layout:
    sequences = tuple((piece.group, completion) for piece in pieces for completion, _ in piece.responses)
    rows: list[list[_Piece]] = []
    for piece in pieces if shared else _singles(pieces):
        if tokens_per_row is not None and piece.tokens > tokens_per_row:
            raise ValueError(f"group {piece.group} has {piece.tokens} tokens, above tokens_per_row={tokens_per_row}")
        fits = tokens_per_row is None or (rows and sum(p.tokens for p in rows[-1]) + piece.tokens <= tokens_per_row)
        if shared and rows and fits:
            rows[-1].append(piece)
        else:
            rows.append([piece])

    S = max((sum(p.tokens for p in row) for row in rows), default=0)
    input_ids_BS = np.zeros((len(rows), S), np.int64)
    blocks: list[tuple[Block, ...]] = []
    sequence = 0
    for row, members in enumerate(rows):
        at, row_blocks = 0, []
        for piece in members:
            prompt_start, prompt_len, spans = at, len(piece.prompt_ids), []
            input_ids_BS[row, at : at + prompt_len] = piece.prompt_ids
            at += prompt_len
            for completion, ids in piece.responses:
                spans.append(Response(at, len(ids), completion, sequence))
                input_ids_BS[row, at : at + len(ids)] = ids
                at, sequence = at + len(ids), sequence + 1
            row_blocks.append(Block(piece.group, prompt_start, prompt_len, tuple(spans)))
        blocks.append(tuple(row_blocks))
    return Layout("shared" if shared else "separate", input_ids_BS, tuple(blocks), sequences)
