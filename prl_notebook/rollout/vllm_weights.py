"""Policy versions inside vLLM: a weight-transfer backend for published files, and proof of what arrived.

vLLM's weight-transfer API (vllm.distributed.weight_transfer) has backends for NCCL and CUDA IPC, none for CPU. The one
registered here as `prl_safetensors` maps a file published by `weights/` into the model, on any device of a host that
sees the file. Whatever the backend, the worker extension completes an update and compares what arrived with what the
engine computes with. Importing this module imports vllm, so only rollout workers and vLLM's own processes do (as
`worker_extension_cls`). vllm-ascend 0.23 has the weight-transfer API of an older vLLM, which differs where noted; it
was read, not run.

Left out on purpose: reading back tensor-parallel shards and fused experts. Those are reported as unverified, and what
stands behind them is the log-prob guard (rollout/guard.py).

Shapes: N output and K input features of a matrix, J of the K that are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from prl_notebook.engine.types import WeightsRef
from prl_notebook.rollout.vllm_arguments import WEIGHTS_BACKEND
from prl_notebook.weights import WeightsMismatch, checksum, open_version

SAMPLED_FEATURES = 8
"""Input features of a packed matrix compared after the first update; an optimizer step changes all of them."""

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]

log = logging.getLogger(__name__)


@dataclass
class NoInit(WeightTransferInitInfo):
    """A file needs no rendezvous."""


@dataclass
class PublishedVersion(WeightTransferUpdateInfo):
    """A WeightsRef as vLLM's API carries it."""

    version: int
    path: str
    checksum: str
    nbytes: int


class SafetensorsTransfer(WeightTransferEngine[NoInit, PublishedVersion]):
    """start_weight_update, update_weights (one published file), finish_weight_update."""

    init_info_cls = NoInit
    update_info_cls = PublishedVersion

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:  # in the older API, the worker does this and finish_weight_update itself
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PublishedVersion, load_weights: LoadWeights | None = None) -> None:
        """`load_weights` is what the older API hands over."""
        ref = WeightsRef(update_info.version, update_info.path, update_info.checksum, update_info.nbytes)
        (load_weights or self.model.load_weights)(open_version(ref).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Of the older API, abstract there. Files are published by weights/store.py."""
        raise NotImplementedError


class WorkerExtension:
    """Mixed into vLLM's worker class: importing it registers the backend; it frames every weight update."""

    vllm_config: VllmConfig
    model_runner: Any
    weight_transfer_engine: WeightTransferEngine
    policy_updates = 0
    policy_arrived: dict[str, torch.Tensor] | None = None
    """the tensors of the update under way, on the CPU; None where they are not kept"""

    def expect_policy(self) -> None:
        """Before start_weight_update: keep what arrives. Of a broadcast, the first version alone: it costs a copy."""
        if self.policy_updates and not isinstance(self.weight_transfer_engine, SafetensorsTransfer):
            return
        model = self.model_runner.get_model()
        load_weights: LoadWeights = model.load_weights
        arrived: dict[str, torch.Tensor] = {}
        self.policy_arrived = arrived

        def keeping(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            pairs = list(weights)
            arrived.update((name, tensor.cpu()) for name, tensor in pairs)
            return load_weights(pairs)

        model.load_weights = keeping

    def settle_policy(self) -> str:
        """After finish_weight_update: what vLLM leaves out, and proof. Returns the checksum of what was kept, else ''.

        Raises:
            WeightsMismatch: see `verify`.
        """
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            for head in tied_heads(model).values():
                # On CPU vLLM packs each matrix for oneDNN when its layer is loaded. A tied lm_head receives no weight
                # of its own in a reload, so its packed copy would silently stay at the old policy (vLLM 0.32).
                head.quant_method.process_weights_after_loading(head)
        arrived, self.policy_arrived = self.policy_arrived, None
        if arrived is None:
            return ""
        del model.load_weights  # the one of the class is left
        sampled = SAMPLED_FEATURES if self.policy_updates else None
        verify(model, arrived, self.vllm_config.parallel_config.tensor_parallel_size, sampled)
        self.policy_updates += 1
        return checksum(arrived)


def verify(
    model: nn.Module,
    published: Mapping[str, torch.Tensor],
    tensor_parallel_size: int = 1,
    sampled_features: int | None = None,
) -> None:
    """Compare the published tensors with what the engine computes with, exactly.

    Args:
        sampled_features: How many input features of matrices packed for a CPU kernel are compared, drawn at random;
            None: all. Reading all takes K times a forward pass of one token, several seconds at 135M parameters.

    Raises:
        WeightsMismatch: naming the first tensor that differs, and by how much.
    """
    if tensor_parallel_size > 1:
        log.warning("weights divided among %d tensor-parallel ranks are not read back", tensor_parallel_size)
        return
    unverified = set(published)
    for name, standing, features_J in standing_weights(model, published, sampled_features):
        wanted = published[name] if features_J is None else published[name][:, features_J]
        if (standing.dtype, standing.shape) != (wanted.dtype, wanted.shape):
            raise WeightsMismatch(
                f"{name} is published as {wanted.dtype} {tuple(wanted.shape)}, vLLM holds {standing.dtype} "
                f"{tuple(standing.shape)}; publish with the dtype of the rollout worker"
            )
        if not torch.equal(standing, wanted):  # equal up to the sign of zeros, which a product with one loses
            difference = (standing.float() - wanted.float()).abs().max().item()
            raise WeightsMismatch(f"vLLM computes with another {name} than was published: off by {difference:g}")
        unverified.discard(name)
    expected = {part for name, _ in model.named_parameters() for part in published_names(model, name)}
    if (missing := expected - published.keys()) and unverified <= expected:
        raise WeightsMismatch(f"vLLM's {min(missing)} is not among the {len(published)} published weights")
    if unverified:  # fused experts have names of their own
        log.warning("%d of %d weights not read back, such as %s", len(unverified), len(published), min(unverified))


def standing_weights(
    model: nn.Module, published: Mapping[str, torch.Tensor], sampled_features: int | None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """The engine's own weights under their published names: (name, tensor on the CPU, its input features J or None).

    A tied lm_head comes once more under its embedding's name.
    """
    holders = [(name, model.get_submodule(name.rpartition(".")[0])) for name, _ in model.named_parameters()]
    holders += [(f"{embedding}.weight", head) for embedding, head in tied_heads(model).items()]
    for parameter, layer in holders:
        names = published_names(model, parameter)
        if published.keys() >= set(names):
            tensor, features_J = read_back(layer, parameter.rpartition(".")[2], sampled_features)
            lengths = [len(published[name]) for name in names]
            for name, rows in zip(names, tensor[: sum(lengths)].split(lengths), strict=True):
                yield name, rows, features_J


def published_names(model: nn.Module, name: str) -> list[str]:
    """Names in the Hugging Face model of what a parameter of vLLM's holds, in order of their rows.

    vLLM fuses projections (q, k and v; gate and up) along the output features, in the order of the model's
    packed_modules_mapping. Where it pads the vocabulary, the padding comes last.
    """
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(module, [module])
    return [".".join(filter(None, (parent, part, leaf))) for part in parts]


def read_back(layer: Any, name: str, sampled_features: int | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A parameter as the layer computes with it: (tensor on the CPU, None), or [N, J] of it and the features J.

    Matrices packed for a CPU kernel cannot be read, but their product with a unit vector is exactly one column.
    """
    parameter = getattr(layer, name).detach()
    if name != "weight" or not hasattr(layer, "cpu_linear") or type(layer) is VocabParallelEmbedding:
        return parameter.cpu(), None
    width = layer.embedding_dim if isinstance(layer, ParallelLMHead) else layer.input_size_per_partition
    features_J = torch.randperm(width)[:sampled_features]
    units_JK = torch.zeros(len(features_J), width, dtype=layer.params_dtype)
    units_JK[torch.arange(len(features_J)), features_J] = 1
    return layer.cpu_linear(units_JK, parameter, None).t(), features_J


def tied_heads(model: nn.Module) -> dict[str, ParallelLMHead]:
    """Output layers that share their weight with an embedding, by the embedding's name."""
    embeddings = {id(m.weight): name for name, m in model.named_modules() if type(m) is VocabParallelEmbedding}
    return {
        embeddings[id(head.weight)]: head
        for head in model.modules()
        if isinstance(head, ParallelLMHead) and id(head.weight) in embeddings
    }


WeightTransferEngineFactory.register_engine(WEIGHTS_BACKEND, SafetensorsTransfer)
