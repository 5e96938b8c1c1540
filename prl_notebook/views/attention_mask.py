"""The attention mask of a packed micro-step: shared prompts, and beside it the same completions as separate rows.

A static picture draws the mask's tiles as SVG shapes, so its size depends on the number of completions and not of
tokens. `mask_data` is what the canvas widget needs to draw the same with zoom and a read-out under the mouse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from prl_notebook.attention.costs import ModelDims, attention_pairs, flops
from prl_notebook.attention.layout import Block, GroupLike, Layout, pack
from prl_notebook.engine.records import GroupRecord
from prl_notebook.views.base import View, plural, render

MAX_SHAPES = 1200
"""Shapes one picture draws at most; the widget draws all."""


@dataclass(frozen=True)
class Shape:
    css: str
    path: str
    tip: str
    label: str
    x: int
    y: int


def mask(layout: Layout, dims: ModelDims | None = None) -> View:
    """Mask of a layout beside separate rows: tokens, position ids, pairs; with the model's `dims` operations too."""
    separate = separate_rows(layout)
    pictures = [_picture(layout)] + ([_picture(separate)] if separate is not layout else [])
    rows = comparison(layout, separate, dims)
    body = render("mask", pictures=pictures, facts=facts(layout, dims))
    lines = [
        f"Attention mask, {layout.kind} layout: {plural(layout.tokens, 'token')} in {plural(layout.shape[0], 'row')}"
    ]
    lines += [f"  {name:<28} shared {a:>14}   separate rows {b:>14}   {ratio}" for name, a, b, ratio in rows]
    for row, block in layout.iter_blocks():
        spans = ", ".join(f"r{r.completion} {r.start}-{r.start + r.length - 1}" for r in block.responses)
        prompt_end = block.prompt_start + block.prompt_len - 1
        lines.append(f"  row {row}, group {block.group}: prompt {block.prompt_start}-{prompt_end}, {spans}")
    return View(body, "\n".join(lines))


def separate_rows(layout: Layout) -> Layout:
    """The completions of a layout as one row each."""
    return layout if layout.kind == "separate" else pack(groups_of(layout), shared=False)


def facts(layout: Layout, dims: ModelDims | None = None) -> Markup:
    """The table under the mask: what this layout computes, and what separate rows would."""
    return render("mask_facts", rows=comparison(layout, separate_rows(layout), dims))


def comparison(layout: Layout, separate: Layout, dims: ModelDims | None) -> list[tuple[str, str, str, str]]:
    """(quantity, this layout, separate rows, how many times fewer) rows of the table under the mask."""
    quantities = [
        ("tokens computed", layout.shape[0] * layout.shape[1], separate.shape[0] * separate.shape[1]),
        (
            "of them padding",
            layout.shape[0] * layout.shape[1] - layout.tokens,
            separate.shape[0] * separate.shape[1] - separate.tokens,
        ),
        ("attention pairs", attention_pairs(layout), attention_pairs(separate)),
    ]
    if dims:
        quantities.append(("operations, forward + backward", flops(layout, dims), flops(separate, dims)))
    return [
        (
            name,
            _count(a),
            _count(b),
            f"{b / a:.2f}x fewer" if a and b > a else "" if b >= a else f"{a / b:.2f}x more" if b else "",
        )
        for name, a, b in quantities
    ]


def _count(value: int) -> str:
    return f"{value:,}" if value < 10**9 else f"{value:.3g}"


def groups_of(layout: Layout) -> list[GroupLike]:
    """The groups a layout was packed from; a group that was cut into parts comes back as parts."""
    return [
        (
            block.group,
            layout.input_ids_BS[row, block.prompt_start : block.prompt_start + block.prompt_len].tolist(),
            [layout.input_ids_BS[row, r.start : r.start + r.length].tolist() for r in block.responses],
        )
        for row, block in layout.iter_blocks()
    ]


def mask_data(layout: Layout, records: Sequence[GroupRecord] = ()) -> dict[str, Any]:
    """What the canvas draws: rows, blocks, and the text of each token (its id where no record has it)."""
    texts = [[str(i) for i in row] for row in layout.input_ids_BS.tolist()]
    by_group = {r.group: r for r in records}
    for row, block in layout.iter_blocks():
        if record := by_group.get(block.group):
            texts[row][block.prompt_start : block.prompt_start + block.prompt_len] = record.prompt_tokens
            for r in block.responses:
                texts[row][r.start : r.start + r.length] = record.completions[r.completion].tokens
    blocks = [
        {
            "row": row,
            "group": block.group,
            "start": block.prompt_start,
            "prompt": block.prompt_len,
            "responses": [{"start": r.start, "length": r.length, "completion": r.completion} for r in block.responses],
        }
        for row, block in layout.iter_blocks()
    ]
    return {"kind": layout.kind, "rows": layout.shape[0], "width": layout.shape[1], "blocks": blocks, "texts": texts}


def _picture(layout: Layout) -> dict[str, Any]:
    """Rows are drawn along one diagonal, each as wide as the layout, so that padding shows as empty space."""
    rows, width = layout.shape
    shapes: list[Shape] = []
    seen: set[int] = set()
    for row, block in layout.iter_blocks():
        shapes += _shapes(block, row * width, rows * width, again=block.group in seen)
        seen.add(block.group)
    return {
        "title": "Shared prompts" if layout.kind == "shared" else "Separate rows",
        "size": rows * width,
        "rows": rows,
        "shapes": shapes[:MAX_SHAPES],
        "left_out": max(0, len(shapes) - MAX_SHAPES),
        "positions": _positions(layout),
        "highest": max(
            (b.prompt_len + max((r.length for r in b.responses), default=0) for _, b in layout.iter_blocks()), default=1
        ),
    }


def _shapes(block: Block, offset: int, size: int, again: bool) -> list[Shape]:
    start, length, g = offset + block.prompt_start, block.prompt_len, block.group
    name = "prompt again" if again else "prompt"
    found = [
        _triangle(
            "mask-again" if again else "mask-prompt",
            start,
            length,
            f"group {g}, {name}: causal among its {length} tokens",
            "prompt",
            size,
        )
    ]
    for r in block.responses:
        at, n, css = offset + r.start, r.length, r.completion % 2
        if n:
            tip = f"group {g}, completion {r.completion}: its {n} tokens see the prompt"
            found.append(Shape(f"mask-p{css}", f"M{start} {at}h{length}v{n}h-{length}z", tip, "", 0, 0))
            tip = f"group {g}, completion {r.completion}: causal among its {n} tokens, blind to the other completions"
            found.append(_triangle(f"mask-r{css}", at, n, tip, f"r{r.completion}", size))
    return found


def _triangle(css: str, start: int, length: int, tip: str, label: str, size: int) -> Shape:
    """A causal tile: keys to the right, queries downwards."""
    shown = label if length > 0.022 * len(label) * size + 0.02 * size else ""
    return Shape(
        css, f"M{start} {start}v{length}h{length}z", tip, shown, start + length // 3, start + (2 * length) // 3
    )


def _positions(layout: Layout) -> str:
    """SVG path of the position ids over the tokens: it falls back to the prompt's length at every response."""
    width = layout.shape[1]
    parts = []
    for row, block in layout.iter_blocks():
        at = row * width + block.prompt_start
        parts.append(f"M{at} 0L{at + block.prompt_len} {block.prompt_len}")
        for r in block.responses:
            start = row * width + r.start
            parts.append(f"M{start} {block.prompt_len}L{start + r.length} {block.prompt_len + r.length}")
    return "".join(parts)
