"""The data that travels between producer, rollout workers, reward process, queue and trainer.

Token ids and small arrays only; no torch. Array names carry their shape: R = tokens of one completion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. Log-probs are reported for exactly this distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_completion_length: int = 256


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset, ready to be sampled from."""

    index: int
    """Row number in the dataset."""
    ids: tuple[int, ...]
    """Token ids, chat template and generation prompt included."""
    prompt: str | list[dict[str, str]]
    """The `prompt` column as the user has it: a string or a list of messages."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Every other column of the row; handed to the reward functions."""


@dataclass(frozen=True)
class GroupRequest:
    """Ask one rollout worker for the K completions of one prompt under one policy version."""

    period: int
    group: int
    """Position of the prompt within its period, 0..B-1."""
    version: int
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One 63-bit seed per completion (K of them), derived from (run seed, period, group, sample) alone."""
    sampling: Sampling

    @property
    def key(self) -> tuple[int, int]:
        return (self.period, self.group)


@dataclass
class Completion:
    """One sampled answer. `ids_R` are the sampled ids (EOS included when one was sampled), never retokenised text."""

    ids_R: np.ndarray
    """int32 [R]"""
    logprobs_R: np.ndarray
    """float32 [R], log-prob of each sampled token under the sampling distribution (after temperature, top-p, top-k)."""
    finish_reason: FinishReason


@dataclass
class Group:
    """The K completions of one prompt, all sampled by one policy version; the reward process fills in rewards."""

    period: int
    group: int
    version: int
    prompt_ids: tuple[int, ...]
    completions: list[Completion]
    worker: int = -1
    rewards_K: np.ndarray | None = None
    """float64 [K], weighted sum over reward functions; NaN where all abstained or the completion is invalid."""
    rewards_by_function: dict[str, np.ndarray] = field(default_factory=dict)
    """float64 [K] per reward function, NaN = abstained."""
    advantages_K: np.ndarray | None = None
    """float64 [K]; 0 where the reward is NaN."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.period, self.group)

    @property
    def lengths(self) -> list[int]:
        return [len(c.ids_R) for c in self.completions]

    def tokens(self, shared_prompt: bool) -> int:
        """Tokens a forward pass has to compute for this group."""
        prompts = 1 if shared_prompt else len(self.completions)
        return prompts * len(self.prompt_ids) + sum(self.lengths)


@dataclass(frozen=True)
class WeightsRef:
    """A published policy version: a safetensors file (usually in shared memory) and what must arrive.

    Or the announcement (.json) of a version that the trainer broadcasts to the workers (weights/broadcast.py).
    """

    version: int
    path: str
    checksum: str
    """xxh3-64 over all tensors, in name order (weights.checksum); of broadcast versions the first has one, else ''."""
    nbytes: int

    @property
    def broadcast(self) -> bool:
        """Whether `Trainer.send` is to be called while the workers load it."""
        return self.path.endswith(".json")
