"""A policy version on its way from the trainer to the rollout workers: one safetensors file, published once.

The file lies in shared memory where the host has it and carries version and checksum in its metadata; every worker
maps it, copies it into its model and acknowledges with a checksum of its own parameters. Comparing checksums and
deciding when all workers have the version is the engine's; transfers between hosts are the engines' own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from prl_notebook.engine.types import WeightsRef


class WeightsMismatch(RuntimeError):
    """Weights that are not the ones asked for: another version, checksum, set of names, shape or dtype."""


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """xxh3-64 (hex) over names, dtypes, shapes and bytes, in name order; equal only for bitwise equal weights."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors (not copies) under their state-dict names; a tied tensor once, under its first name.

    For Hugging Face models these are the names of the checkpoint, with lm_head.weight left out when it is tied.
    """
    unique: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        unique.setdefault(id(tensor), (name, tensor.detach()))
    return dict(unique.values())


def load_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into the model in place, so that tied parameters stay tied.

    Raises:
        WeightsMismatch: if names, shapes or dtypes are not exactly those of `named_weights(model)`; the model is
            then unchanged.
    """
    own = named_weights(model)
    if difference := sorted(own.keys() ^ tensors.keys()):
        side = "missing from the published weights" if difference[0] in own else "unknown to the model"
        raise WeightsMismatch(f"{len(difference)} tensor names do not fit; {difference[0]!r} is {side}")
    for name, tensor in tensors.items():
        if (tensor.shape, tensor.dtype) != (own[name].shape, own[name].dtype):
            raise WeightsMismatch(
                f"{name} is published as {tensor.dtype} {tuple(tensor.shape)}, the model holds "
                f"{own[name].dtype} {tuple(own[name].shape)}; publish with the dtype of the rollout worker"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def publish(
    named: Mapping[str, torch.Tensor], version: int, directory: str | Path, dtype: torch.dtype | None = None
) -> WeightsRef:
    """Write one policy version to `directory`/v{version:06d}.safetensors; readers see all of it or nothing.

    Args:
        named: Tensors under Hugging Face names without tied duplicates, as `named_weights` gives them.
        dtype: Cast floating tensors to it first (the dtype of the rollout workers); None leaves them.
    """
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in named.items()
    }
    digest = checksum(tensors)
    path = Path(directory) / f"v{version:06d}.safetensors"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    save_file(tensors, partial, metadata={"version": str(version), "checksum": digest})
    os.replace(partial, path)
    return WeightsRef(version, str(path), digest, sum(tensor.nbytes for tensor in tensors.values()))


def open_version(ref: WeightsRef) -> dict[str, torch.Tensor]:
    """The published tensors by name, mapped from the file.

    The bytes are not hashed here: the checksum that counts is that of the parameters after loading.

    Raises:
        WeightsMismatch: if the file's metadata name another version or checksum than `ref`.
        FileNotFoundError: if the version was released.
    """
    with safe_open(ref.path, framework="pt") as file:
        found = file.metadata() or {}
        if found.get("version") != str(ref.version):
            raise WeightsMismatch(
                f"policy version {ref.version} was asked for, but {ref.path} holds version {found.get('version')}"
            )
        if found.get("checksum") != ref.checksum:
            raise WeightsMismatch(
                f"policy version {ref.version} should have checksum {ref.checksum}, but {ref.path} was published with "
                f"{found.get('checksum')}"
            )
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
