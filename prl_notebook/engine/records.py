"""What is kept of every completion: one parquet file a period, in TRL's completions table plus per-token numbers.

The same `GroupRecord` serves the live session and the replay of a finished run: token strings are stored, so that a
replay needs no tokenizer. R = tokens of one completion, P = tokens of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUMBERS = ("sampler", "policy", "old", "reference", "ratio", "kl", "entropy", "loss")
"""Per-token columns: log-probs under sampler, policy, old policy and reference; importance ratio; KL; entropy; the
token's term of the loss's sum, before the period's normaliser."""


@dataclass
class CompletionRecord:
    """One completion with all that is known about it."""

    text: str
    ids: list[int]
    tokens: list[str]
    """token strings [R]"""
    finish_reason: str
    reward: float | None
    by_function: dict[str, float | None]
    advantage: float
    extras: dict[str, Any] = field(default_factory=dict)
    """columns from log_extra"""
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 [R] each; names in NUMBERS, absent where not computed (reference and kl when beta is 0)"""
    mask: np.ndarray | None = None
    """bool [R]; False where a token is left out of the loss"""


@dataclass
class GroupRecord:
    """The K completions of one prompt."""

    period: int
    group: int
    version: int
    worker: int
    micro_step: int | None
    prompt: str
    """prompt text as the model saw it, special tokens included"""
    prompt_ids: list[int]
    prompt_tokens: list[str]
    """token strings [P]"""
    completions: list[CompletionRecord]


RESERVED = (
    *("step", "prompt", "completion", "advantage", "total_reward", "group", "sample", "version", "worker"),
    *("micro_step", "finish_reason", "prompt_ids", "prompt_tokens", "completion_ids", "completion_tokens", "mask"),
    *(f"token_{name}" for name in NUMBERS),
)
"""Columns of the table itself; a reward function or extra column of such a name gets an underscore behind it."""


def completions_path(run_dir: Path, period: int) -> Path:
    """Where the completions of a period lie; TRL's naming, counted from 0 as periods are."""
    return run_dir / "completions" / f"completions_{period:05d}.parquet"


def write_groups(path: Path, groups: list[GroupRecord]) -> None:
    """One row per completion. Reward and extra columns carry their own names, as in TRL."""
    rows = []
    for group in groups:
        for k, c in enumerate(group.completions):
            row: dict[str, Any] = {
                "step": group.period,
                "prompt": group.prompt,
                "completion": c.text,
                **{_column(name): value for name, value in c.by_function.items()},
                **{_column(name): value for name, value in c.extras.items()},
                "advantage": c.advantage,
                "total_reward": c.reward,
                "group": group.group,
                "sample": k,
                "version": group.version,
                "worker": group.worker,
                "micro_step": group.micro_step,
                "finish_reason": c.finish_reason,
                "prompt_ids": group.prompt_ids,
                "prompt_tokens": group.prompt_tokens,
                "completion_ids": c.ids,
                "completion_tokens": c.tokens,
                "mask": None if c.mask is None else c.mask.tolist(),
            }
            row |= {f"token_{n}": c.numbers[n].tolist() if n in c.numbers else None for n in NUMBERS}
            rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    functions = sorted({name for g in groups for c in g.completions for name in c.by_function})
    extras = sorted({name for g in groups for c in g.completions for name in c.extras})
    table = pa.Table.from_pylist(rows).replace_schema_metadata(
        {"reward_functions": "\n".join(functions), "extras": "\n".join(extras)}
    )
    part = path.with_suffix(".part")
    pq.write_table(table, part)
    part.rename(path)


def read_groups(path: Path) -> list[GroupRecord]:
    """Inverse of `write_groups`."""
    table = pq.read_table(path)
    names = {k.decode(): v.decode().split("\n") if v else [] for k, v in (table.schema.metadata or {}).items()}
    groups: dict[int, GroupRecord] = {}
    for row in table.to_pylist():
        group = groups.setdefault(
            row["group"],
            GroupRecord(
                row["step"],
                row["group"],
                row["version"],
                row["worker"],
                row["micro_step"],
                row["prompt"],
                row["prompt_ids"],
                row["prompt_tokens"],
                [],
            ),
        )
        group.completions.append(
            CompletionRecord(
                row["completion"],
                row["completion_ids"],
                row["completion_tokens"],
                row["finish_reason"],
                row["total_reward"],
                {name: row[_column(name)] for name in names["reward_functions"]},
                row["advantage"],
                {name: row[_column(name)] for name in names["extras"]},
                {n: np.asarray(row[f"token_{n}"], np.float32) for n in NUMBERS if row.get(f"token_{n}") is not None},
                None if row["mask"] is None else np.asarray(row["mask"], bool),
            )
        )
    return [groups[g] for g in sorted(groups)]


def _column(name: str) -> str:
    return f"{name}_" if name in RESERVED else name
