"""Where processes compute: cpu/gloo, cuda/nccl or npu/hccl behind one strategy, and who gets which device.

Everything that depends on the kind of device is here or in training/megatron/patches.py. torch is imported only where a
device is opened, so the engine and the command line can plan without it. Left out on purpose: several hosts, and
splitting one accelerator in parts (MIG).
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prl_notebook.config import Rollout, Trainer

if TYPE_CHECKING:
    import torch

Kind = Literal["cpu", "cuda", "npu"]

BACKENDS: dict[Kind, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
VISIBLE: dict[Kind, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
DEVICE_FILES: dict[Kind, str] = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}


@dataclass(frozen=True)
class Device:
    """One device, numbered as the process that made the plan sees it."""

    kind: Kind
    index: int = 0

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def backend(self) -> str:
        """torch.distributed's backend for this kind."""
        return BACKENDS[self.kind]

    def open(self) -> torch.device:
        """Make it the process's current device.

        Raises:
            RuntimeError: if the device's runtime is not installed or reports no such device.
        """
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        if self.kind == "npu":
            _import_torch_npu()
        module = torch.get_device_module(self.kind)
        if not module.is_available() or self.index >= module.device_count():
            raise RuntimeError(
                f"{self} is not there: {self.kind} reports {module.device_count()} devices; run `prl doctor`"
            )
        module.set_device(self.index)
        return torch.device(self.kind, self.index)


def environment(devices: Sequence[Device]) -> dict[str, str]:
    """Variables for a background process that shall see exactly these devices; it counts them from 0.

    Collectives meet on the loopback interface only.
    """
    variables = {f"{backend}_SOCKET_IFNAME": "lo" for backend in ("GLOO", "NCCL", "HCCL")}
    if devices and devices[0].kind != "cpu":
        name = VISIBLE[devices[0].kind]
        ours = [i for i in os.environ.get(name, "").split(",") if i]
        variables[name] = ",".join(ours[d.index] if ours else str(d.index) for d in devices)
    return variables


@dataclass(frozen=True)
class DevicePlan:
    """Who computes where. `print(plan)` shows it."""

    rollout: tuple[tuple[Device, ...], ...]
    """devices of each rollout worker"""
    trainer: tuple[Device, ...]
    """device of each trainer rank"""
    idle: tuple[Device, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether both sides compute on the same device."""
        return bool(self.trainer) and self.trainer[0] in self.rollout[0]

    def __str__(self) -> str:
        lines = [
            f"rollout worker {n}: {', '.join(map(str, devices)) or 'its own server'}"
            for n, devices in enumerate(self.rollout)
        ]
        lines += [f"trainer rank {n}: {device}" for n, device in enumerate(self.trainer)]
        if self.idle:
            lines.append(f"idle: {', '.join(map(str, self.idle))}")
        if self.shared and self.trainer[0].kind != "cpu":
            lines.append(
                "both sides share one accelerator: they take turns on it and must fit into its memory together"
            )
        return "\n".join(lines)


def plan_devices(devices: str, rollout: Rollout, trainer: Trainer) -> DevicePlan:
    """Divide devices between rollout workers and trainer ranks.

    The trainer's ranks take the last devices, each rollout worker the next `tensor_parallel_size` (of
    Rollout.options, default 1) from the front. A single accelerator is shared; on CPU all share the cores.

    Args:
        devices: 'auto', 'cpu', 'cuda', 'npu' (all of that kind), or with indices: 'npu:0-7', 'cuda:0,2,3'.

    Raises:
        ValueError: naming what does not fit.
    """
    found = parse_devices(devices)
    workers = rollout.workers
    if found[0].kind == "cpu":
        return DevicePlan((found,) * workers, found * trainer.ranks)
    if rollout.engine == "vllm-server":
        return DevicePlan(((),) * workers, *_last(found, trainer.ranks, devices, "the servers run elsewhere"))
    each = int(rollout.options.get("tensor_parallel_size", 1))
    if len(found) == 1 and workers == each == trainer.ranks == 1:
        return DevicePlan((found,), found)
    needed = workers * each
    ranks, front = _last(found, trainer.ranks, devices, f"{workers} rollout workers need {needed} more", needed)
    return DevicePlan(tuple(front[n * each : (n + 1) * each] for n in range(workers)), ranks, front[needed:])


def _last(
    found: tuple[Device, ...], ranks: int, devices: str, others: str, needed: int = 0
) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
    if len(found) < ranks + needed:
        raise ValueError(
            f"devices={devices!r} names {len(found)} devices, but the trainer has {ranks} ranks and {others}; "
            "give more devices, or lower Trainer.tensor_parallel, pipeline_parallel, data_parallel or Rollout.workers"
        )
    return found[len(found) - ranks :], found[: len(found) - ranks]


def parse_devices(devices: str) -> tuple[Device, ...]:
    """The devices that a text names; see plan_devices. 'auto' takes NPUs, else CUDA devices, else the CPU."""
    if devices == "auto":
        return next((found for kind in ("npu", "cuda") if (found := _present(kind))), (Device("cpu"),))
    kind, _, listed = devices.partition(":")
    if kind not in BACKENDS or (kind == "cpu" and listed):
        raise ValueError(f"devices={devices!r} is not 'auto', 'cpu', 'cuda', 'npu', or such as 'npu:0-7' or 'cuda:0,2'")
    if kind == "cpu":
        return (Device("cpu"),)
    if not listed:
        if found := _present(kind):
            return found
        raise ValueError(f"devices={devices!r}: this machine shows no {kind} device; run `prl doctor`")
    return tuple(Device(kind, index) for index in _indices(devices, listed))


def _indices(devices: str, listed: str) -> list[int]:
    indices: list[int] = []
    for part in listed.split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ValueError(f"devices={devices!r}: {part!r} is no index and no range such as 0-7")
        indices += range(int(span[1]), int(span[2] or span[1]) + 1)
    if len(set(indices)) < len(indices):
        raise ValueError(f"devices={devices!r} names a device twice")
    return indices


def _present(kind: Kind) -> tuple[Device, ...]:
    """Devices of a kind, found without importing torch."""
    visible = os.environ.get(VISIBLE[kind])
    count = len(list(Path("/dev").glob(DEVICE_FILES[kind])))
    if visible is not None:
        count = min(count, len([i for i in visible.split(",") if i]))
    return tuple(Device(kind, i) for i in range(count))


def _import_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise RuntimeError(
            f"an npu device needs torch_npu, which does not import here ({error}); run `prl doctor`"
        ) from error
