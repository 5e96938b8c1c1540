"""Fixtures for tests on tiny real models, and the check that no process and no shared memory is left behind."""

from __future__ import annotations

import os

# Before torch is imported: one thread computes the same bits everywhere, and leaves cores to the background processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_runs import ROWS, SMALL, digit_share

from prl_notebook import Session, Trainer

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with the bundled model's tokenizer, as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from prl_notebook.tasks.make_tiny import build_tokenizer

    folder = tmp_path_factory.mktemp("small_model")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def no_orphans() -> Iterator[None]:
    """Every process and every shared-memory file that the test made is gone when it ends."""
    before_processes = {p.pid for p in psutil.Process().children(recursive=True)}
    before_files = set(SHARED_MEMORY.glob("prl-*"))
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before_processes]
        left = [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
        files = set(SHARED_MEMORY.glob("prl-*")) - before_files
        if not left and not files:
            return
        time.sleep(0.1)
    pytest.fail(f"left behind: processes {left}, files {files}")


@pytest.fixture
def make_session(small_model: Path, tmp_path: Path, no_orphans: None) -> Iterator[Callable[..., Session]]:
    """Makes sessions on the small model that are closed at the end of the test."""
    sessions: list[Session] = []

    def make(**arguments: Any) -> Session:
        defaults: dict[str, Any] = {
            "model": small_model,
            "dataset": ROWS,
            "reward_funcs": digit_share,
            "grpo": SMALL,
            "trainer": Trainer(tokens_per_microstep=128),
            "run_dir": tmp_path / f"run{len(sessions)}",
        }
        sessions.append(Session(**(defaults | arguments)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()
