"""Policy, old policy and reference of one pipeline stage, evaluated on one packed batch in one pass of the pipeline.

Their hidden states travel between stages side by side as one tensor, so log-probs of all three cost one trip through
the pipeline, not three. Only the policy is wrapped for data parallelism and has a gradient; the others are bare
stages, filled by copies on the device. When which model is there and runs: see training/tri_model.py.

Shapes: B rows, S tokens per row, H hidden size, M models that run, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from prl_notebook.attention.kernels import Plan, choose
from prl_notebook.attention.layout import Layout
from prl_notebook.training.megatron.model import LayoutGPT, PackedLayout
from prl_notebook.training.tri_model import TriLogprobs


@dataclass
class Pass:
    """One micro-batch on a device."""

    layout: Layout
    packed: PackedLayout
    input_ids_BS: torch.Tensor
    position_ids_BS: torch.Tensor
    source_T: torch.Tensor
    target_T: torch.Tensor

    @classmethod
    def of(cls, layout: Layout, config: TransformerConfig, device: torch.device) -> Pass:
        """Rows get padding where sequence parallelism has to split them evenly."""
        if config.sequence_parallel:
            missing = -layout.shape[1] % config.tensor_model_parallel_size
            layout = replace(layout, input_ids_BS=np.pad(layout.input_ids_BS, ((0, 0), (0, missing))))
        kernel = choose(device, layout, config.params_dtype)
        return cls(
            layout,
            PackedLayout.of(Plan.of(layout, device, kernel, last_layer=config.num_layers - 1)),
            *(torch.from_numpy(x).to(device) for x in (layout.input_ids_BS, layout.position_ids_BS)),
            *(torch.from_numpy(x).to(device) for x in (layout.source_T, layout.target_ids_T)),
        )


class StageTriModel(MegatronModule):
    """What megatron-core's schedule takes for a stage's model.

    Args:
        make: builds a bare stage; called once for every further model that is needed.
    """

    def __init__(
        self,
        config: TransformerConfig,
        policy: DistributedDataParallel,
        make: Callable[[], LayoutGPT],
        keeps_old: bool,
        keeps_reference: bool,
    ) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.policy = policy
        self.old = make().requires_grad_(False).eval() if keeps_old else None
        self.reference = make().requires_grad_(False).eval() if keeps_reference else None
        self._received_SBH: torch.Tensor | None = None
        """hidden states of the stage before, M*B rows"""
        self.runs_old = False
        """whether the next passes evaluate the old policy too"""

    @property
    def stage(self) -> LayoutGPT:
        """The policy without its wrapper."""
        return self.policy.module

    @torch.no_grad()
    def refresh_old(self) -> None:
        """Copy the policy into the old policy, if there is one."""
        if self.old is not None:
            torch._foreach_copy_(list(self.old.parameters()), list(self.stage.parameters()))

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Called by the schedule before each forward."""
        self._received_SBH = tensors[0]

    def forward(self, batch: Pass) -> torch.Tensor:
        """Hidden states [S, M*B, H] after this stage."""
        models = self._running()
        received = [None] * len(models) if self._received_SBH is None else self._received_SBH.chunk(len(models), 1)
        outputs = []
        for model, hidden_SBH in zip(models, received, strict=True):
            with nullcontext() if model is self.policy else torch.no_grad():
                bare = self.stage if model is self.policy else model
                bare.set_input_tensor(hidden_SBH)
                outputs.append(model(batch.input_ids_BS, batch.position_ids_BS, None, packed_seq_params=batch.packed))
        return torch.cat(outputs, 1)

    def logprobs(self, batch: Pass, hidden_SBH: torch.Tensor, temperature: float) -> TriLogprobs:
        """Log-probs of every model from what `forward` gave on the last stage."""
        policy_SBH, *others = hidden_SBH.chunk(len(self._running()), 1)
        policy_T, entropy_T = self.stage.scores(policy_SBH, batch.source_T, batch.target_T, temperature)
        old_T, reference_T = policy_T.detach(), None
        with torch.no_grad():
            if self.runs_old and self.old is not None:
                old_T, _ = self.old.scores(others[0], batch.source_T, batch.target_T, temperature)
            if self.reference is not None:
                reference_T, _ = self.reference.scores(others[-1], batch.source_T, batch.target_T, temperature)
        return TriLogprobs(policy_T, old_T, reference_T, entropy_T)

    def _running(self) -> list[MegatronModule]:
        others = (self.old if self.runs_old else None, self.reference)
        return [self.policy, *(model for model in others if model is not None)]
