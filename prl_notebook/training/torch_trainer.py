"""The embedded trainer: the tri-model on plain torch, one process, CPU or one accelerator.

A period's gradient is the sum over its groups in whatever order and split they come; the loss's denominator is applied
to the sum before clipping. Equal sequences of micro-steps give bit-for-bit equal gradients. Left out on purpose:
parallel training (the megatron engine) and auxiliary losses of mixture-of-experts models, which depend on how a batch
is composed.

Shapes: T response tokens of one forward pass, S completions of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from prl_notebook.attention.costs import ModelDims, pays
from prl_notebook.attention.layout import Layout, split
from prl_notebook.config import Config
from prl_notebook.engine.types import Group, WeightsRef
from prl_notebook.runtime.device import parse_devices
from prl_notebook.training.checkpoint import load_checkpoint, save_checkpoint
from prl_notebook.training.gradients import compare, norm
from prl_notebook.training.losses import token_losses, warn_about_kl
from prl_notebook.training.normalisers import denominator, sequence_weights
from prl_notebook.training.optimizer import Optimizer
from prl_notebook.training.period import Period, open_period
from prl_notebook.training.tokens import loss_inputs, token_details
from prl_notebook.training.trainer import MicroStepReport, TokenDetail, Trainer, UpdateReport
from prl_notebook.training.tri_model import TriLogprobs, TriModel, TriPrefix, load_model
from prl_notebook.weights import checksum, load_weights, named_weights, transfer_of


class TorchTrainer(Trainer):
    """Implements `training.trainer.Trainer` with a transformers model.

    Args:
        model_path: Hugging Face folder of the policy (policy version 0).
        config: `grpo`, `trainer` and `rollout.dtype` (in which versions are published) are used.
        reference_path: Hugging Face folder of the reference for beta > 0; None: `model_path`.

    Raises:
        ValueError: naming the field, if the model cannot share prompts although `shared_prompt=True`, or the
            learning-rate schedule has no end.
    """

    def __init__(
        self, model_path: str | Path, config: Config, reference_path: str | Path | None = None, device: str = "cpu"
    ) -> None:
        self.config = config
        self.grpo = config.grpo
        self.version = 0
        self.num_tokens = 0
        """prompt and completion tokens trained on so far, each prompt counted once per completion (as TRL counts)"""
        self.device = parse_devices(device)[0].open()
        self._model_path = Path(model_path)
        self._reference_path = Path(reference_path or model_path)
        self.models = TriModel(model_path, config, reference_path or model_path, self.device)
        self.optimizer = Optimizer(self.models.policy, self.grpo)
        self._transfer = transfer_of(config, self.device)
        self._dims = ModelDims.from_model(self.models.policy) if self.models.shares_prompts else None
        self._period: Period | None = None
        self._yardstick: dict[str, torch.Tensor] | None = None
        warn_about_kl(self.grpo)

    def begin_period(self, period: int, version: int, groups: int) -> None:
        self._period = open_period(self._period, period, version, self.version, groups, self.grpo)
        self._yardstick = None
        self.optimizer.swap_gradients()
        self.models.refresh_old()

    def accumulate(self, groups: list[Group], detail: bool = False) -> MicroStepReport:
        started = time.perf_counter()
        period = self._current()
        period.check(groups)
        by_number = {group.group: group for group in groups}
        shared = self._shares(groups)
        totals = period.new_totals()
        details: list[TokenDetail] = []
        with self.models.precision():
            for layout, logprobs in self._passes(groups, shared):
                x = loss_inputs(layout, by_number, logprobs, self.grpo)
                result = token_losses(x, self.grpo)
                share_T = result.loss_T * sequence_weights(self.grpo, x.tokens_S)[x.sequence_T] * x.mask_T
                share_T.sum().backward()
                self.optimizer.collect()
                totals.add(x, result, logprobs.entropy_T, share_T.detach().double().sum().item())
                if detail:
                    details += token_details(layout, x, result, logprobs.entropy_T, share_T)
        period.metrics.merge(totals)
        period.trained.update(by_number)
        if period.updates == 0:
            self.num_tokens += sum(group.tokens(shared_prompt=False) for group in groups)
        return MicroStepReport(
            groups=list(by_number),
            tokens=sum(group.tokens(shared) for group in groups),
            completion_tokens=sum(sum(group.lengths) for group in groups),
            seconds=time.perf_counter() - started,
            loss_sum=totals.loss_sum,
            shared_prompt=shared,
            stats=totals.display(),
            detail=sorted(details, key=lambda d: (d.group, d.completion)),
        )

    def finish_update(self, last: bool = True) -> UpdateReport:
        period = self._current()
        totals = period.finish_update()
        divisor = denominator(self.grpo, period.groups, totals.tokens)
        metrics = totals.result(divisor) | self.optimizer.step(divisor) | {"num_tokens": float(self.num_tokens)}
        if last:
            self.version += 1
            self._period = None
        return UpdateReport(self.version, metrics)

    def publish(self, directory: str) -> WeightsRef:
        return self._transfer.publish(named_weights(self.models.policy), self.version, directory)

    def send(self) -> None:
        self._transfer.send()

    def save(self, directory: Path) -> None:
        """Checkpoint between two periods.

        Raises:
            RuntimeError: within a period, whose gradient is not saved.
        """
        if self._period is not None:
            raise RuntimeError(f"period {self._period.number} is unfinished: checkpoints are made between periods")
        tensors = self.optimizer.state_dict() | {"rng/cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            tensors["rng/device"] = torch.get_device_module(self.device).get_rng_state(self.device)
        state = {
            "version": self.version,
            "updates": self.optimizer.updates,
            "num_tokens": self.num_tokens,
            "reference": self._reference_state(),
        }
        save_checkpoint(directory, self.models.policy, self._model_path, tensors, state)

    def load(self, directory: Path) -> int:
        """Restore a checkpoint and drop an unfinished period.

        Raises:
            FileNotFoundError: if `directory` holds no checkpoint.
            ValueError: if the reference is not the one the checkpoint was trained with.
        """
        policy_path, tensors, state = load_checkpoint(directory)
        reference = self._reference_state()
        if reference and state["reference"] and reference["checksum"] != state["reference"]["checksum"]:
            raise ValueError(
                f"the checkpoint was trained with the reference {state['reference']['path']} "
                f"({state['reference']['checksum']}), this trainer holds {reference['path']} "
                f"({reference['checksum']}); pass that folder as reference_path"
            )
        policy = self.models.policy
        load_weights(policy, named_weights(load_model(policy_path, policy.dtype, self.device)))
        self.optimizer.load_state_dict(tensors, state["updates"])
        torch.set_rng_state(tensors["rng/cpu"])
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(tensors["rng/device"], self.device)
        self.version, self.num_tokens = state["version"], state["num_tokens"]
        self._period = None
        return self.version

    def gradient(self, micro_steps: list[list[Group]], yardstick: bool = False) -> dict[str, Any]:
        """Normalised, unclipped gradient of a period's first update; see the protocol.

        Raises:
            RuntimeError: between the updates of a period, where the old policy is no longer the policy; or if there is
                no yardstick to compare with.
        """
        if self._period is not None and self._period.updates:
            raise RuntimeError("gradient() cannot run between the optimizer steps of a period (num_iterations > 1)")
        if yardstick:
            self._yardstick = self._gradient(micro_steps)
            return {"norm": norm(self._yardstick)}
        if self._yardstick is None:
            raise RuntimeError("gradient() has nothing to compare with: call it with yardstick=True first")
        return compare(self._gradient(micro_steps), self._yardstick)

    def close(self) -> None:
        """Free the models; the trainer cannot be used afterwards."""
        self._period = self._yardstick = None
        del self.models, self.optimizer

    def _gradient(self, micro_steps: Sequence[list[Group]]) -> dict[str, torch.Tensor]:
        groups = [group for step in micro_steps for group in step]
        kept = self._period, self.num_tokens, self.optimizer.swap_gradients()
        self._period = Period(groups[0].period, self.version, len(groups), self.grpo)
        try:
            self.models.refresh_old()
            for step in micro_steps:
                self.accumulate(step)
            totals = self._period.finish_update()
        finally:
            self._period, self.num_tokens, sums = *kept[:2], self.optimizer.swap_gradients(kept[2])
        divisor = denominator(self.grpo, len(groups), totals.tokens)
        return {name: total / divisor for name, total in sums.items() if total is not None}

    def _passes(self, groups: list[Group], shared: bool) -> Iterator[tuple[Layout, TriLogprobs]]:
        """Forward passes within the token budget; the caller runs each one's backward pass before it asks for the next.

        A group above the budget goes through in parts; if its prompt is shared, it is computed once for all of them.
        """
        budget = self.config.trainer.tokens_per_microstep
        old_is_policy = self._current().updates == 0 and self.config.trainer.old_policy == "auto"
        oversized = [group for group in groups if shared and group.tokens(shared) > budget]
        whole = [group for group in groups if not shared or group.tokens(shared) <= budget]
        for layout in split(whole, budget, shared=shared):
            yield layout, self.models.logprobs(layout, old_is_policy)
        for group in oversized:
            prefix = TriPrefix(self.models, group.prompt_ids, old_is_policy)
            for layout in split([group], budget, shared=True):
                yield layout, prefix.logprobs(layout)
            prefix.backward()
            self.optimizer.collect()

    def _shares(self, groups: list[Group]) -> bool:
        """Whether the prompts of this micro-step are computed once per group."""
        if self._dims is None:
            return False
        return self.config.trainer.shared_prompt is True or pays(groups, self._dims)

    def _reference_state(self) -> dict[str, str] | None:
        if self.models.reference is None:
            return None
        return {"path": str(self._reference_path), "checksum": checksum(named_weights(self.models.reference))}

    def _current(self) -> Period:
        if self._period is None:
            raise RuntimeError("no period is open: call begin_period first")
        return self._period
