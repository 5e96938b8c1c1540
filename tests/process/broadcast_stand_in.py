"""Roles for background processes that broadcast weights without an accelerator.

Two things of vLLM's are replaced, the only ones that need CUDA: NCCL's communicator by one over gloo, and the streams
that order its kernels by none. vLLM's weight-transfer engines of both ends, its workers and models are the real ones.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from vllm_cases import change

from prl_notebook.config import Config
from prl_notebook.engine.types import WeightsRef
from prl_notebook.rollout.vllm_worker import VllmWorker
from prl_notebook.training.torch_trainer import TorchTrainer
from prl_notebook.weights import named_weights, transfer_of


class GlooCommunicator:
    """In place of vLLM's PyNcclCommunicator, as far as weight transfer uses it."""

    def __init__(self, group: Any, device: int) -> None:
        store, wait = dist.PrefixStore("gloo", group.store), timedelta(seconds=60)
        self._group = dist.ProcessGroupGloo(store, group.rank, group.world_size, wait)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        pass


class NoStream:
    def synchronize(self) -> None:
        pass


def stand_in() -> None:
    """Replace what needs CUDA, in this process."""
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    pynccl.PyNcclCommunicator = GlooCommunicator
    packed_tensor._get_streams = lambda device, count: (NoStream(),) * count
    torch.accelerator.current_device_index = lambda: 0


class Sender:
    """A model that changes with every version, and the real sending end."""

    def __init__(self, model_path: str, config: Config) -> None:
        stand_in()
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.transfer = transfer_of(config, torch.device("cpu"))

    def publish(self, version: int, directory: Path) -> WeightsRef:
        change(self.model, 1e-2)
        return self.transfer.publish(named_weights(self.model), version, directory)

    def send(self) -> None:
        self.transfer.send()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in named_weights(self.model).items()}


class GlooVllmWorker(VllmWorker):
    def __init__(self, **kwargs: Any) -> None:
        stand_in()
        super().__init__(**kwargs)

    def differing(self, published: dict[str, torch.Tensor]) -> list[str]:
        """Names of tensors with which vLLM does not compute bit for bit; a tied lm_head is read as well."""
        from prl_notebook.rollout.vllm_weights import standing_weights

        (model,) = self._engine.collective_rpc("get_model")
        read = list(standing_weights(model, published, None))
        assert {name for name, _, _ in read} == set(published)
        return [
            name
            for name, standing, features_J in read
            if not torch.equal(standing, published[name] if features_J is None else published[name][:, features_J])
        ]


class GlooTorchTrainer(TorchTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stand_in()
        super().__init__(*args, **kwargs)
