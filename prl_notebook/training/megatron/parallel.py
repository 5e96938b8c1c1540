"""Process groups of the trainer's ranks: rendezvous through a file, no open port, an end to every wait.

Ranks are numbered tensor parallel fastest, then data parallel, then pipeline: megatron-core's default order. Left out
on purpose: ranks on several hosts, which need a rendezvous over the network (a cluster runtime brings one).
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from prl_notebook.config import Trainer
from prl_notebook.runtime.device import Device

TIMEOUT = 600.0
"""Seconds a rank waits for the others in one collective. A rank whose process ends is noticed at once."""


def start(
    rank: int, trainer: Trainer, rendezvous: str | Path, device: Device, timeout: float = TIMEOUT
) -> dist.ProcessGroup:
    """Join the trainer's ranks; returns a group of all ranks that carries CPU tensors and objects.

    Args:
        rendezvous: a path on a local disk or in shared memory that no earlier group used; rank 0 need not be first.
    """
    store = dist.FileStore(str(rendezvous), trainer.ranks)
    wait = timedelta(seconds=timeout)
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=trainer.ranks, timeout=wait)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        distributed_timeout_minutes=timeout / 60,
        create_gloo_process_groups=False,
    )
    return dist.new_group(backend="gloo", timeout=wait)


def stop() -> None:
    """Leave the groups; other ranks that wait for this one raise."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
