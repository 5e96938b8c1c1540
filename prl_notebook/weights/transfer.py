"""How policy versions leave the trainer: as a file, or by a broadcast; chosen by Weights.transfer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from prl_notebook.config import Config
from prl_notebook.engine.types import WeightsRef
from prl_notebook.weights.broadcast import Broadcast
from prl_notebook.weights.store import publish


class Transfer(Protocol):
    """The trainer's end."""

    def publish(self, named: Mapping[str, torch.Tensor], version: int, directory: str | Path) -> WeightsRef:
        """Make one policy version known; `named` holds it under Hugging Face names, without tied duplicates."""
        ...

    def send(self) -> None:
        """Send the version published last, if its WeightsRef says `broadcast`."""
        ...


class FileTransfer:
    """Versions are files, which the workers read."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def publish(self, named: Mapping[str, torch.Tensor], version: int, directory: str | Path) -> WeightsRef:
        return publish(named, version, directory, self._dtype)

    def send(self) -> None:
        raise RuntimeError("a version in a file is there once it is published; only broadcasts are sent")


def transfer_of(config: Config, device: torch.device) -> Transfer:
    """The trainer's end of Weights.transfer; versions have the dtype of the rollout workers."""
    return Broadcast(config, device) if config.weights.broadcast else FileTransfer(getattr(torch, config.rollout.dtype))
