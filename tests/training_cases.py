"""Tiny real models and groups for tests of the trainers.

Shapes: K completions of a prompt, R tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from prl_notebook.config import GRPO, Config, Trainer
from prl_notebook.engine.types import Completion, Group
from prl_notebook.training.advantages import group_advantages

VOCABULARY = 32
EOS, PAD = 1, 2


def save_tiny_qwen3(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **options) -> Path:
    """Two random layers with weights large enough that every token matters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.2,
        **options,
    )
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def make_groups(
    grpo: GRPO, period: int = 0, version: int = 0, seed: int = 0, max_length: int = 8, truncated: float = 0.3
) -> list[Group]:
    """B groups of K completions with random lengths, sampler log-probs and rewards; some end truncated."""
    rng = np.random.default_rng([seed, period])
    groups = []
    for number in range(grpo.prompts_per_period):
        completions = []
        for _ in range(grpo.num_generations):
            cut = rng.random() < truncated
            length = max_length if cut else int(rng.integers(1, max_length))
            ids_R = rng.integers(3, VOCABULARY, length).astype(np.int32)
            if not cut:
                ids_R[-1] = EOS
            logprobs_R = rng.uniform(-4, -1, length).astype(np.float32)
            completions.append(Completion(ids_R, logprobs_R, "length" if cut else "stop"))
        prompt_ids = tuple(int(i) for i in rng.integers(3, VOCABULARY, rng.integers(2, 7)))
        rewards_K = rng.integers(0, 4, grpo.num_generations) / 2.0
        groups.append(with_rewards(Group(period, number, version, prompt_ids, completions), rewards_K, grpo))
    return groups


def with_rewards(group: Group, rewards_K: Sequence[float] | np.ndarray, grpo: GRPO) -> Group:
    group.rewards_K = np.asarray(rewards_K, dtype=np.float64)
    group.advantages_K = group_advantages(group.rewards_K, grpo)
    return group


def make_config(trainer: dict | None = None, **grpo) -> Config:
    """A small period (3 prompts, 4 completions of at most 8 tokens) at a constant learning rate."""
    defaults = {
        "prompts_per_period": 3,
        "num_generations": 4,
        "max_completion_length": 8,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
    }
    return Config(grpo=GRPO(**defaults | grpo), trainer=Trainer(**(trainer or {})))
