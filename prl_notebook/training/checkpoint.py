"""A trainer's checkpoint on disk: policy/ (a Hugging Face folder), trainer.safetensors, trainer.json. No pickles.

Written beside its place and renamed into it, so that a folder of this name is always complete. The reference is
recorded by path and checksum, not copied: it never changes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def save_checkpoint(
    directory: Path,
    policy: PreTrainedModel,
    model_path: Path,
    tensors: dict[str, torch.Tensor],
    state: dict[str, Any],
) -> None:
    """Write a checkpoint, replacing one of the same name.

    Args:
        model_path: folder the policy was loaded from; its tokenizer, chat template and other files are copied along.
        tensors: flat named tensors of the optimizer and the random state.
        state: plain JSON-able data.
    """
    directory = Path(directory)
    partial, replaced = (directory.with_name(f".{directory.name}.{kind}") for kind in ("partial", "replaced"))
    for remains in (partial, replaced):  # of a process that was killed while saving
        shutil.rmtree(remains, ignore_errors=True)
    policy.save_pretrained(partial / "policy")
    for file in model_path.iterdir():
        target = partial / "policy" / file.name
        if file.is_file() and not target.exists() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, target)
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial / "trainer.safetensors")
    (partial / "trainer.json").write_text(json.dumps(state, indent=2))
    if directory.exists():
        directory.rename(replaced)
        partial.rename(directory)
        shutil.rmtree(replaced)
    else:
        partial.rename(directory)


def load_checkpoint(directory: Path) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """(folder of the policy, tensors, state) of a checkpoint.

    Raises:
        FileNotFoundError: if the folder is no complete checkpoint.
    """
    directory = Path(directory)
    if not (directory / "trainer.json").is_file():
        raise FileNotFoundError(f"{directory} is no trainer checkpoint: it has no trainer.json")
    state = json.loads((directory / "trainer.json").read_text())
    return directory / "policy", load_file(directory / "trainer.safetensors"), state
