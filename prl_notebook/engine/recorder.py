"""Keeps what a period produced: completions with per-token numbers, for the session and, on disk, for replay."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from prl_notebook.engine.engine import PeriodRecord
from prl_notebook.engine.records import CompletionRecord, GroupRecord, completions_path, write_groups
from prl_notebook.engine.types import Group, Prompt
from prl_notebook.training.trainer import TokenDetail


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is needed here."""

    def decode(self, token_ids: list[int]) -> Any: ...


class Recorder:
    """Turns groups into records and writes them in a thread of its own, so that the engine does not wait."""

    def __init__(self, run_dir: Path, tokenizer: Tokenizer) -> None:
        self._run_dir, self._tokenizer = run_dir, tokenizer
        self._strings: dict[int, str] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._last: Future[None] | None = None

    def group(self, record: PeriodRecord, number: int, extras: dict[str, list[Any]] | None = None) -> GroupRecord:
        """One group of a period as far as it has come: numbers of the tri-model are there once it was trained."""
        group, prompt = record.groups[number], record.prompts[number]
        return self.scored(group, prompt, record.micro_step_of(number), record.details, extras or {})

    def scored(
        self,
        group: Group,
        prompt: Prompt,
        micro_step: int | None,
        details: dict[tuple[int, int], TokenDetail],
        extras: dict[str, list[Any]],
    ) -> GroupRecord:
        rewards = group.rewards_K if group.rewards_K is not None else np.full(len(group.completions), np.nan)
        advantages = group.advantages_K if group.advantages_K is not None else np.zeros(len(group.completions))
        completions = []
        for k, completion in enumerate(group.completions):
            detail = details.get((group.group, k))
            numbers = {"sampler": completion.logprobs_R}
            if detail:
                found = {
                    "policy": detail.policy_R,
                    "old": detail.old_R,
                    "reference": detail.reference_R,
                    "ratio": detail.ratio_R,
                    "kl": detail.kl_R,
                    "entropy": detail.entropy_R,
                    "loss": detail.loss_R,
                }
                numbers |= {name: values for name, values in found.items() if values is not None}
            ids = completion.ids_R.tolist()
            completions.append(
                CompletionRecord(
                    text=self._tokenizer.decode(ids),
                    ids=ids,
                    tokens=self._tokens(ids),
                    finish_reason=completion.finish_reason,
                    reward=_number(rewards[k]),
                    by_function={name: _number(v[k]) for name, v in group.rewards_by_function.items()},
                    advantage=float(advantages[k]),
                    extras={name: values[k] for name, values in extras.items()},
                    numbers=numbers,
                    mask=detail.mask_R if detail else None,
                )
            )
        prompt_ids = list(group.prompt_ids)
        return GroupRecord(
            period=group.period,
            group=group.group,
            version=group.version,
            worker=group.worker,
            micro_step=micro_step,
            prompt=self._tokenizer.decode(prompt_ids),
            prompt_ids=prompt_ids,
            prompt_tokens=self._tokens(prompt_ids),
            completions=completions,
        )

    def write(self, record: PeriodRecord, extras: dict[int, dict[str, list[Any]]]) -> None:
        """Write the period's completions, in the background; an error is raised by the next call or by `close`."""
        if self._last:
            self._last.result()
        self._last = self._writer.submit(self._write, record, extras)

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown()
        if self._last:
            self._last.result()

    def _write(self, record: PeriodRecord, extras: dict[int, dict[str, list[Any]]]) -> None:
        groups = [self.group(record, number, extras.get(number)) for number in sorted(record.groups)]
        write_groups(completions_path(self._run_dir, record.period), groups)

    def _tokens(self, ids: Sequence[int]) -> list[str]:
        for i in ids:
            if i not in self._strings:
                self._strings[i] = self._tokenizer.decode([i])
        return [self._strings[i] for i in ids]


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
