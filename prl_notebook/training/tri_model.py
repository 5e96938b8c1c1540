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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from prl_notebook.attention import hf
from prl_notebook.attention.layout import Layout
from prl_notebook.attention.prefix import Prefix
from prl_notebook.config import Config

log = logging.getLogger(__name__)

LogprobsOf = Callable[[PreTrainedModel], tuple[torch.Tensor, torch.Tensor]]


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
                    hf.use_layouts(model)
        if config.trainer.gradient_checkpointing:
            _checkpoint_activations(self.policy)

    def refresh_old(self) -> None:
        """Copy the policy into the old policy, if there is one."""
        if self.old is not None:
            self.old.load_state_dict(self.policy.state_dict())

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Forward and backward passes belong in here: a float64 model then computes in float64 throughout."""
        with _KeepFloat64() if self.policy.dtype == torch.float64 else nullcontext():
            yield

    def logprobs(self, layout: Layout, old_is_policy: bool) -> TriLogprobs:
        """One call for all three models.

        Args:
            old_is_policy: take the policy's own log-probs, detached, for the old policy's.
        """
        return self.score(lambda model: hf.logprobs(model, layout, self.temperature), old_is_policy)

    def score(self, logprobs_of: LogprobsOf, old_is_policy: bool) -> TriLogprobs:
        """Log-probs of all three from a function that gives (logprob_T, entropy_T) of one of them."""
        policy_T, entropy_T = logprobs_of(self.policy)
        with torch.no_grad():
            old_T = policy_T.detach() if old_is_policy or self.old is None else logprobs_of(self.old)[0]
            reference_T = None if self.reference is None else logprobs_of(self.reference)[0]
        return TriLogprobs(policy_T, old_T, reference_T, entropy_T)


class TriPrefix:
    """A prompt that has gone through all three models once, for a group too large for one pass."""

    def __init__(self, models: TriModel, prompt_ids: Sequence[int], old_is_policy: bool) -> None:
        self._models, self._old_is_policy = models, old_is_policy
        ids = np.asarray(prompt_ids)
        self._prefixes = {models.policy: Prefix(models.policy, ids)}
        with torch.no_grad():
            for model in (None if old_is_policy else models.old, models.reference):
                if model is not None:
                    self._prefixes[model] = Prefix(model, ids)

    def logprobs(self, layout: Layout) -> TriLogprobs:
        """Of some of the prompt's responses; see `TriModel.logprobs`."""
        temperature = self._models.temperature
        return self._models.score(lambda m: self._prefixes[m].logprobs(layout, temperature), self._old_is_policy)

    def backward(self) -> None:
        """The prompt's backward pass, once, after that of the last responses."""
        self._prefixes[self._models.policy].backward()


class _KeepFloat64(TorchFunctionMode):
    """Norms of transformers compute in float32 whatever the model's dtype; here they stay in float64.

    Otherwise the 1e-16 by which two orders of summation differ comes out of a norm as 1e-8 now and then.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        lowers = func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:])
        if lowers and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A causal language model in evaluation mode (no dropout) from a Hugging Face folder; never runs code from it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)
    model.to(device)  # type: ignore[arg-type]  # transformers' annotation hides nn.Module.to
    return model.eval()


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
