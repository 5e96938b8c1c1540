"""A group larger than one micro-step: its prompt once forward, its responses in parts, its prompt once backward.

The prompt's keys and values of every layer, and the hidden state that predicts the first response tokens, become leaves
that the parts' backward passes add their gradients to; one backward pass then carries the sums through the prompt. The
gradient is that of the whole group in one pass, and no pass is repeated or kept with retain_graph. Besides the prompt,
one part is alive at a time. Responses go through the pieces of kernels/split.py on every device.

Shapes: P prompt tokens, N response tokens of one part, H query heads, G key/value heads, D hidden or head size,
T response tokens (T = N). read_N: the tokens whose last hidden state is read (Plan.read_N).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prl_notebook.attention import hf
from prl_notebook.attention.kernels import causal, split
from prl_notebook.attention.layout import GroupLike, Layout
from prl_notebook.attention.layout import split as split_layouts

LossFn = Callable[[Tensor, Tensor, Layout], Tensor]
"""(logprob_T, entropy_T, layout of the part) -> scalar loss sum"""


def split_group_backward(
    model: PreTrainedModel,
    group: GroupLike,
    loss_fn: LossFn,
    budget: int,
    temperature: float = 1.0,
    chunk: int = hf.CHUNK,
) -> Tensor:
    """Add the gradient of one group's loss to the model, the prompt plus a part of at most `budget` tokens at a time.

    Args:
        loss_fn: called once per part, in the order of the completions; its values are summed.
        temperature, chunk: see hf.logprobs.

    Returns:
        The summed loss, detached.

    Raises:
        ValueError: the model does not admit shared prompts, dropout is on, or checkpointing is reentrant.
    """
    layouts = split_layouts([group], budget, shared=True)
    block = layouts[0].blocks[0][0]
    prefix = Prefix(model, layouts[0].input_ids_BS[0, : block.prompt_len])
    losses = []
    for layout in layouts:
        loss = loss_fn(*prefix.logprobs(layout, temperature, chunk), layout)
        loss.backward()
        losses.append(loss.detach())
    prefix.backward()
    return torch.stack(losses).sum()


class Prefix:
    """A prompt that has gone through a model once. Under torch.no_grad it serves the old policy and the reference."""

    def __init__(self, model: PreTrainedModel, prompt_ids: np.ndarray) -> None:
        hf.use_layouts(model)
        self._model, self._prompt_ids = model, np.asarray(prompt_ids, np.int64)
        ids_1P = torch.from_numpy(self._prompt_ids).to(model.device)[None]
        positions_1P = torch.arange(ids_1P.shape[1], device=model.device)[None]
        capture = _Capture(read_N=positions_1P[0, -1:])
        h_1PD = hf.run_decoder(model, ids_1P, positions_1P, capture)
        keys_values = [x for layer in sorted(capture.seen) for x in capture.seen[layer]]
        if h_1PD.requires_grad and len(keys_values) > 2 and not keys_values[-1].requires_grad:
            raise ValueError(
                "activation checkpointing is reentrant, which hides the prompt's keys and values from autograd: call "
                'model.gradient_checkpointing_enable({"use_reentrant": False})'
            )
        self._outputs = [*keys_values, h_1PD[0, -1:]]
        self._leaves = [x.detach().requires_grad_(x.requires_grad) for x in self._outputs]
        self._cached = {
            layer: (self._leaves[2 * n], self._leaves[2 * n + 1]) for n, layer in enumerate(sorted(capture.seen))
        }

    def logprobs(self, layout: Layout, temperature: float = 1.0, chunk: int = hf.CHUNK) -> tuple[Tensor, Tensor]:
        """logprob_T and entropy_T of a layout with this prompt and some of its responses; see hf.logprobs."""
        P = len(self._prompt_ids)
        blocks = list(layout.iter_blocks())
        if len(blocks) != 1 or not np.array_equal(layout.input_ids_BS[0, : blocks[0][1].prompt_len], self._prompt_ids):
            raise ValueError("the layout must hold responses to this prompt, and nothing else")
        device = self._model.device
        ids_1N, positions_1N = (
            torch.from_numpy(x[:, P:]).to(device) for x in (layout.input_ids_BS, layout.position_ids_BS)
        )
        h_1ND = hf.run_decoder(self._model, ids_1N, positions_1N, _Suffix(layout, device, self._cached))
        # Flat token P-1, the last of the prompt, is row 0.
        h_TD = torch.cat([self._leaves[-1], h_1ND[0]])[torch.from_numpy(layout.source_T - (P - 1)).to(device)]
        target_T = torch.from_numpy(layout.target_ids_T).to(device)
        return hf.token_logprobs(self._model, h_TD, target_T, temperature, chunk)

    def backward(self) -> None:
        """The prompt's backward pass with the gradients all parts have left; once, after the last part."""
        pairs = [
            (out, leaf.grad) for out, leaf in zip(self._outputs, self._leaves, strict=True) if leaf.grad is not None
        ]
        outputs, grads = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, grads)


class _Capture:
    """Stands in for a plan: causal attention over the prompt, keeping each layer's keys and values."""

    def __init__(self, read_N: Tensor) -> None:
        self.read_N = read_N
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float, layer: int) -> Tensor:
        # Checkpointing calls again in the backward; the first call's tensors are the ones in the graph.
        self.seen.setdefault(layer, (k_BGSD, v_BGSD))
        return causal.attend(q_BHSD, k_BGSD, v_BGSD, None, scale)


class _Suffix:
    """Stands in for a plan: responses against [prompt; themselves] with the prompt's keys and values given."""

    read_N = None

    def __init__(self, layout: Layout, device: torch.device, cached: dict[int, tuple[Tensor, Tensor]]) -> None:
        self._pieces, self._cached = split.prepare_responses(layout, device), cached

    def attend(self, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float, layer: int) -> Tensor:
        k_1GPD, v_1GPD = self._cached[layer]
        keys, values = torch.cat([k_1GPD, k_BGSD], 2), torch.cat([v_1GPD, v_BGSD], 2)
        return split.attend(q_BHSD, keys, values, self._pieces, scale)
