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
from prl_notebook.attention.layout import Block, Layout, pack, repack
from prl_notebook.engine.records import GroupRecord
from prl_notebook.engine.run_state import RunState
from prl_notebook.views.base import View, plural, render

NAMES = {"shared": "shared prompts", "separate": "separate rows"}
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
    """Mask of a layout beside the other one: tokens, position ids, pairs; with the model's `dims` operations too."""
    shared, separate = both_layouts(layout)
    body = render(
        "mask",
        pictures=[_picture(shared, layout), _picture(separate, layout)],
        kind=NAMES[layout.kind],
        facts=facts(layout, dims),
    )
    lines = [
        f"Attention mask, {NAMES[layout.kind]}: {plural(layout.tokens, 'token')} in {plural(layout.shape[0], 'row')}"
    ]
    rows = comparison(shared, separate, dims)
    lines += [f"  {name:<30} shared prompts {a:>14}   separate rows {b:>14}   {ratio}" for name, a, b, ratio in rows]
    for row, block in layout.iter_blocks():
        spans = ", ".join(f"r{r.completion} {r.start}-{r.start + r.length - 1}" for r in block.responses)
        prompt_end = block.prompt_start + block.prompt_len - 1
        lines.append(f"  row {row}, group {block.group}: prompt {block.prompt_start}-{prompt_end}, {spans}")
    return View(body, "\n".join(lines))


def layout_of(records: Sequence[GroupRecord], state: RunState) -> Layout:
    """The layout in which groups of one micro-step were trained; shared prompts where that is not known (any more)."""
    period, index = records[0].period, records[0].micro_step
    steps = [m for p in state.periods if p.period == period for m in p.micro_steps if m.index == index]
    shared = steps[0].shared_prompt if steps else True
    return pack([(r.group, r.prompt_ids, [c.ids for c in r.completions]) for r in records], shared=shared)


def both_layouts(layout: Layout) -> tuple[Layout, Layout]:
    """(shared prompts, separate rows) of the same completions; one of them is `layout` itself."""
    if layout.kind == "shared":
        return layout, repack(layout, shared=False)
    return repack(layout, shared=True), layout


def facts(layout: Layout, dims: ModelDims | None = None) -> Markup:
    """The table under the mask: what both layouts compute."""
    return render("mask_facts", rows=comparison(*both_layouts(layout), dims))


def comparison(shared: Layout, separate: Layout, dims: ModelDims | None) -> list[tuple[str, str, str, str]]:
    """(quantity, shared prompts, separate rows, what sharing saves) rows of the table under the mask."""
    both = (shared, separate)
    computed, kept = [x.shape[0] * x.shape[1] for x in both], [x.tokens for x in both]
    quantities = [
        ("tokens computed", computed[0], computed[1]),
        ("of them padding", computed[0] - kept[0], computed[1] - kept[1]),
        ("attention pairs", attention_pairs(shared), attention_pairs(separate)),
    ]
    if dims:
        quantities.append(("FLOPs, forward + backward", flops(shared, dims), flops(separate, dims)))
    return [(name, _count(a), _count(b), _saved(a, b)) for name, a, b in quantities]


def _saved(shared: int, separate: int) -> str:
    if shared == separate:
        return "the same"
    if not shared or not separate:
        return f"{_count(abs(separate - shared))} {'fewer' if separate > shared else 'more'}"
    return f"{separate / shared:.2f}x fewer" if separate > shared else f"{shared / separate:.2f}x more"


def _count(value: int) -> str:
    return f"{value:,}" if value < 10**9 else f"{value:.3g}"


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


def _picture(layout: Layout, trained: Layout) -> dict[str, Any]:
    """Rows are drawn along one diagonal, each as wide as the layout, so that padding shows as empty space."""
    rows, width = layout.shape
    shapes: list[Shape] = []
    seen: set[int] = set()
    for row, block in layout.iter_blocks():
        shapes += _shapes(block, row * width, rows * width, again=block.group in seen)
        seen.add(block.group)
    return {
        "title": NAMES[layout.kind].capitalize(),
        "trained": layout is trained,
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
