"""How vLLM is to be set up for a run: engine arguments and the tokens that end a completion; imports no vLLM."""

from __future__ import annotations

from typing import Any

import psutil
from transformers import AutoConfig, GenerationConfig

from prl_notebook.config import Config

WEIGHTS_BACKEND = "prl_safetensors"
"""Name of our backend in vLLM's weight-transfer registry (rollout/vllm_weights.py)."""
WORKER_EXTENSION = "prl_notebook.rollout.vllm_weights.WorkerExtension"
KV_CACHE_SHARE = 0.25
"""Most of the available memory that a worker's key-value cache may take on CPU; vLLM's own default is nearly all."""

PREFILL_TOKENS = 2048
"""Prompt tokens computed in one step at most, unless a single prompt is longer; on CPU."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def end_ids(model_path: str) -> list[int]:
    """Every token that ends a completion, by the generation config, or else by the model's config."""
    try:
        generation = GenerationConfig.from_pretrained(model_path)
    except OSError:  # a model need not have one
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model_path))
    end = generation.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def engine_arguments(model_path: str, config: Config, kind: str) -> dict[str, Any]:
    """EngineArgs that make vLLM an exact sampler, overridden by Rollout.options."""
    model, grpo, rollout = AutoConfig.from_pretrained(model_path).get_text_config(), config.grpo, config.rollout
    context = model.max_position_embeddings
    if grpo.max_prompt_length is not None:
        context = min(context, grpo.max_prompt_length + grpo.max_completion_length)
    arguments = {
        "model": model_path,
        "dtype": rollout.dtype,
        "max_model_len": context,
        "max_num_seqs": rollout.groups_in_flight * grpo.num_generations,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",  # after temperature, top-k and top-p
        "enable_prefix_caching": True,
        "async_scheduling": False,  # a step returns its own tokens, so abort and load leave nothing behind
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": config.weights.transfer if config.weights.broadcast else WEIGHTS_BACKEND},
        "worker_extension_cls": WORKER_EXTENSION,
    } | rollout.options
    if kind == "cpu":
        head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        token = 2 * model.num_hidden_layers * model.num_key_value_heads * head * ITEM_BYTES[arguments["dtype"]]
        wanted = token * arguments["max_model_len"] * arguments["max_num_seqs"]
        room = int(psutil.virtual_memory().available * KV_CACHE_SHARE / rollout.workers)
        arguments = {
            "kv_cache_memory_bytes": min(wanted, room),
            "enforce_eager": True,
            "block_size": 32,  # the smallest there; whole blocks of a prompt are shared, and vLLM's 128 shares few
            # A seeded request whose prompt is prefilled in parts fails on CPU (vLLM 0.32: no generator offset there).
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(PREFILL_TOKENS, arguments["max_model_len"]),
        } | arguments
    return arguments
