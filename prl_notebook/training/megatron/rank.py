"""One rank of the trainer on megatron-core; all ranks together are a `Trainer`.

Every rank gets every call in the same order; rank 0's answers are complete, the others answer None. Groups are dealt
out to data-parallel ranks by their number of tokens. Within a period nothing is exchanged between data-parallel ranks
but reports, so they may have unequal work or none; gradients meet once, in finish_update, and the loss's denominator
is applied to their sum before clipping.

What is refused is refused on every rank before anything is exchanged. Any other error on one rank ends the group:
whoever started the ranks kills them all. Left out on purpose: one prompt pass for a group larger than a micro-step
(attention/prefix.py); here each part computes the prompt again.

Shapes: T response tokens of one forward pass, S completions of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, AutoModelForCausalLM

from prl_notebook.attention.costs import ModelDims, pays
from prl_notebook.attention.layout import split
from prl_notebook.config import Config
from prl_notebook.engine.types import Group, WeightsRef
from prl_notebook.runtime.device import parse_devices
from prl_notebook.training.checkpoint import load_checkpoint, save_checkpoint
from prl_notebook.training.gradients import compare, norm
from prl_notebook.training.losses import token_losses, warn_about_kl
from prl_notebook.training.megatron import parallel
from prl_notebook.training.megatron.model import LayoutGPT, transformer_config
from prl_notebook.training.megatron.optimizer import ShardedOptimizer
from prl_notebook.training.megatron.parameters import FolderTensors, ParameterMap
from prl_notebook.training.megatron.patches import megatron_on, use_mindspeed
from prl_notebook.training.megatron.tri_model import Pass, StageTriModel
from prl_notebook.training.metrics import UpdateMetrics
from prl_notebook.training.normalisers import denominator, sequence_weights
from prl_notebook.training.period import Period, open_period
from prl_notebook.training.tokens import loss_inputs, token_details
from prl_notebook.training.trainer import MicroStepReport, TokenDetail, UpdateReport
from prl_notebook.weights import checksum, load_weights, transfer_of


def _on_device(method: Any) -> Any:
    """Run a method with megatron-core on the rank's device."""

    @wraps(method)
    def wrapped(self: MegatronTrainerRank, *args: Any, **kwargs: Any) -> Any:
        with megatron_on(self.device):
            return method(self, *args, **kwargs)

    return wrapped


class MegatronTrainerRank:
    """Rank `rank` of Trainer.tensor_parallel * pipeline_parallel * data_parallel; see `training.trainer.Trainer`.

    Args:
        model_path: Hugging Face folder of the policy (policy version 0).
        config: `grpo`, `trainer` and `rollout.dtype` (in which versions are published) are used.
        reference_path: Hugging Face folder of the reference for beta > 0; None: `model_path`.
        device: 'cpu', 'cuda' or 'npu', with an index if the process sees several.
        rendezvous: a file path that all ranks share and no earlier trainer used.
        timeout: seconds a rank waits for the others in one collective.

    Raises:
        ValueError: naming what megatron-core cannot do with the model, or what the parallel sizes do not divide.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: Config,
        reference_path: str | Path | None = None,
        device: str = "cpu",
        *,
        rank: int,
        rendezvous: str | Path,
        timeout: float = parallel.TIMEOUT,
    ) -> None:
        self.config, self.grpo = config, config.grpo
        self.version = 0
        self.num_tokens = 0
        """prompt and completion tokens trained on so far, each prompt counted once per completion (as TRL counts)"""
        self._model_path, self._reference_path = Path(model_path), Path(reference_path or model_path)
        self._hf = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        dtype = getattr(torch, config.trainer.dtype)
        shape = transformer_config(self._hf, config.trainer, dtype)
        place = parse_devices(device)[0]
        self.device = place.open()
        if self.device.type == "npu":
            use_mindspeed()
        self._cpu_group = parallel.start(rank, config.trainer, rendezvous, place, timeout)
        self._transfer = transfer_of(config, self.device)
        self._period: Period | None = None
        self._loads: list[int] = []
        self._yardstick: dict[str, torch.Tensor] | None = None
        """whole on rank 0, empty elsewhere"""
        with megatron_on(self.device):
            tensor_parallel.model_parallel_cuda_manual_seed(self.grpo.seed)
            self._build(shape)
        if rank == 0:
            warn_about_kl(self.grpo)

    def begin_period(self, period: int, version: int, groups: int) -> None:
        self._open(open_period(self._period, period, version, self.version, groups, self.grpo))
        self._yardstick = None
        self.optimizer.clear()

    @_on_device
    def accumulate(self, groups: list[Group], detail: bool = False) -> MicroStepReport | None:
        started = time.perf_counter()
        period = self._current()
        period.check(groups)
        by_number = {group.group: group for group in groups}
        shared = self._shares(groups)
        mine = self._deal(groups, shared)
        layouts = split(mine, self.config.trainer.tokens_per_microstep, shared=shared)
        passes = [Pass.of(layout, self.models.config, self.device) for layout in layouts]
        totals, details = self._forward_backward(passes, by_number, detail)
        period.metrics.merge(totals)
        period.trained.update(by_number)
        if period.updates == 0:
            self.num_tokens += sum(group.tokens(shared_prompt=False) for group in groups)
        totals, details = self._of_all_replicas(totals, details)
        if dist.get_rank():
            return None
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

    @_on_device
    def finish_update(self, last: bool = True) -> UpdateReport:
        period = self._current()
        totals, _ = self._of_all_replicas(period.finish_update())
        divisor = denominator(self.grpo, period.groups, totals.tokens)
        metrics = totals.result(divisor) | self.optimizer.step(divisor) | {"num_tokens": float(self.num_tokens)}
        if last:
            self.version += 1
            self._period = None
        else:
            self.models.runs_old = True
        return UpdateReport(self.version, metrics)

    def publish(self, directory: str) -> WeightsRef | None:
        weights = self._weights(self.parameters)
        if dist.get_rank():
            return None
        return self._transfer.publish(weights, self.version, directory)

    def send(self) -> None:
        if dist.get_rank() == 0:  # which holds what all ranks have gathered
            self._transfer.send()

    def save(self, directory: Path) -> None:
        """Checkpoint between two periods, in the format of the torch engine.

        Raises:
            RuntimeError: within a period, whose gradient is not saved.
        """
        if self._period is not None:
            raise RuntimeError(f"period {self._period.number} is unfinished: checkpoints are made between periods")
        weights, tensors, reference = (
            self._weights(self.parameters),
            self.optimizer.state_dict(),
            self._reference_state(),
        )
        if dist.get_rank() == 0:
            policy = AutoModelForCausalLM.from_config(self._hf, dtype=self.models.config.params_dtype)
            load_weights(policy, weights)
            state = {
                "version": self.version,
                "updates": self.optimizer.updates,
                "num_tokens": self.num_tokens,
                "reference": reference,
            }
            tensors["rng/cpu"] = torch.get_rng_state()
            save_checkpoint(directory, policy, self._model_path, tensors, state)
        dist.barrier(self._cpu_group)

    @_on_device
    def load(self, directory: Path) -> int:
        """Restore a checkpoint of this engine, whatever its parallel sizes, or of the torch engine; drops an unfinished
        period.

        Raises:
            FileNotFoundError: if `directory` holds no checkpoint.
            ValueError: if the reference is not the one the checkpoint was trained with.
        """
        policy_path, tensors, state = load_checkpoint(directory)
        self._check_reference(state["reference"])
        self.parameters.load(FolderTensors(policy_path))
        self.optimizer.load_state_dict(tensors, state["updates"])
        self.version, self.num_tokens = state["version"], state["num_tokens"]
        self._period = None
        return self.version

    @_on_device
    def gradient(self, micro_steps: list[list[Group]], yardstick: bool = False) -> dict[str, Any] | None:
        """Normalised, unclipped gradient of a period's first update; see the protocol.

        Raises:
            RuntimeError: between the updates of a period, where the old policy is no longer the policy; or if there is
                no yardstick to compare with.
        """
        if self._period is not None and self._period.updates:
            raise RuntimeError("gradient() cannot run between the optimizer steps of a period (num_iterations > 1)")
        if self._yardstick is None and not yardstick:
            raise RuntimeError("gradient() has nothing to compare with: call it with yardstick=True first")
        gradient = self._gradient(micro_steps)
        reference = None if yardstick else self._yardstick
        if yardstick:
            self._yardstick = gradient
        if dist.get_rank():
            return None
        return {"norm": norm(gradient)} if reference is None else compare(gradient, reference)

    def close(self) -> None:
        """Leave the group and free the models; the trainer cannot be used afterwards."""
        self._period = self._yardstick = None
        del self.models, self.optimizer, self.parameters
        parallel.stop()

    def _build(self, shape: TransformerConfig) -> None:
        def make() -> LayoutGPT:
            return LayoutGPT(shape, self._hf).to(self.device)

        stage = make()
        self.parameters = ParameterMap(stage, self._hf, self._cpu_group)
        self.parameters.load(FolderTensors(self._model_path))
        # Gradients are reduced once per optimizer step, so nothing overlaps with the backward pass.
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        policy = DistributedDataParallel(shape, ddp, stage)
        keeps_old = self.config.trainer.old_policy == "always" or self.grpo.num_iterations > 1
        self.models = StageTriModel(shape, policy, make, keeps_old, keeps_reference=self.grpo.beta > 0)
        if self.models.reference is not None:
            self._reference_parameters = ParameterMap(self.models.reference, self._hf, self._cpu_group)
            self._reference_parameters.load(FolderTensors(self._reference_path))
        self.optimizer = ShardedOptimizer(policy, self.parameters, self.grpo)

    def _open(self, period: Period) -> None:
        self._period, self._loads = period, [0] * self.config.trainer.data_parallel
        self.models.refresh_old()
        self.models.runs_old = self.config.trainer.old_policy == "always"

    def _deal(self, groups: Sequence[Group], shared: bool) -> list[Group]:
        """This replica's share: each group goes to the replica with the fewest tokens so far in the period."""
        mine = []
        for group in groups:
            replica = min(range(len(self._loads)), key=self._loads.__getitem__)
            self._loads[replica] += group.tokens(shared)
            if replica == parallel_state.get_data_parallel_rank():
                mine.append(group)
        return mine

    def _forward_backward(
        self, passes: list[Pass], groups: dict[int, Group], detail: bool
    ) -> tuple[UpdateMetrics, list[TokenDetail]]:
        """All passes of this replica through the pipeline; adds to the gradient. The answer is of the last stage's."""
        totals = self._current().new_totals()
        details: list[TokenDetail] = []
        if not passes:
            return totals, details
        longest = max(one.input_ids_BS.shape[1] for one in passes)

        def forward(iterator: Iterator[Pass], model: StageTriModel) -> tuple[torch.Tensor, Any]:
            one = next(iterator)
            return model(one), partial(self._loss, one, groups, totals, details if detail else None)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(passes),
            model=self.models,
            num_microbatches=len(passes),
            seq_length=longest,
            micro_batch_size=1,  # shapes travel with the tensors (variable_seq_lengths)
        )
        return totals, details

    def _loss(
        self,
        one: Pass,
        groups: dict[int, Group],
        totals: UpdateMetrics,
        details: list[TokenDetail] | None,
        hidden_SBH: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """On the last stage: un-normalised loss of one pass, in the form that megatron-core's schedule takes."""
        logprobs = self.models.logprobs(one, hidden_SBH, self.grpo.temperature)
        x = loss_inputs(one.layout, groups, logprobs, self.grpo)
        result = token_losses(x, self.grpo)
        share_T = result.loss_T * sequence_weights(self.grpo, x.tokens_S)[x.sequence_T] * x.mask_T
        totals.add(x, result, logprobs.entropy_T, share_T.detach().double().sum().item())
        if details is not None:
            details += token_details(one.layout, x, result, logprobs.entropy_T, share_T)
        # The schedule counts tokens to divide by; ours are counted over the whole period instead.
        return share_T.sum(), torch.zeros((), dtype=torch.int, device=self.device), None

    def _of_all_replicas(
        self, totals: UpdateMetrics, details: Sequence[TokenDetail] = ()
    ) -> tuple[UpdateMetrics, list[TokenDetail]]:
        """Totals and details over all replicas, in their order, on every rank (a collective call)."""
        speaks = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (totals, details) if speaks else None, self._cpu_group)
        merged = self._current().new_totals()
        all_details: list[TokenDetail] = []
        for answer in filter(None, answers):
            merged.merge(answer[0])
            all_details += answer[1]
        return merged, all_details

    def _gradient(self, micro_steps: Sequence[list[Group]]) -> dict[str, torch.Tensor]:
        groups = [group for step in micro_steps for group in step]
        kept = self._period, self._loads, self.num_tokens, self.optimizer.swap_gradients()
        try:
            self._open(Period(groups[0].period, self.version, len(groups), self.grpo))
            for step in micro_steps:
                self.accumulate(step)
            totals, _ = self._of_all_replicas(self._current().finish_update())
            self.optimizer.reduce(denominator(self.grpo, len(groups), totals.tokens))
            return self.optimizer.gradients()
        finally:
            self._period, self._loads, self.num_tokens, _ = *kept[:3], self.optimizer.swap_gradients(kept[3])

    def _shares(self, groups: list[Group]) -> bool:
        wanted = self.config.trainer.shared_prompt
        return pays(groups, self._dims) if wanted == "auto" else wanted

    @cached_property
    def _dims(self) -> ModelDims:
        with torch.device("meta"):
            return ModelDims.from_model(AutoModelForCausalLM.from_config(self._hf))

    def _weights(self, parameters: ParameterMap) -> dict[str, torch.Tensor]:
        return parameters.gather(lambda local: parameters.parameters[local].detach())

    @cached_property
    def _reference_checksum(self) -> str | None:
        """The same on every rank (a collective call the first time)."""
        weights = self._weights(self._reference_parameters)
        answer = [checksum(weights) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(answer, 0, self._cpu_group)
        return answer[0]

    def _reference_state(self) -> dict[str, str | None] | None:
        if self.models.reference is None:
            return None
        return {"path": str(self._reference_path), "checksum": self._reference_checksum}

    def _check_reference(self, saved: dict[str, str] | None) -> None:
        own = self._reference_state()
        if own and saved and own["checksum"] != saved["checksum"]:
            raise ValueError(
                f"the checkpoint was trained with the reference {saved['path']} ({saved['checksum']}), this trainer "
                f"holds {own['path']} ({own['checksum']}); pass that folder as reference_path"
            )

    def _current(self) -> Period:
        if self._period is None:
            raise RuntimeError("no period is open: call begin_period first")
        return self._period
