"""megatron-core's distributed AdamW on the summed gradient of a period, and its state under Hugging Face names.

Every data-parallel rank steps its own slice of the parameters. For checkpoints and for comparing gradients the slices
are put together again under Hugging Face names, in the format of training/optimizer.py: a checkpoint can be resumed
with other parallel sizes, or by the torch engine. Left out on purpose: writing the slices as they are, which is faster
for models that no single host holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from prl_notebook.config import GRPO
from prl_notebook.training.megatron.parameters import Entry, ParameterMap
from prl_notebook.training.optimizer import learning_rate_factor

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedOptimizer:
    """The distributed optimizer of one rank's stage."""

    def __init__(self, model: DistributedDataParallel, parameters: ParameterMap, grpo: GRPO) -> None:
        self.grpo = grpo
        self.updates = 0
        """Optimizer steps taken: the position of the learning-rate schedule."""
        self._model, self._parameters = model, parameters
        dtype = model.config.params_dtype
        options = OptimizerConfig(
            optimizer="adam",
            lr=grpo.learning_rate,
            weight_decay=grpo.weight_decay,
            adam_beta1=grpo.adam_beta1,
            adam_beta2=grpo.adam_beta2,
            adam_eps=grpo.adam_epsilon,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        chain = get_megatron_optimizer(options, [model], use_gloo_process_groups=False)
        [self._optimizer] = chain.chained_optimizers
        for group in self._optimizer.param_groups:
            # Vectors have wd_mult 0, but megatron-core leaves applying it to a scheduler that is not used here.
            group["weight_decay"] = grpo.weight_decay * group["wd_mult"]
        self._factor = learning_rate_factor(grpo)
        self._has_masters = dtype != torch.float32

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.grpo.learning_rate * self._factor(self.updates)

    def clear(self) -> None:
        """Drop the gradient sums."""
        self._model.zero_grad_buffer()

    def swap_gradients(self, sums: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Install other gradient sums (default: none yet) and return those that were there."""
        before = [buffer.grad_data.clone() for buffer in self._model.buffers]
        self.clear()
        for buffer, data in zip(self._model.buffers, sums or [], strict=False):
            buffer.grad_data.copy_(data)
        return before

    def reduce(self, denominator: float) -> None:
        """Sum the gradient over all ranks and divide it by the loss's denominator (a collective call)."""
        finalize_model_grads([self._model])
        self._model.scale_gradients(1.0 / denominator)

    def step(self, denominator: float) -> dict[str, float]:
        """Reduce, clip, step; the gradient sums are empty afterwards (a collective call).

        Returns:
            grad_norm (before clipping) and learning_rate (of this step), under TRL's names.

        Raises:
            FloatingPointError: on every rank, if the gradient is not finite; the parameters are unchanged.
        """
        self.reduce(denominator)
        self._optimizer.prepare_grads()
        norm = self._optimizer.get_grad_norm()
        if not math.isfinite(norm):
            self.clear()
            raise FloatingPointError(
                f"the gradient's norm is {norm} in optimizer step {self.updates}: a loss or log-prob overflowed; "
                "lower the learning rate or look at the tokens of this period. The policy is unchanged."
            )
        clip_grad_by_total_norm_fp32(self._optimizer.get_parameters(), self.grpo.max_grad_norm or math.inf, norm)
        learning_rate = self.learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step_with_ready_grads()
        self.clear()
        self.updates += 1
        return {"grad_norm": norm, "learning_rate": learning_rate}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The reduced gradient by Hugging Face name on global rank 0, {} elsewhere (a collective call)."""
        return self._gather(lambda parameter, own: parameter.main_grad.flatten()[own])  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Moments, step counts and master copies on global rank 0, {} elsewhere (a collective call)."""
        state: dict[str, torch.Tensor] = {}
        if self.updates:
            for moment in MOMENTS:
                found = self._gather(lambda parameter, _: self._state(parameter)[moment])  # noqa: B023 (used at once)
                state |= {f"{name}/{moment}": tensor for name, tensor in found.items()}
                state |= {f"{name}/step": torch.tensor(float(self.updates)) for name in found}
        if self._has_masters:
            found = self._gather(lambda parameter, own: self._main(parameter))
            state |= {f"{name}/master": tensor for name, tensor in found.items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor], updates: int) -> None:
        """Restore `state_dict()` and the schedule's position after the weights are loaded; gradient sums are dropped.

        Args:
            state: whole tensors under Hugging Face names, the same on every rank.
        """
        self.clear()
        self.updates = updates
        self._optimizer.reload_model_params()
        self._optimizer.optimizer.state.clear()
        for entry in self._parameters.entries:
            parameter = self._parameters.parameters[entry.local]
            own = self._slice(parameter)
            if own is None:
                continue
            part = partial(self._part, state, entry, own)
            if updates:
                moments = {key: part(key).to(parameter.device) for key in MOMENTS}
                self._state(parameter).update(moments, step=torch.tensor(float(updates)))
            if self._has_masters:
                self._main(parameter).copy_(part("master"))

    def _part(self, state: Mapping[str, torch.Tensor], entry: Entry, own: slice, key: str) -> torch.Tensor:
        """This rank's slice of a parameter's moment or master copy."""
        return self._parameters.shard(entry, lambda name: state[f"{name}/{key}"]).flatten()[own]

    def _slice(self, parameter: torch.nn.Parameter) -> slice | None:
        """What this rank steps of a parameter; None: another replica steps all of it."""
        if parameter not in self._optimizer.model_param_gbuf_map:
            return None
        own = self._optimizer._get_model_param_range_map(parameter)["param"]
        return slice(own.start, own.end)

    def _main(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The float32 slice that AdamW steps."""
        group, position = self._optimizer.model_param_group_index_map[parameter]
        return self._optimizer.optimizer.param_groups[group]["params"][position]

    def _state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        return self._optimizer.optimizer.state[self._main(parameter)]

    def _gather(self, value: Callable[[torch.nn.Parameter, slice], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors by Hugging Face name from the slices that data-parallel ranks own."""
        group = parallel_state.get_data_parallel_group()

        def whole(local: str) -> torch.Tensor:
            parameter = self._parameters.parameters[local]
            total = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if (own := self._slice(parameter)) is not None:
                total[own] = value(parameter, own)
            dist.all_reduce(total, group=group)
            return total.view(parameter.shape)

        return self._parameters.gather(whole)
