"""Tiny real models for the rollout tests; their random weights are large, so that sampling depends on the context."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from prl_notebook.engine.types import Group, GroupRequest, Sampling
from prl_notebook.rollout.transformers_worker import TransformersWorker
from prl_notebook.rollout.worker import GroupDone, WorkerEvent
from prl_notebook.weights import named_weights, publish

VOCABULARY = 40
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "llama_tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    ),
    "gemma": GemmaConfig(**{**SHAPE, "initializer_range": 0.1}),
    "mistral_sliding": MistralConfig(**SHAPE, sliding_window=5),
    "gemma3_hybrid_window": Gemma3TextConfig(
        **{**SHAPE, "initializer_range": 0.1}, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
}  # fmt: skip


def build(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def save(model: PreTrainedModel, directory: Path) -> str:
    model.save_pretrained(directory)
    return str(directory)


def start(model: PreTrainedModel, directory: Path, version: int = 0, **options: object) -> TransformersWorker:
    """A worker that has loaded `model` as policy version `version`."""
    worker = TransformersWorker(save(model, directory), **options)
    worker.load(publish(named_weights(model), version, directory))
    return worker


def request(
    group: int,
    prompt: tuple[int, ...],
    completions: int = 4,
    version: int = 0,
    length: int = 24,
    **sampling: float,
) -> GroupRequest:
    seeds = tuple(1000 * group + sample for sample in range(completions))
    return GroupRequest(0, group, version, prompt, seeds, Sampling(max_completion_length=length, **sampling))


def run(worker: TransformersWorker) -> list[WorkerEvent]:
    events: list[WorkerEvent] = []
    while worker.has_work:
        events += worker.step()
    return events


def sample_groups(worker: TransformersWorker, *requests: GroupRequest) -> dict[int, Group]:
    for each in requests:
        worker.submit(each)
    return {event.group.group: event.group for event in run(worker) if isinstance(event, GroupDone)}
