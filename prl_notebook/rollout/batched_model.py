"""A causal language model of transformers as the rollout worker needs it: prompts go in, rows of mixed lengths advance.

Everything goes through the model's own forward pass, so it serves any architecture whose layers are attention over a
key-value cache. Whether a model is one is checked once, by comparing with plain forward passes. Recurrent and hybrid
layers, encoder-decoder models and images are refused.

Shapes: B rows of one call, V vocabulary, P prompt length, T positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from prl_notebook.rollout.cache import ATTENTION, RowCache, decode_mask

BLOCK = 64
"""Rows per call with `fixed_shapes`: fewer means more calls for a full batch, more means idle rows for a small one."""
READ_STEP = 32
"""Positions read are rounded up to a multiple of it with `fixed_shapes`: a whole number of vector registers, so that
masked positions at the end add zeros to every partial sum and change nothing."""


class BatchedModel:
    """Prefill and batched decoding over a `RowCache`.

    Args:
        model: In evaluation mode, on its device.
        fixed_shapes: Make a row's logits independent, bit for bit, of the other rows. Kernels choose their order of
            summation by shape, and compute each row alike within one shape; so every prompt is prefilled by itself,
            and decoding always takes `BLOCK` rows (idle ones included) and a multiple of `READ_STEP` positions.

    Raises:
        NotImplementedError: naming the model if it does not work with this cache, or if `fixed_shapes` does not make
            its rows independent (mixtures of experts regroup tokens, for one).
    """

    def __init__(self, model: PreTrainedModel, *, fixed_shapes: bool = False):
        self.model = model
        self.fixed_shapes = fixed_shapes
        self.cache = RowCache()
        self._windows = _attention_windows(model)
        if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
            model.set_attn_implementation(ATTENTION)
        self._check_against_plain_forward()
        if fixed_shapes:
            self._check_rows_independent()
        self.reset()

    @property
    def context(self) -> int | None:
        """Most positions the model was made for, None if it does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def reset(self) -> None:
        """Forget all rows (and their memory)."""
        self.cache = RowCache()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, DynamicCache]:
        """Logits [B, V] after each prompt, and a cache to `join` rows from.

        Prompts of different lengths are padded on the right, where causal attention hides the padding by itself.
        With `fixed_shapes` only one prompt is allowed.
        """
        if self.fixed_shapes and len(prompts) != 1:
            raise ValueError(f"fixed_shapes prefills one prompt at a time, got {len(prompts)}")
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids_BP = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids_BP[row, : len(prompt)] = torch.tensor(prompt)
        last, last_B = (lengths - 1).unique(return_inverse=True)
        device = self.model.device
        cache = DynamicCache()
        logits = self.model(
            input_ids=ids_BP.to(device),
            position_ids=torch.arange(ids_BP.shape[1], device=device).expand(ids_BP.shape),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last.to(device),
        ).logits
        return logits[torch.arange(len(prompts)), last_B], cache

    @torch.inference_mode()
    def join(self, first: int, count: int, prefilled: DynamicCache, index: int, length: int) -> None:
        """Make rows `first` .. `first + count - 1` continue prompt `index` of a prefill, `length` tokens long."""
        self.cache.join(first, count, prefilled, index, length)

    @torch.inference_mode()
    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Let rows take the place of others, up to `length` positions."""
        self.cache.move(sources, targets, length)

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Feed one token to each of the rows 0 .. B-1, at its position; logits [B, V]."""
        rows, length = len(ids), max(positions) + 1
        if not self.fixed_shapes:
            return self._decode_block(0, ids, positions, length)
        length = -(-length // READ_STEP) * READ_STEP
        idle = [0] * (-rows % BLOCK)
        ids, positions = [*ids, *idle], [*positions, *idle]
        blocks = [
            self._decode_block(first, ids[first : first + BLOCK], positions[first : first + BLOCK], length)
            for first in range(0, rows, BLOCK)
        ]
        return torch.cat(blocks)[:rows]

    def _decode_block(self, first: int, ids: Sequence[int], positions: Sequence[int], length: int) -> torch.Tensor:
        device, dtype = self.model.device, self.model.dtype
        positions_B = torch.tensor(positions, device=device)
        self.cache.select(first, positions_B, length)
        masks = {kind: decode_mask(positions_B, length, window, dtype) for kind, window in self._windows.items()}
        return self.model(
            input_ids=torch.tensor(ids, device=device)[:, None],
            position_ids=positions_B[:, None],
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _probe(self, length: int) -> list[int]:
        vocabulary = self.model.config.get_text_config().vocab_size
        return [(5 * position + 3 * length) % vocabulary for position in range(length)]

    def _join_probe(self, first: int, count: int, length: int) -> None:
        """Rows that hold all tokens of a probe but its last."""
        self.join(first, count, self.prefill([self._probe(length)[:-1]])[1], 0, length - 1)

    @torch.inference_mode()
    def _check_against_plain_forward(self) -> None:
        lengths = (4, 7)
        for row, n in enumerate(lengths):
            self._join_probe(row, 1, n)
        batched_BV = self.decode([self._probe(n)[-1] for n in lengths], [n - 1 for n in lengths])
        for n, logits_V in zip(lengths, batched_BV, strict=True):
            ids = torch.tensor([self._probe(n)], device=self.model.device)
            plain_V = self.model(input_ids=ids, use_cache=False).logits[0, -1]
            error = (logits_V - plain_V).abs().max().item() / max(1.0, plain_V.abs().max().item())
            # Written so that NaN fails too.
            if not error <= torch.finfo(self.model.dtype).eps ** 0.5:
                raise NotImplementedError(
                    f"{type(self.model).__name__} (model_type {self.model.config.model_type!r}) gives other logits "
                    f"in a batch of mixed lengths than alone (relative error {error:.1g}); use engine='vllm'"
                )

    def _check_rows_independent(self) -> None:
        short, long = self._probe(5), self._probe(2 * READ_STEP + 2)
        self._join_probe(0, 1, len(short))
        alone_V = self.decode(short[-1:], [len(short) - 1])[0]
        # The same row again: last instead of first of its block, beside others, and with more positions read.
        others = BLOCK - 1
        self._join_probe(0, others, len(long))
        self._join_probe(others, 1, len(short))
        company_BV = self.decode(long[-1:] * others + short[-1:], [len(long) - 1] * others + [len(short) - 1])
        company_V = company_BV[-1]
        if not torch.equal(alone_V, company_V):
            raise NotImplementedError(
                f"reproducible=True: a row of {type(self.model).__name__} depends on the other rows of its batch on "
                f"device {self.model.device.type!r}; use reproducible=False"
            )


def _attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Window of each kind of attention layer the model has (None: all positions).

    Raises:
        NotImplementedError: for models with layers of other kinds.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    uniform = "sliding_attention" if window else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [uniform])
    known = {"full_attention": None, "sliding_attention": window}
    if other := kinds - known.keys():
        refused = f"layers of type {sorted(other)[0]!r}"
    elif model.config.is_encoder_decoder:
        refused = "an encoder"
    elif model._is_stateful:
        refused = "recurrent layers"
    elif "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False):
        refused = "positions that cannot be given per row"
    else:
        return {kind: known[kind] for kind in kinds}
    raise NotImplementedError(
        f"{type(model).__name__} (model_type {model.config.model_type!r}) has {refused}; engine='transformers' batches "
        "models of full and sliding-window attention only, use engine='vllm'"
    )
