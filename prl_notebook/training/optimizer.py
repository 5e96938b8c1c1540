"""AdamW on the summed gradient of a period: normalise, clip, step, learning-rate schedule.

Gradients are summed and the moments kept in float32 at least. Parameters of a narrower type (bfloat16) get a float32
master copy that is stepped and rounded back, since a small update would vanish in 8 bits of mantissa. Left out on
purpose: sharded optimizer states (the megatron engine has its own).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, get_scheduler

from prl_notebook.config import GRPO


class Optimizer:
    """AdamW with the learning-rate schedules of transformers, counted in optimizer steps.

    Weight decay leaves out vectors (biases and norms), as TRL's trainer does.

    Raises:
        ValueError: for a decaying schedule without `total_periods`.
    """

    def __init__(self, model: PreTrainedModel, grpo: GRPO) -> None:
        self.grpo = grpo
        self.updates = 0
        """Optimizer steps taken: the position of the learning-rate schedule."""
        self._parameters = dict(model.named_parameters())
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        matrices = [p for p in self._masters.values() if p.ndim >= 2]
        vectors = [p for p in self._masters.values() if p.ndim < 2]
        decayed: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            decayed,
            lr=grpo.learning_rate,
            betas=(grpo.adam_beta1, grpo.adam_beta2),
            eps=grpo.adam_epsilon,
            weight_decay=grpo.weight_decay,
        )
        self._factor = learning_rate_factor(grpo)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.grpo.learning_rate * self._factor(self.updates)

    def collect(self) -> None:
        """Add what backward() left in narrow parameters to the float32 sums; call after every backward()."""
        for name, p in self._parameters.items():
            master = self._masters[name]
            if master is not p and p.grad is not None:
                master.grad = p.grad.to(master.dtype) if master.grad is None else master.grad.add_(p.grad)
                p.grad = None

    def swap_gradients(self, gradients: dict[str, torch.Tensor | None] | None = None) -> dict[str, torch.Tensor | None]:
        """Install other gradient sums (default: none yet) and return those that were there."""
        before = {name: p.grad for name, p in self._masters.items()}
        for name, p in self._masters.items():
            p.grad = None if gradients is None else gradients[name]
        return before

    def step(self, denominator: float) -> dict[str, float]:
        """Divide the gradient sums by the loss's denominator, clip, step; the sums are empty afterwards.

        Returns:
            grad_norm (before clipping) and learning_rate (of this step), under TRL's names.

        Raises:
            FloatingPointError: if the gradient is not finite; the parameters are unchanged.
        """
        masters = list(self._masters.values())
        gradients = [p.grad for p in masters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / denominator)
        norm = torch.nn.utils.clip_grad_norm_(masters, self.grpo.max_grad_norm or math.inf).item()
        if not math.isfinite(norm):
            self.swap_gradients()
            raise FloatingPointError(
                f"the gradient's norm is {norm} in optimizer step {self.updates}: a loss or log-prob overflowed; "
                "lower the learning rate or look at the tokens of this period. The policy is unchanged."
            )
        learning_rate = self.learning_rate
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        with torch.no_grad():
            for name, p in self._parameters.items():
                if self._masters[name] is not p:
                    p.copy_(self._masters[name])
        self.swap_gradients()
        self.updates += 1
        return {"grad_norm": norm, "learning_rate": learning_rate}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Moments, step counts and master copies as flat named tensors."""
        state = {}
        for name, master in self._masters.items():
            for key, value in self._adamw.state[master].items():
                state[f"{name}/{key}"] = value
            if master is not self._parameters[name]:
                state[f"{name}/master"] = master.detach()
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor], updates: int) -> None:
        """Restore `state_dict()` and the schedule's position; gradient sums are dropped."""
        self.swap_gradients()
        self.updates = updates
        for name, master in self._masters.items():
            moments = {
                key: state[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}/{key}" in state
            }
            self._adamw.state[master] = {
                # AdamW keeps its step count on the CPU.
                key: value if key == "step" else value.to(master.device)
                for key, value in moments.items()
            }
            if master is not self._parameters[name]:
                master.data.copy_(state[f"{name}/master"])


def learning_rate_factor(grpo: GRPO) -> Callable[[int], float]:
    """What the learning rate is multiplied with, a function of the optimizer steps taken and of nothing else.

    Raises:
        ValueError: for a decaying schedule without `total_periods`.
    """
    if grpo.lr_scheduler_type != "constant" and grpo.total_periods is None:
        raise ValueError(
            f"lr_scheduler_type={grpo.lr_scheduler_type!r} decays over the run and needs GRPO.total_periods; "
            "set it, or use lr_scheduler_type='constant'"
        )
    kind = "constant_with_warmup" if grpo.lr_scheduler_type == "constant" else grpo.lr_scheduler_type
    steps = None if grpo.total_periods is None else grpo.total_periods * grpo.num_iterations
    unused = torch.optim.SGD([torch.zeros(1)])
    return get_scheduler(kind, unused, grpo.warmup_steps, steps).lr_lambdas[0]


def _master(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().requires_grad_()
