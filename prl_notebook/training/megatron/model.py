"""GPTModel of megatron-core for Hugging Face models: Qwen2, Qwen3 and Llama (SmolLM2), with layouts instead of masks.

Three things differ from the stock model: attention runs the kernels of prl_notebook.attention on the layout that
travels in `packed_seq_params`; rotary angles follow per-token position ids, as packed rows need them; the last stage
returns hidden states, since log-probs are computed at response tokens only (scores.py). Left out on purpose: mixtures
of experts, sliding windows, position scalings that depend on the sequence length, context parallelism and virtual
pipeline stages.

Shapes: B rows, S tokens per row, H hidden size, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from prl_notebook.attention.kernels import Plan
from prl_notebook.config import Trainer
from prl_notebook.training.megatron.scores import vocab_parallel_scores

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
"""Position scalings that are a constant change of the frequencies."""


@dataclass
class PackedLayout(PackedSeqParams):
    """Carries the attention plan of one forward pass through GPTModel down to every layer's attention."""

    plan: Plan | None = None

    @classmethod
    def of(cls, plan: Plan) -> PackedLayout:
        # Any format but "thd": megatron-core would squeeze the rows away.
        return cls(qkv_format="sbhd", plan=plan)


class LayoutAttention(MegatronModule):
    """megatron-core's `core_attention` on the kernels of prl_notebook.attention."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **unused: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedLayout,
        **unused: Any,
    ) -> torch.Tensor:
        """[S, B, N*D]"""
        q_BNSD, k_BGSD, v_BGSD = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_SBGD, value_SBGD))
        assert packed_seq_params.plan is not None
        o_BSND = packed_seq_params.plan.attend(q_BNSD, k_BGSD, v_BGSD, self.scale, self.layer_number - 1)
        return o_BSND.transpose(0, 1).flatten(2)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that takes part in sequence parallelism (megatron-core's own wrapper of torch's refuses it)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Its gradient covers the rank's part of the sequence only: finalize_model_grads sums it over tensor parallel.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LayoutGPT(GPTModel):
    """One pipeline stage of a model; `forward` ends with hidden states, `scores` turns them into log-probs."""

    def __init__(self, config: TransformerConfig, hf: PretrainedConfig) -> None:
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        parts.self_attention.submodules.core_attention = LayoutAttention
        if config.qk_layernorm:
            parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
        layers = config.num_layers // config.pipeline_model_parallel_size
        super().__init__(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm),
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="none",
        )
        self._inverse_frequency_F = LlamaRotaryEmbedding(hf).inv_freq  # type: ignore[arg-type]  # the same for every MODEL_TYPES

    @property
    def layer_offset(self) -> int:
        """Number of the stage's first layer in the whole model."""
        return self.decoder.layers[0].layer_number - 1

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the shared embedding. The stock method also reduces it over CUDA, but both copies are loaded equal."""
        if not (self.share_embeddings_and_output_weights and self.config.pipeline_model_parallel_size > 1):
            super().setup_embeddings_and_output_layer()
            return
        if self.pre_process or self.post_process:
            weight = self.shared_embedding_or_output_weight()
            weight.is_embedding_or_output_parameter = True
            weight.shared_embedding = True  # a bucket of its own, so that both stages shard it alike
            weight.shared = not self.pre_process  # counted once in the gradient's norm

    def _preprocess(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> tuple[Any, ...]:
        """The stock embedding, with rotary angles [S, B, 1, D] from position ids [B, S]."""
        embedded, _, *rest = super()._preprocess(input_ids=input_ids, position_ids=position_ids, **kwargs)
        frequency_F = self._inverse_frequency_F.to(position_ids.device)
        angle_SBF = position_ids.T.float()[..., None] * frequency_F
        return embedded, torch.cat((angle_SBF, angle_SBF), -1)[:, :, None], *rest

    def _postprocess(self, hidden_states: torch.Tensor, **unused: Any) -> torch.Tensor:
        return hidden_states

    def scores(
        self, hidden_SBH: torch.Tensor, source_T: torch.Tensor, target_T: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 log-probs and entropies [T] of `target_T`, predicted at the flat tokens `source_T` (b*S+s).

        On the last pipeline stage only.
        """
        if self.config.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH)
        hidden_TH = hidden_SBH.transpose(0, 1).flatten(0, 1)[source_T]
        if not self.config.sequence_parallel:
            # Not before the transpose: megatron-core's all-reduce of a gradient that is not contiguous is lost.
            hidden_TH = copy_to_tensor_model_parallel_region(hidden_TH)
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        group = parallel_state.get_tensor_model_parallel_group()
        return vocab_parallel_scores(hidden_TH, weight_VH, target_T, temperature, group)


def transformer_config(hf: PretrainedConfig, trainer: Trainer, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration of a Hugging Face model.

    Raises:
        ValueError: naming what this trainer cannot do with the model, or what the parallel sizes do not divide.
    """
    _check_architecture(hf)
    _check_division(hf, trainer)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"Trainer.dtype={str(dtype).removeprefix('torch.')!r}: megatron-core's distributed optimizer takes float32 "
            "or bfloat16 parameters; use one of them, or engine='torch'"
        )
    recompute: dict[str, Any] = {}
    if trainer.gradient_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        sequence_parallel=trainer.sequence_parallel and trainer.tensor_parallel > 1,
        # Sums over micro-batches and ranks: the period's normaliser is applied once, at its end.
        calculate_per_token_loss=True,
        # Micro-batches differ in length; megatron-core ties that to this (unused) dispatcher.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The only initialisation that also marks which parameters are split over ranks; the weights are then loaded.
        use_cpu_initialization=True,
        perform_initialization=True,
        # Fused CUDA kernels and batched sends that other devices lack.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=False,
        **recompute,
    )


def head_dim(hf: PretrainedConfig) -> int:
    """Dimension of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def _check_architecture(hf: PretrainedConfig) -> None:
    if hf.model_type not in MODEL_TYPES:
        raise ValueError(
            f"Trainer(engine='megatron') knows {', '.join(MODEL_TYPES)}, not model_type={hf.model_type!r}; "
            "use engine='torch'"
        )
    rope = hf.rope_parameters["rope_type"]
    refused = {
        f"hidden_act={hf.hidden_act!r}": hf.hidden_act != "silu",
        f"rope_type={rope!r}": rope not in ROPE_TYPES,
        "use_sliding_window": getattr(hf, "use_sliding_window", False),
        "attention_bias": getattr(hf, "attention_bias", False) and hf.model_type != "qwen2",
        "mlp_bias": getattr(hf, "mlp_bias", False),
    }
    if found := [name for name, present in refused.items() if present]:
        raise ValueError(f"Trainer(engine='megatron') cannot train a model with {found[0]}; use engine='torch'")


def _check_division(hf: PretrainedConfig, trainer: Trainer) -> None:
    tensor, pipeline = trainer.tensor_parallel, trainer.pipeline_parallel
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(hf, name) % tensor:
            raise ValueError(f"Trainer.tensor_parallel={tensor} does not divide the model's {name}={getattr(hf, name)}")
    if hf.num_hidden_layers % pipeline:
        raise ValueError(
            f"Trainer.pipeline_parallel={pipeline} does not divide the model's num_hidden_layers={hf.num_hidden_layers}"
        )
