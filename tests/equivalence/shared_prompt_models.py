"""Tiny real models, random ragged groups, and the yardstick for the shared-prompt tests: unpadded single rows.

transformers' RMSNorm computes in float32 whatever the model's dtype; rounding then depends on how gradients were
summed before it (1e-7). `float64_model` gives it the same formula in float64, so that the tests can ask for 1e-10.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from prl_notebook.attention.hf import disable_dropout

VOCAB = 37
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=8),
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "gemma": lambda: GemmaConfig(**_SIZES, head_dim=8),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
}

RaggedGroups = list[tuple[int, list[int], list[list[int]]]]


def float64_model(name: str) -> PreTrainedModel:
    """A model whose attention matters (weights far larger than a usual initialisation), in training mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).double().train()
    disable_dropout(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1 and name != "gemma"), std=0.3)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _float64_norm(module)
    return model


def _float64_norm(module: torch.nn.Module):
    gemma = type(module).__name__.startswith("Gemma")
    epsilon = module.eps if gemma else module.variance_epsilon

    def forward(h: Tensor) -> Tensor:
        weight = 1 + module.weight if gemma else module.weight
        return h * (h.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight

    return forward


def ragged_groups(most_completions: int = 5, most_groups: int = 3) -> st.SearchStrategy[RaggedGroups]:
    """Groups with 1..`most_completions` completions of unequal and of equal lengths."""
    ids = st.integers(0, VOCAB - 1)
    responses = st.one_of(
        st.lists(st.lists(ids, min_size=1, max_size=9), min_size=1, max_size=most_completions),
        st.integers(1, 6).flatmap(
            lambda n: st.lists(st.lists(ids, min_size=n, max_size=n), min_size=1, max_size=most_completions)
        ),
    )
    group = st.tuples(st.lists(ids, min_size=1, max_size=12), responses)
    return st.lists(group, min_size=1, max_size=most_groups).map(
        lambda groups: [(number, prompt, answers) for number, (prompt, answers) in enumerate(groups)]
    )


def fixed_groups(completions: int = 4) -> RaggedGroups:
    """Two groups, ragged, with a one-token prompt among them."""
    generator = torch.Generator().manual_seed(completions)

    def draw(n: int) -> list[int]:
        return torch.randint(0, VOCAB, (n,), generator=generator).tolist()

    lengths = [1 + (5 * k) % 7 for k in range(completions)]
    return [(0, draw(7), [draw(n) for n in lengths]), (1, draw(1), [draw(4) for _ in range(completions)])]


def weights(groups: RaggedGroups) -> Tensor:
    """float64 [T]: an arbitrary loss weight for every response token."""
    T = sum(len(r) for _, _, responses in groups for r in responses)
    return torch.randn(T, dtype=torch.float64, generator=torch.Generator().manual_seed(T))


def single_rows(model: PreTrainedModel, groups: RaggedGroups) -> tuple[Tensor, list[Tensor]]:
    """logprob_T and the gradient of (weights * logprob).sum(), each completion in an unpadded row of its own."""
    model.set_attn_implementation("sdpa")
    model.zero_grad()
    rows = []
    for _, prompt, responses in groups:
        for response in responses:
            logits_SV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            rows.append(logits_SV.log_softmax(-1)[torch.arange(len(response)), response])
    logprob_T = torch.cat(rows)
    (logprob_T * weights(groups)).sum().backward()
    return logprob_T.detach(), gradients(model)


def gradients(model: PreTrainedModel) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))
