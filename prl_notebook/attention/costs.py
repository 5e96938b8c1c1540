"""What a layout costs: attention pairs and floating point operations, and whether sharing prompts pays.

Counts of what the mathematics needs: causal halves are halves, whatever a kernel spends on them. That most of what the
last layer makes of prompts is never read is not counted. Dense models only: a mixture of experts computes fewer of its
parameters per token than counted here. Norms, activations and the optimizer are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from prl_notebook.attention.layout import GroupLike, Layout, pack

WORTH_IT = 1.1
"""Sharing must save this much: its attention runs in more and smaller pieces than plain causal attention."""


@dataclass(frozen=True)
class ModelDims:
    """The sizes that decide a transformer's cost per token and per attention pair."""

    layer_parameters: int
    """Weights of the matrices that every token is multiplied with, all layers together."""
    attention_width: int
    """Layers x query heads x head dimension."""
    head_parameters: int
    """Hidden size x vocabulary."""

    @classmethod
    def from_model(cls, model: Any) -> ModelDims:
        """Sizes of a transformers causal language model."""
        config = model.config.get_text_config()
        heads, hidden = config.num_attention_heads, config.hidden_size
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        looked_up = {id(m.weight) for m in model.modules() if type(m).__name__ == "Embedding"}
        skipped = looked_up | {id(model.get_output_embeddings().weight)}
        multiplied = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in skipped)
        return cls(multiplied, config.num_hidden_layers * heads * head_dim, hidden * config.vocab_size)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelDims:
        """Sizes of a model in a Hugging Face folder, read from its configuration and the headers of its weights."""
        config = json.loads((folder / "config.json").read_text())
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // heads
        multiplied = 0
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="numpy") as weights:
                shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
            multiplied += sum(
                math.prod(shape)
                for name, shape in shapes.items()
                if len(shape) == 2 and "embed" not in name and "lm_head" not in name
            )
        return cls(multiplied, config["num_hidden_layers"] * heads * head_dim, hidden * config["vocab_size"])


def attention_pairs(layout: Layout) -> int:
    """(query, key) pairs that the mask allows, padding left out."""
    pairs = 0
    for _, block in layout.iter_blocks():
        pairs += block.prompt_len * (block.prompt_len + 1) // 2
        pairs += sum(r.length * block.prompt_len + r.length * (r.length + 1) // 2 for r in block.responses)
    return pairs


def flops(layout: Layout, dims: ModelDims) -> int:
    """Operations of one forward and backward pass (backward = 2 x forward); logits at response positions only.

    Padding counts where it is computed: in everything but attention.
    """
    tokens = layout.shape[0] * layout.shape[1]
    per_token = 2 * dims.layer_parameters * tokens
    per_pair = 4 * dims.attention_width * attention_pairs(layout)
    per_target = 2 * dims.head_parameters * sum(layout.lengths)
    return 3 * (per_token + per_pair + per_target)


def flop_ratio(groups: Iterable[GroupLike], dims: ModelDims) -> float:
    """Cost of separate rows over cost of shared prompts."""
    groups = list(groups)
    return flops(pack(groups, shared=False), dims) / flops(pack(groups, shared=True), dims)


def pays(groups: Iterable[GroupLike], dims: ModelDims) -> bool:
    """Whether shared prompts are worth it for these groups; the trainer's shared_prompt="auto"."""
    return flop_ratio(groups, dims) >= WORTH_IT
