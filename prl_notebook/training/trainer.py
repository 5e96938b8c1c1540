"""The seam every training engine implements; it runs inside one or more background processes.

A trainer sees a period as: begin_period, accumulate (once per micro-step, groups in any order and any split),
finish_update. It never needs the whole batch at once: gradients are sums, and the loss's normaliser is applied
to the summed gradient before clipping.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from prl_notebook.engine.types import Group, WeightsRef


@dataclass
class TokenDetail:
    """Per-token numbers of one completion; every array is float32 [R]."""

    group: int
    completion: int
    policy_R: np.ndarray
    """log-prob under the policy being trained"""
    old_R: np.ndarray
    reference_R: np.ndarray | None
    """None when beta is 0: no reference model is loaded."""
    ratio_R: np.ndarray
    """importance ratio policy / old (at token level, or the sequence's when importance_sampling_level="sequence")"""
    kl_R: np.ndarray | None
    entropy_R: np.ndarray
    advantage: float
    loss_R: np.ndarray
    """share of the period's loss: sums to the loss over all tokens of the period once divided by the normaliser"""
    mask_R: np.ndarray
    """bool; False where a token does not count (mask_truncated_completions)"""


@dataclass
class MicroStepReport:
    """What one accumulate() did."""

    groups: list[int]
    tokens: int
    """tokens computed by the forward pass (padding excluded)"""
    completion_tokens: int
    seconds: float
    loss_sum: float
    """un-normalised loss sum"""
    shared_prompt: bool
    """whether prompts were computed once per group"""
    stats: dict[str, float] = field(default_factory=dict)
    """small numbers for a live display: ratio_max, kl_mean, entropy_mean, mismatch_max"""
    detail: list[TokenDetail] = field(default_factory=list)


@dataclass
class UpdateReport:
    """What one optimizer step did. Metrics carry TRL's names."""

    version: int
    """policy version after the step"""
    metrics: dict[str, float]


class Trainer(Protocol):
    """Holds the tri-model (policy, old policy, reference) and the optimizer."""

    def begin_period(self, period: int, version: int, groups: int) -> None:
        """Start accumulating `groups` groups for one optimizer step; refresh the old policy if it is needed.

        Raises:
            ValueError: if `version` is not the policy's version.
        """
        ...

    def accumulate(self, groups: list[Group], detail: bool = False) -> MicroStepReport:
        """One micro-step: forward and backward of these groups, adding to the gradient.

        Groups carry advantages. Raises ValueError for a group of another policy version, or one that already entered
        this optimizer step.
        """
        ...

    def finish_update(self, last: bool = True) -> UpdateReport:
        """Normalise the summed gradient, clip, step the optimizer and the learning-rate schedule.

        The policy version grows by one when `last` (the period's last of num_iterations updates).
        Raises RuntimeError when groups are missing.
        """
        ...

    def publish(self, directory: str) -> WeightsRef:
        """Write the policy under Hugging Face names for the rollout workers, or announce that `send` will."""
        ...

    def send(self) -> None:
        """Broadcast what was announced last, while every rollout worker loads it; the policy must not change before."""
        ...

    def save(self, directory: Path) -> None:
        """Checkpoint: policy as a Hugging Face folder, optimizer, schedule, RNG, version. No pickles."""
        ...

    def load(self, directory: Path) -> int:
        """Restore a checkpoint; returns its policy version."""
        ...

    def gradient(self, micro_steps: list[list[Group]], yardstick: bool = False) -> dict[str, Any]:
        """Gradient of one period under a given sequence of micro-steps; changes nothing.

        `micro_steps` lists the groups of each micro-step. With `yardstick=True` the gradient is kept as what later
        calls are compared with, and the answer is {"norm"}; otherwise {"norm", "relative_error", "max_abs_difference",
        "bitwise"} against it (relative_error in L2 over all parameters).
        """
        ...

    def close(self) -> None: ...
