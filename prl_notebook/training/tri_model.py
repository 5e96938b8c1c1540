"""The tri-model: policy, old policy and reference of one architecture, evaluated on one packed batch in one call.

The old policy is a copy that is refreshed when a period begins. In the first optimizer step of a period it equals the
policy, so its log-probs are the policy's own, detached, and its forward pass is left out unless
`old_policy="always"`. Without a KL term (beta 0) no reference is loaded. Dropout is off in all three: with it the
first importance ratio would not be 1.

Shapes: T response tokens of one forward pass.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from prl_notebook.attention import hf
from prl_notebook.attention.layout import Layout
from prl_notebook.config import Config

log = logging.getLogger(__name__)


@dataclass
class TriLogprobs:
    """Log-probs of the response tokens after temperature, each [T]; only `policy_T` carries a gradient."""

    policy_T: torch.Tensor
    old_T: torch.Tensor
    reference_T: torch.Tensor | None
    entropy_T: torch.Tensor
    """entropy of the policy's whole next-token distribution, in nats"""


class TriModel:
    """Loads up to three models from Hugging Face folders.

    Args:
        model_path: folder of the policy.
        reference_path: folder of the reference, read only if `beta` is not 0.

    Raises:
        ValueError: if `shared_prompt=True` and the model cannot share prompts. With "auto" it gets separate rows and a
            notice is logged.
    """

    def __init__(
        self, model_path: str | Path, config: Config, reference_path: str | Path, device: torch.device
    ) -> None:
        dtype = getattr(torch, config.trainer.dtype)
        self.temperature = config.grpo.temperature
        self.policy = load_model(model_path, dtype, device)
        self.reference = load_model(reference_path, dtype, device).requires_grad_(False) if config.grpo.beta else None
        keeps_old = config.trainer.old_policy == "always" or config.grpo.num_iterations > 1
        self.old = copy.deepcopy(self.policy).requires_grad_(False) if keeps_old else None
        self.shares_prompts = _can_share(self.policy, config.trainer.shared_prompt)
        """whether shared layouts may be given to `logprobs`"""
        if self.shares_prompts:
            # At once, not at the first shared layout: separate rows would change kernels, and bits, in mid-run.
            for model in (self.policy, self.old, self.reference):
                if model is not None:
                    model.set_attn_implementation(hf.NAME)
        if config.trainer.gradient_checkpointing:
            _checkpoint_activations(self.policy)

    def refresh_old(self) -> None:
        """Copy the policy into the old policy, if there is one."""
        if self.old is not None:
            self.old.load_state_dict(self.policy.state_dict())

    def logprobs(self, layout: Layout, old_is_policy: bool) -> TriLogprobs:
        """One call for all three models.

        Args:
            old_is_policy: take the policy's own log-probs, detached, for the old policy's.
        """
        policy_T, entropy_T = hf.logprobs(self.policy, layout, self.temperature)
        if old_is_policy or self.old is None:
            old_T = policy_T.detach()
        else:
            old_T = self._frozen(self.old, layout)
        reference_T = None if self.reference is None else self._frozen(self.reference, layout)
        return TriLogprobs(policy_T, old_T, reference_T, entropy_T)

    @torch.no_grad()
    def _frozen(self, model: PreTrainedModel, layout: Layout) -> torch.Tensor:
        return hf.logprobs(model, layout, self.temperature)[0]


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A causal language model in evaluation mode (no dropout) from a Hugging Face folder; never runs code from it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
    return model.to(device).eval()


def _can_share(model: PreTrainedModel, shared_prompt: Literal["auto"] | bool) -> bool:
    if shared_prompt is False:
        return False
    reason = hf.check_supported(model.config)
    if reason and shared_prompt is True:
        raise ValueError(f"Trainer.shared_prompt=True is not possible: {reason}; use 'auto' or False")
    if reason:
        log.warning("shared prompts are off, every completion gets a row of its own: %s", reason)
    return reason is None


def _checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass; the layers alone enter training mode, not their dropouts."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
