"""Layouts through Hugging Face causal language models: log-probs of response tokens, prompts computed once.

The kernels enter a model through transformers' attention extension point (AttentionInterface) under the name
`prl_notebook`, and the layout reaches them as a keyword that decoder layers hand down, so it is there again when
activation checkpointing recomputes a layer. The registered function refuses calls without a layout: generation and
plain forwards need `model.set_attn_implementation("sdpa")` first. Logits exist for response positions only, a chunk at
a time, backward included, and the last layer's feed-forward runs where its output is read (prompt tokens but the last
serve as keys and values there). Splitting one group over several passes is left to prefix.py.

Shapes: B rows, S tokens per row, H query heads, G key/value heads, D hidden or head size, T response tokens, N tokens
that are read, V vocabulary.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from prl_notebook.attention.kernels import Plan, choose
from prl_notebook.attention.layout import Layout

NAME = "prl_notebook"
CHUNK = 2048
"""Response tokens whose logits exist at once."""

_REFUSED_KEYWORDS = ("sliding_window", "softcap", "s_aux", "position_bias")


def attention_forward(
    module: nn.Module,
    query_BHSD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    prl_plan: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers. Returns (o_BSHD, no attention weights)."""
    if prl_plan is None:
        raise ValueError(
            "this model's attention was switched to shared prompts and needs a layout (attention.hf.logprobs); for "
            'plain forwards and generate() call model.set_attn_implementation("sdpa")'
        )
    if dropout:
        raise ValueError(f"attention dropout is {dropout}; shared prompts need it off: call disable_dropout(model)")
    for name in _REFUSED_KEYWORDS:
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for {name}={kwargs[name]}, which shared prompts lack")
    return prl_plan.attend(query_BHSD, key_BGSD, value_BGSD, scaling, module.layer_idx), None


AttentionInterface.register(NAME, attention_forward)


def check_supported(config: Any) -> str | None:
    """Why shared prompts cannot be used with a model of this transformers config; None when they can.

    The layers must see all of the prompt and nothing but keys, values and positions: sliding windows, chunked or
    linear attention and state space layers are out, and so are soft-capped scores and learned attention sinks.
    """
    config = config.get_text_config()
    model_type = config.model_type
    layer_types = getattr(config, "layer_types", None) or ()
    if other := sorted(set(layer_types) - {"full_attention"}):
        return f"{model_type} has {other[0]} layers, which see a packed response other than a single row"
    windowed = getattr(config, "use_sliding_window", True) and not layer_types
    if windowed and getattr(config, "sliding_window", None):
        return f"{model_type} has a sliding window of {config.sliding_window} tokens, counted in packed tokens"
    if getattr(config, "attn_logit_softcapping", None):
        return f"{model_type} caps attention scores (attn_logit_softcapping), which the kernels lack"
    if not getattr(config, "num_attention_heads", None):
        return f"{model_type} is not an attention model"
    return None


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability of a model to 0, those that attention layers keep as plain numbers included.

    With dropout the first update's ratio would not be 1, and a prompt's pass would serve several responses.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def hidden_states(model: PreTrainedModel, layout: Layout, kernel: str | None = None) -> Tensor:
    """h_TD: the decoder's last hidden states that predict each response token.

    Args:
        kernel: name in attention.kernels.KERNELS; None chooses by device and layout. Separate layouts of a model that
            was never given a shared one go through the model's own attention.

    Raises:
        ValueError: the layout is shared and the model's attention does not admit it, or dropout is on.
    """
    h_BSD = decode(model, layout, plan(model, layout, kernel))
    source_T = torch.from_numpy(layout.source_T).to(h_BSD.device)
    return h_BSD.flatten(0, 1).index_select(0, source_T)


def plan(model: PreTrainedModel, layout: Layout, kernel: str | None = None) -> Plan | None:
    """The layout prepared for this model, whose attention is switched over if need be; None: leave it to the model."""
    kernel = kernel or choose(model.device, layout, model.dtype)
    if kernel == "causal" and model.config._attn_implementation != NAME:
        return None
    use_layouts(model)
    return Plan.of(layout, model.device, kernel, last_layer=model.config.get_text_config().num_hidden_layers - 1)


def use_layouts(model: PreTrainedModel) -> None:
    """Switch a model's attention over to layouts; a second call does nothing.

    Raises:
        ValueError: with the reason why the model's attention does not admit shared prompts.
    """
    if model.config._attn_implementation == NAME:
        return
    reason = check_supported(model.config)
    if reason is None and not model._supports_attention_backend:
        reason = f"{type(model).__name__} does not use transformers' attention interface"
    if reason is not None:
        raise ValueError(f"shared prompts are not possible: {reason}. Use separate rows (shared_prompt=False)")
    model.set_attn_implementation(NAME)
    _limit_last_feed_forward(model)


def _limit_last_feed_forward(model: PreTrainedModel) -> None:
    last: Any = next(m for m in model.base_model.children() if isinstance(m, nn.ModuleList))[-1]
    if not hasattr(last, "mlp") or "forward" in vars(last.mlp):
        return  # a family with another name for it, or a model that was switched before
    last.register_forward_pre_hook(_tell_what_is_read, with_kwargs=True)
    last.mlp.forward = MethodType(_feed_forward_where_read, last.mlp)


def _tell_what_is_read(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    # Decoder layers call their feed-forward without the plan. Recomputation for checkpointing comes through here too.
    plan = kwargs.get("prl_plan")
    layer.mlp.prl_read_N = None if plan is None else plan.read_N


def _feed_forward_where_read(self: Any, h_BSD: Tensor) -> Tensor:
    """The module's own forward at the tokens in `prl_read_N`, 0 elsewhere."""
    if self.prl_read_N is None:
        return type(self).forward(self, h_BSD)
    h_1ND = h_BSD.flatten(0, 1).index_select(0, self.prl_read_N)[None]
    o_ND = type(self).forward(self, h_1ND)[0]
    return torch.zeros_like(h_BSD).flatten(0, 1).index_copy(0, self.prl_read_N, o_ND).view_as(h_BSD)


def decode(model: PreTrainedModel, layout: Layout, plan: Plan | None) -> Tensor:
    """h_BSD: last hidden states of all packed tokens."""
    input_ids_BS = torch.from_numpy(layout.input_ids_BS).to(model.device)
    if layout.kind == "separate":
        # Padding is numbered on: it is never seen, and transformers takes a restart for a packed row and builds a mask.
        position_ids_BS = torch.arange(layout.shape[1], device=model.device)[None]
    else:
        position_ids_BS = torch.from_numpy(layout.position_ids_BS).to(model.device)
    return run_decoder(model, input_ids_BS, position_ids_BS, plan)


def run_decoder(model: PreTrainedModel, input_ids_BS: Tensor, position_ids_BS: Tensor, plan: Any) -> Tensor:
    """h_BSD of a decoder whose attention gets `plan` (an object with `attend`)."""
    if model.training:
        check_no_dropout(model)
    extra = {} if plan is None else {"prl_plan": plan}
    return model.base_model(
        input_ids=input_ids_BS, position_ids=position_ids_BS, use_cache=False, **extra
    ).last_hidden_state


def check_no_dropout(model: nn.Module) -> None:
    """Raises ValueError naming a module with dropout."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                f"{name} has dropout {module.p} in training mode: call attention.hf.disable_dropout(model)"
            )


def logprobs(
    model: PreTrainedModel, layout: Layout, temperature: float = 1.0, chunk: int = CHUNK, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs of every response token and entropies of the distributions they were drawn from.

    Args:
        temperature: logits are divided by it, as in sampling.
        chunk: response tokens whose logits exist at once, in the backward too.

    Returns:
        logprob_T (differentiable) and entropy_T (detached), in nats, float32 at least, in the order of the layout's
        target arrays.

    Raises:
        ValueError: see `hidden_states`.
    """
    h_TD = hidden_states(model, layout, kernel)
    return token_logprobs(model, h_TD, torch.from_numpy(layout.target_ids_T).to(h_TD.device), temperature, chunk)


def token_logprobs(
    model: PreTrainedModel, h_TD: Tensor, target_T: Tensor, temperature: float = 1.0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """logprob_T and entropy_T from the hidden states that predict each target."""
    head = _head(model)

    def of_chunk(h_CD: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = head(h_CD)
        logits_CV = logits_CV.float() if logits_CV.dtype.itemsize < 4 else logits_CV
        logprob_CV = (logits_CV / temperature).log_softmax(-1)
        with torch.no_grad():
            entropy_C = -(logprob_CV.exp() * logprob_CV).sum(-1)
        return logprob_CV.gather(-1, target_C[:, None])[:, 0], entropy_C

    if len(target_T) <= chunk:
        return of_chunk(h_TD, target_T)
    parts = [
        checkpoint(of_chunk, h_CD, target_C, use_reentrant=False, preserve_rng_state=False)
        for h_CD, target_C in zip(h_TD.split(chunk), target_T.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _head(model: PreTrainedModel):
    """Function h_TD -> logits_TV, with what some families do to logits after the matrix."""
    config = model.config.get_text_config()
    for name in ("logit_scale", "logits_scaling"):
        if getattr(config, name, None):
            raise ValueError(f"{config.model_type} scales its logits ({name}), which is not supported")
    head, cap = model.get_output_embeddings(), getattr(config, "final_logit_softcapping", None)
    return head if cap is None else lambda h_TD: cap * torch.tanh(head(h_TD) / cap)
