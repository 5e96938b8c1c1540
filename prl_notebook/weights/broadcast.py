"""A policy version sent from device to device: the trainer's end of vLLM's NCCL and vllm-ascend's HCCL transfer.

Trainer (rank 0) and all workers of vLLM engines form one group. `publish` writes an announcement (JSON: where the group
meets, and names, dtypes and shapes), which travels to the workers as a `WeightsRef`; while they load it, `send`
broadcasts the tensors. The group is opened by the first version and kept. It meets on a free loopback port: the only
port this package ever listens on, and only because the user asked for this transfer (Weights.transfer).

The bytes are hashed for the first version alone, since that reads all weights back to the host on both sides; what
stands behind the later ones is the collective itself and the log-prob guard (rollout/guard.py).

UNTESTED: NCCL and HCCL. No such device was at hand. Tested with gloo in place of the communicator: everything else here
and in vLLM 0.32's engines (tests/process/test_vllm_broadcast.py). vllm-ascend's side was only read (0.23). Left out on
purpose: several hosts, and workers that join later.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from prl_notebook.config import Config
from prl_notebook.engine.types import WeightsRef
from prl_notebook.weights.store import checksum

LOOPBACK = "127.0.0.1"


@dataclass
class Source:
    """Weights to be sent, in the dtype of the rollout workers; vLLM's `WeightSource`, as far as a sender uses it."""

    device: torch.device
    dtype: torch.dtype
    named: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def metadata(self) -> list[Any]:
        """vLLM's ParamMeta of every tensor."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.dtype_of(t), tuple(t.shape)) for name, t in self.named.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.named.items():
            yield name, tensor.detach().to(self.device, self.dtype_of(tensor)).contiguous()


class Broadcast:
    """The sending end, on the trainer's rank 0.

    Args:
        config: `weights.transfer`, `rollout.dtype` and the number of workers are used.
        device: The trainer's current device, which takes part in the group.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._transfer = config.weights.transfer
        workers = config.rollout.workers * int(config.rollout.options.get("tensor_parallel_size", 1))
        self._meeting: dict[str, Any] = {"master_address": LOOPBACK, "world_size": 1 + workers}
        self._source = Source(device, getattr(torch, config.rollout.dtype))
        self._send: Callable[[], None] | None = None

    def publish(self, named: Mapping[str, torch.Tensor], version: int, directory: str | Path) -> WeightsRef:
        """Announce one policy version in `directory`/v{version:06d}.json.

        Args:
            named: Tensors under Hugging Face names without tied duplicates; unchanged until they are sent.
        """
        self._source.named = named
        first = self._send is None
        if first:
            self._meeting["master_port"] = free_port()
        joining, update = FORMATS[self._transfer]
        announced = {
            "init_info": self._meeting | joining,
            "update_info": {
                "names": list(named),
                "dtype_names": [str(self._source.dtype_of(t)).removeprefix("torch.") for t in named.values()],
                "shapes": [list(t.shape) for t in named.values()],
            }
            | update,
        }
        path = Path(directory) / f"v{version:06d}.json"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(announced))
        os.replace(partial, path)
        digest = checksum({name: tensor.cpu() for name, tensor in self._source}) if first else ""
        nbytes = sum(t.numel() * self._source.dtype_of(t).itemsize for t in named.values())
        return WeightsRef(version, str(path), digest, nbytes)

    def send(self) -> None:
        """Broadcast the version announced last; returns when it has left this device."""
        # The backends send on streams of their own, which do not wait for the optimizer's.
        torch.get_device_module(self._source.device).synchronize()
        if self._send is None:
            self._send = OPEN[self._transfer](self._meeting, self._source)
        self._send()
        self._source.named = {}


class DrivenByTheRun:
    """vLLM's client of the workers' control plane. The run's engine calls the workers itself, so nothing is left."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def nccl_sender(meeting: dict[str, Any], source: Source) -> Callable[[], None]:
    """Join as rank 0, when all workers have come; returns what sends the source's weights (vLLM 0.32)."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    joined = NCCLTrainerInitInfo(**meeting, **FORMATS["nccl"][0], rank=0)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(joined, client=DrivenByTheRun(), source=source)
    return engine.send_weights


def hccl_sender(meeting: dict[str, Any], source: Source) -> Callable[[], None]:
    """The same with vllm-ascend 0.23, whose backend is in the form of an older vLLM."""
    from vllm_ascend.distributed.weight_transfer.hccl_engine import HCCLWeightTransferEngine

    group = HCCLWeightTransferEngine.trainer_init(meeting)
    arguments = {"group": group, **FORMATS["hccl"][1]}
    return lambda: HCCLWeightTransferEngine.trainer_send_weights(iter(source), arguments)


FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nccl": ({"packed": True}, {}),
    "hccl": ({}, {"packed": True}),
}
"""Where each backend wants to know that tensors travel in large chunks: when joining, or with each version."""
OPEN = {"nccl": nccl_sender, "hccl": hccl_sender}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def receiver_infos(ref: WeightsRef, first_rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a worker's vLLM is told when it joins the group and when it receives: (init_info, update_info).

    Args:
        first_rank: of this worker's processes in the group.
    """
    announced = json.loads(Path(ref.path).read_text())
    return announced["init_info"] | {"rank_offset": first_rank}, announced["update_info"]
