"""What the tests of whole runs share: a small task, its reward, and how to compare runs."""

from __future__ import annotations

import os
from typing import Any

import pytest

from prl_notebook import GRPO, Session
from prl_notebook.engine import events as ev


def required(condition: bool, reason: str) -> None:
    """Skip when a part is missing, or fail where everything must be there (PRL_REQUIRE_ALL=1, as in CI)."""
    if not condition:
        if os.environ.get("PRL_REQUIRE_ALL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


def digit_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward with spread on random text: share of tokens with a small id (digits and punctuation)."""
    return [sum(i < 40 for i in ids) / len(ids) for ids in completion_ids]


ROWS = [{"prompt": f"{a}+{b}="} for a in range(1, 9) for b in range(1, 9)]
SMALL = GRPO(
    prompts_per_period=4,
    num_generations=4,
    max_completion_length=12,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    seed=7,
)


def final_weights(session: Session) -> bytes:
    """Bytes of the policy in the session's newest checkpoint; closes the session."""
    session.close()
    newest = sorted((session.run_dir / "checkpoints").glob("v*"))[-1]
    return (newest / "policy" / "model.safetensors").read_bytes()


def events_of(session: Session, kind: type[ev.Event]) -> list[Any]:
    """Events of one kind, in order."""
    return [e for e in ev.read_events(session.run_dir / "events.jsonl") if isinstance(e, kind)]
