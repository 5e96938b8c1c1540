"""Rollout worker on any attention-based causal language model of transformers: continuous batching of many groups.

A prompt is prefilled once for its K completions; a finished row leaves the batch at once, a finished group is
reported at once, and a newly submitted group joins the running batch at the next step. Left out: paged key-value
memory, prefix sharing between prompts, speculative decoding and quantisation; vLLM has them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from prl_notebook.engine.types import Completion, FinishReason, GroupRequest, Sampling, WeightsRef
from prl_notebook.rollout.batched_model import BatchedModel
from prl_notebook.rollout.in_flight import GroupInFlight, check_fits, group_name
from prl_notebook.rollout.sampling import sample, uniforms
from prl_notebook.rollout.worker import LoadAck, WorkerEvent
from prl_notebook.weights import checksum, load_weights, named_weights, open_version

PREFILL_TOKENS = 4096
"""Prompt tokens (padding included) computed per step at most, unless a single prompt is longer: running rows wait."""


@dataclass
class _Row:
    """One completion being sampled."""

    group: GroupInFlight
    sample: int
    uniforms_R: np.ndarray
    """float32, one draw per token up to the longest completion allowed."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the token sampled last stands in the sequence."""
        return len(self.group.request.prompt_ids) + len(self.ids) - 1


class TransformersWorker:
    """A `RolloutWorker` over a model folder (or hub name) of transformers.

    By default a completion is an exact sample of the policy with a random stream of its own, but its bits depend on
    its company: kernels sum in an order that depends on how many rows and positions they are given, hence on arrival
    times, and a draw that falls within that rounding error of the boundary between two tokens picks the other one.
    Measured in float32 on a CPU (groups of 8 alone against 16 groups at once, bundled model and random weights, 3,280
    completions of 94,000 tokens): a quarter of the log-probs differ, by 1e-5 at most, and no token does; nor does one
    between the default and `reproducible`, in 7,200 completions of 190,000 tokens. Larger vocabularies and bfloat16
    make it more frequent.

    Args:
        model_path: Folder or hub name; its generation config says which tokens end a completion.
        dtype: Of the parameters, as torch spells it.
        device: torch device.
        reproducible: A group's tokens and log-probs depend on its seeds, its prompt, the sampling parameters and the
            weights alone, bit for bit: not on what else is in flight, on when it joined or which worker serves it.
            See `BatchedModel(fixed_shapes=True)`. Workers need the same kind of machine and number of threads.
        max_rows: Completions sampled at once; groups that do not fit wait their turn.

    Raises:
        NotImplementedError: naming the model if it cannot be batched this way.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        reproducible: bool = False,
        max_rows: int = 256,
    ):
        model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype))
        model.to(device).eval()
        self.max_rows = max_rows
        self.version: int | None = None
        """The policy version loaded, None before the first `load`."""
        self._model = BatchedModel(model, fixed_shapes=reproducible)
        end = model.generation_config.eos_token_id
        self._end_ids = frozenset([] if end is None else [end] if isinstance(end, int) else end)
        self._waiting: deque[GroupInFlight] = deque()
        self._rows: list[_Row] = []
        """The row of each slot of the batch."""

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._rows)

    def load(self, ref: WeightsRef) -> LoadAck:
        """Load a published version, drop every cache computed under the old one, and acknowledge.

        Raises:
            RuntimeError: if groups are still in flight.
            WeightsMismatch: if the file is not the version asked for or does not fit the model.
        """
        start = time.perf_counter()
        if self.has_work:
            raise RuntimeError(
                f"load(version {ref.version}): {len(self._waiting)} groups wait and {len(self._rows)} completions are "
                f"being sampled under version {self.version}; let them finish or abort() first"
            )
        self._model.reset()
        load_weights(self._model.model, open_version(ref))
        self.version = ref.version
        digest = checksum(named_weights(self._model.model))
        return LoadAck(ref.version, digest, time.perf_counter() - start)

    def submit(self, request: GroupRequest) -> None:
        """Take a group into the batch at the next step that has room for its K rows.

        Raises:
            ValueError: if the version is not the one loaded, or the group cannot fit the model or the batch.
        """
        check_fits(request, self.version, self._model.context)
        if not 0 < len(request.seeds) <= self.max_rows:
            raise ValueError(
                f"{group_name(request)} wants {len(request.seeds)} completions; max_rows={self.max_rows} is the most"
            )
        self._waiting.append(GroupInFlight(request))

    def step(self) -> list[WorkerEvent]:
        """Prefill waiting groups that fit, then sample one token for every row in flight."""
        events = self._admit() if self._waiting else []
        if self._rows:
            logits_BV = self._model.decode([row.ids[-1] for row in self._rows], [row.position for row in self._rows])
            events += self._extend(self._rows, logits_BV)
        return events

    def abort(self) -> None:
        """Drop all groups, waiting or in flight; they are not reported."""
        self._waiting.clear()
        self._rows.clear()

    def close(self) -> None:
        """Drop all groups and free the key-value cache; the model goes with the worker."""
        self.abort()
        self._model.reset()

    def _admit(self) -> list[WorkerEvent]:
        events: list[WorkerEvent] = []
        budget = PREFILL_TOKENS
        while joining := self._next_to_prefill(budget):
            prompts = [group.request.prompt_ids for group in joining]
            budget -= len(prompts) * max(map(len, prompts))
            logits_BV, prefilled = self._model.prefill(prompts)
            rows: list[_Row] = []
            for index, group in enumerate(joining):
                seeds, limit = group.request.seeds, group.request.sampling.max_completion_length
                first = len(self._rows) + len(rows)
                self._model.join(first, len(seeds), prefilled, index, len(prompts[index]))
                rows += [_Row(group, sample, uniforms(seed, limit)) for sample, seed in enumerate(seeds)]
            self._rows += rows
            repeats = torch.tensor([len(group.request.seeds) for group in joining], device=logits_BV.device)
            events += self._extend(rows, logits_BV.repeat_interleave(repeats, 0))
        return events

    def _next_to_prefill(self, budget: int) -> list[GroupInFlight]:
        """Take the groups of the next prefill off the queue, in order: as many as budget, rows and shapes allow."""
        taken: list[GroupInFlight] = []
        free = self.max_rows - len(self._rows)
        longest = 0
        while self._waiting:
            request = self._waiting[0].request
            longest = max(longest, len(request.prompt_ids))
            over_budget = (len(taken) + 1) * longest > budget and (taken or budget < PREFILL_TOKENS)
            alone = taken and self._model.fixed_shapes
            if over_budget or alone or len(request.seeds) > free:
                break
            free -= len(request.seeds)
            taken.append(self._waiting.popleft())
        return taken

    def _extend(self, rows: Sequence[_Row], logits_BV: torch.Tensor) -> list[WorkerEvent]:
        """Sample the next token of each row; retire the rows that end with it."""
        by_sampling: dict[Sampling, list[int]] = {}
        for index, row in enumerate(rows):
            by_sampling.setdefault(row.group.request.sampling, []).append(index)
        ended: list[_Row] = []
        for sampling, indices in by_sampling.items():
            chosen = [rows[index] for index in indices]
            uniforms_B = torch.tensor([row.uniforms_R[len(row.ids)] for row in chosen], device=logits_BV.device)
            ids_B, logprobs_B = sample(
                logits_BV if len(chosen) == len(rows) else logits_BV[indices], uniforms_B, sampling
            )
            for row, token, logprob in zip(chosen, ids_B.tolist(), logprobs_B.tolist(), strict=True):
                row.ids.append(token)
                row.logprobs.append(logprob)
                row.group.tokens += 1
                if token in self._end_ids or len(row.ids) == sampling.max_completion_length:
                    ended.append(row)
        return self._retire(ended) if ended else []

    def _retire(self, ended: list[_Row]) -> list[WorkerEvent]:
        self._close_holes({id(row) for row in ended})
        events: list[WorkerEvent] = []
        for row in ended:
            reason: FinishReason = "stop" if row.ids[-1] in self._end_ids else "length"
            ids_R, logprobs_R = np.array(row.ids, np.int32), np.array(row.logprobs, np.float32)
            events += row.group.finish(row.sample, Completion(ids_R, logprobs_R, reason))
        return events

    def _close_holes(self, ended: set[int]) -> None:
        """Let the last rows of the batch take the slots of those that ended, so that live rows stay contiguous."""
        live = [slot for slot, row in enumerate(self._rows) if id(row) not in ended]
        count = len(live)
        sources = [slot for slot in live if slot >= count]
        targets = [slot for slot in range(count) if id(self._rows[slot]) in ended]
        if sources:
            self._model.move(sources, targets, max(self._rows[slot].position for slot in sources))
        for source, target in zip(sources, targets, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[count:]
