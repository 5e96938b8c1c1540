"""Tiny models and periods for the tests of the trainer on megatron-core, and what the torch trainer makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from prl_notebook.config import GRPO, Config, Trainer
from prl_notebook.engine.types import Completion, Group
from prl_notebook.training.torch_trainer import TorchTrainer
from prl_notebook.training.trainer import MicroStepReport, UpdateReport
from prl_notebook.weights import named_weights

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PERIODS = 3


def save_model(folder: Path, kind: str, tied: bool, seed: int = 0) -> Path:
    """A random model whose norms, biases and matrices all matter."""
    torch.manual_seed(seed)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied, rope_parameters=LLAMA3_ROPE))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.1 if p.ndim == 1 else 0.05))
    model.save_pretrained(folder)
    return folder


def make_config(engine: str = "megatron", grpo: dict[str, Any] | None = None, **trainer: Any) -> Config:
    """K = 4, a learning rate that moves weights, a KL term, clipping that bites; at most 60 tokens a pass."""
    algorithm = {
        "prompts_per_period": 4,
        "num_generations": 4,
        "beta": 0.05,
        "learning_rate": 1e-3,
        # Well above the rounding of gradients: with TRL's 1e-8 an entry that is 0 but for rounding moves by +-lr.
        "adam_epsilon": 1e-4,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "total_periods": 10,
        "temperature": 0.9,
    }
    options = {"tokens_per_microstep": 60, "threads": 1, **trainer}
    return Config(grpo=GRPO(**(algorithm | (grpo or {}))), trainer=Trainer(engine=engine, **options))


def make_period(number: int, version: int | None = None, seed: int = 0) -> list[Group]:
    """Four ragged groups: other prompt lengths, other numbers of completions, one token to twelve."""
    rng = np.random.default_rng(seed * 100 + number)
    shapes = [(7, [5, 9, 1, 3]), (3, [12, 4]), (12, [2, 2, 6, 1]), (5, [4, 8, 3])]
    groups = []
    for index, (prompt, lengths) in enumerate(shapes):
        completions = [
            Completion(
                rng.integers(0, VOCABULARY, length).astype(np.int32),
                rng.uniform(-6, -3, length).astype(np.float32),
                "length" if length == 12 else "stop",
            )
            for length in lengths
        ]
        ids = tuple(rng.integers(0, VOCABULARY, prompt).tolist())
        group = Group(number, index, number if version is None else version, ids, completions)
        group.advantages_K = rng.normal(size=len(lengths))
        groups.append(group)
    return groups


@dataclass
class Reference:
    """What the torch trainer did in `PERIODS` periods, one micro-step each."""

    gradient: dict[str, torch.Tensor]
    """of the first period"""
    reports: list[MicroStepReport]
    updates: list[UpdateReport]
    weights: dict[str, torch.Tensor]


def torch_reference(model: Path, config: Config, **kwargs: Any) -> Reference:
    trainer = TorchTrainer(model, config, **kwargs)
    gradient = trainer._gradient([make_period(0)])
    reports, updates = [], []
    for number in range(PERIODS):
        trainer.begin_period(number, number, 4)
        for update in range(config.grpo.num_iterations):
            reports.append(trainer.accumulate(make_period(number), detail=True))
            updates.append(trainer.finish_update(last=update == config.grpo.num_iterations - 1))
    weights = {name: w.clone() for name, w in named_weights(trainer.models.policy).items()}
    return Reference({name: g.clone() for name, g in gradient.items()}, reports, updates, weights)
