"""Which megatron-core parameter holds which Hugging Face tensors, and how tensor-parallel ranks share them.

One table serves weights, gradients and optimizer moments, in both directions. Left out on purpose: tensors that differ
between ranks in any other way than by rows or columns (experts).

Shapes: O rows and I columns of a matrix; a bias is a matrix without columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from transformers import PretrainedConfig

from prl_notebook.training.megatron.model import LayoutGPT, head_dim

Kind = Literal["whole", "rows", "columns", "gate_up", "qkv"]


@dataclass(frozen=True)
class Entry:
    """One parameter of a stage."""

    local: str
    """its name in the LayoutGPT"""
    names: tuple[str, ...]
    """Hugging Face tensors it is made of"""
    kind: Kind
    """whole: every rank has it; rows, columns: split over ranks; gate_up: both split by rows, then stacked; qkv: per
    key/value head the query heads that share it, its key and its value, then split by rows"""
    exported: bool = True
    """False for the last stage's copy of a tied embedding"""


class FolderTensors:
    """Whole tensors of a Hugging Face folder by name, read as they are asked for.

    Raises:
        FileNotFoundError: if the folder holds no safetensors.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{folder} holds no .safetensors files, which Trainer(engine='megatron') reads")
        self._files: dict[str, Any] = {}
        for path in paths:
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise KeyError(f"the model's folder has no tensor {name!r}")
        return self._files[name].get_tensor(name)


class ParameterMap:
    """The table of one rank's stage. `cpu_group` spans all ranks and carries CPU tensors (gloo)."""

    def __init__(self, model: LayoutGPT, hf: PretrainedConfig, cpu_group: dist.ProcessGroup) -> None:
        self.model, self.hf, self._cpu_group = model, hf, cpu_group
        self.entries = list(self._table())
        self.parameters = dict(model.named_parameters())
        if difference := self.parameters.keys() ^ {entry.local for entry in self.entries}:
            raise ValueError(
                f"model_type={hf.model_type!r} has parameters that have no place here: {sorted(difference)}"
            )
        self._group = parallel_state.get_tensor_model_parallel_group()

    def shard(self, entry: Entry, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The rank's part of a parameter. `get` gives whole tensors by Hugging Face name."""
        ranks, rank = self._group.size(), self._group.rank()
        whole = [get(name) for name in entry.names]
        if entry.kind == "whole":
            return whole[0]
        if entry.kind == "columns":
            return whole[0].chunk(ranks, 1)[rank]
        if entry.kind == "qkv":
            heads = [x.unflatten(0, (self.hf.num_key_value_heads, -1)) for x in whole]
            return torch.cat(heads, 1).chunk(ranks)[rank].flatten(0, 1)
        return torch.cat([x.chunk(ranks)[rank] for x in whole])

    def whole(self, entry: Entry, part: torch.Tensor) -> list[torch.Tensor]:
        """Whole tensors, in the order of `entry.names`, from the parts of all ranks (a collective call)."""
        if entry.kind == "whole":
            return [part]
        parts = [torch.empty_like(part) for _ in range(self._group.size())]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        if entry.kind == "columns":
            return [torch.cat(parts, 1)]
        if entry.kind == "rows":
            return [torch.cat(parts)]
        if entry.kind == "gate_up":
            return [torch.cat(halves) for halves in zip(*(p.chunk(2) for p in parts), strict=True)]
        groups, width = self.hf.num_key_value_heads, head_dim(self.hf)
        queries = self.hf.num_attention_heads // groups * width
        split = torch.cat(parts).unflatten(0, (groups, -1)).split([queries, width, width], 1)
        return [x.flatten(0, 1) for x in split]

    @torch.no_grad()
    def load(self, get: Callable[[str], torch.Tensor]) -> None:
        """Fill the stage's parameters.

        Raises:
            ValueError: naming the tensor whose shape does not fit.
        """
        for entry in self.entries:
            parameter, part = self.parameters[entry.local], self.shard(entry, get)
            if part.shape != parameter.shape:
                raise ValueError(
                    f"{entry.names[0]} does not fit: {tuple(part.shape)} instead of {tuple(parameter.shape)}"
                )
            parameter.copy_(part)

    @torch.no_grad()
    def gather(self, value: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors of the model by Hugging Face name, on the CPU of global rank 0; {} elsewhere (collective).

        Args:
            value: the rank's tensor for a parameter of that local name, in the parameter's shape.
        """
        found: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            tensors = self.whole(entry, value(entry.local))
            if entry.exported:
                found |= dict(zip(entry.names, (x.cpu() for x in tensors), strict=True))
        if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_data_parallel_rank():
            return {}
        return _collect(found, self._cpu_group)

    def _table(self) -> Iterator[Entry]:
        hf, model = self.hf, self.model
        embedding = "model.embed_tokens.weight"
        if model.pre_process:
            yield Entry("embedding.word_embeddings.weight", (embedding,), "rows")
        for i in range(len(model.decoder.layers)):
            yield from self._layer(f"decoder.layers.{i}.", f"model.layers.{model.layer_offset + i}.")
        if model.post_process:
            yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "whole")
            if not hf.tie_word_embeddings:
                yield Entry("output_layer.weight", ("lm_head.weight",), "rows")
            elif not model.pre_process:
                yield Entry("output_layer.weight", (embedding,), "rows", exported=False)

    def _layer(self, local: str, name: str) -> Iterator[Entry]:
        def projections(kind: str) -> tuple[str, ...]:
            return tuple(f"{name}self_attn.{x}_proj.{kind}" for x in "qkv")

        yield Entry(local + "input_layernorm.weight", (name + "input_layernorm.weight",), "whole")
        yield Entry(local + "self_attention.linear_qkv.weight", projections("weight"), "qkv")
        if self.model.config.add_qkv_bias:
            yield Entry(local + "self_attention.linear_qkv.bias", projections("bias"), "qkv")
        if self.model.config.qk_layernorm:
            for x in "qk":
                yield Entry(
                    f"{local}self_attention.{x}_layernorm.weight", (f"{name}self_attn.{x}_norm.weight",), "whole"
                )
        yield Entry(local + "self_attention.linear_proj.weight", (name + "self_attn.o_proj.weight",), "columns")
        yield Entry(local + "pre_mlp_layernorm.weight", (name + "post_attention_layernorm.weight",), "whole")
        gate_up = (name + "mlp.gate_proj.weight", name + "mlp.up_proj.weight")
        yield Entry(local + "mlp.linear_fc1.weight", gate_up, "gate_up")
        yield Entry(local + "mlp.linear_fc2.weight", (name + "mlp.down_proj.weight",), "columns")


def _collect(found: dict[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Tensors of all pipeline stages, sent to the first; `group` carries CPU tensors between all ranks."""
    first, *others = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    if dist.get_rank() in others:
        dist.send_object_list([[(name, x.shape, x.dtype) for name, x in found.items()]], first, group)
        for x in found.values():
            dist.send(x.contiguous(), first, group)
        return {}
    for other in others:
        header: list[Any] = [None]
        dist.recv_object_list(header, other, group)
        for name, shape, dtype in header[0]:
            found[name] = torch.empty(shape, dtype=dtype)
            dist.recv(found[name], other, group)
    return found
