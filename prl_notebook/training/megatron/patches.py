"""What megatron-core must be told where the accelerator is not called cuda.

megatron-core's schedule, gradient buffers and optimizer name the CUDA device in about ten places: a keyword
device="cuda", torch.cuda.current_device(), Tensor.cuda() and comparisons with "torch.cuda.FloatTensor". Inside
`megatron_on(device)` these mean `device`; nothing stays changed outside. On CUDA it does nothing.

Left out on purpose: CUDA streams, graphs and overlapped communication, which this trainer turns off. MindSpeed, which
replaces the same spots on Ascend by fused kernels, is imported only beside a megatron-core it was made for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

MINDSPEED_FITS = ("0.12.1", "0.17.0")
"""megatron-core versions that MindSpeed was written for (its own documentation)."""


class _CudaMeans(TorchFunctionMode):
    """Redirect what torch functions are told about cuda to another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            here = "torch." if self.device.type == "cpu" else f"torch.{self.device.type}."
            return func(*args).replace(here, "torch.cuda.", 1)
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs = {**kwargs, "device": self.device}
        return func(*args, **kwargs)


@contextlib.contextmanager
def megatron_on(device: torch.device) -> Iterator[None]:
    """Run megatron-core's code on `device`."""
    if device.type == "cuda":
        yield
        return
    module: Any = torch if device.type == "cpu" else torch.get_device_module(device)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    in_torch_cuda = {
        "current_device": lambda: device,
        "synchronize": nothing if device.type == "cpu" else module.synchronize,
        "empty_cache": nothing if device.type == "cpu" else module.empty_cache,
        "get_rng_state": lambda *args, **kwargs: module.get_rng_state(),
        "manual_seed": module.manual_seed,
    }
    in_megatron_random = {
        "_get_cuda_rng_state": lambda *args, **kwargs: module.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *args, **kwargs: module.set_rng_state(state),
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in in_torch_cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        for name, replacement in in_megatron_random.items():
            stack.enter_context(mock.patch.object(megatron_random, name, replacement))
        stack.enter_context(_CudaMeans(device))
        yield


def use_mindspeed() -> bool:
    """Let MindSpeed put its NPU kernels into megatron-core, if it is installed and fits, before a model is made.

    Never run here (no Ascend hardware); without it the same results come from megatron-core's own code.
    """
    if version("megatron-core") not in MINDSPEED_FITS or importlib.util.find_spec("mindspeed") is None:
        return False
    importlib.import_module("mindspeed.megatron_adaptor")
    return True
