"""`prl bench trainer`: tokens per second of the training engines on two cores, and what publishing weights takes.

One random Qwen3 of 16M parameters and one period of groups with shared prompts. `torch` and `megatron tp1` are one
process with two threads, the parallel ones two processes with one thread each. The engines take turns and the
fastest round of each counts, since other load can only slow one down. Left out on purpose: starting up, and models
that need several devices.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from prl_notebook.config import GRPO, Config, Trainer
from prl_notebook.engine.trainer_group import TrainerGroup
from prl_notebook.engine.types import Completion, Group
from prl_notebook.runtime.device import plan_devices
from prl_notebook.runtime.launch import Launcher
from prl_notebook.runtime.local import LocalRuntime
from prl_notebook.runtime.shared_memory import session_directory

ENGINES: dict[str, dict[str, Any]] = {
    "torch": {"engine": "torch", "threads": 2},
    "megatron tp1": {"engine": "megatron", "threads": 2},
    "megatron tp2": {"engine": "megatron", "tensor_parallel": 2, "threads": 1},
    "megatron pp2": {"engine": "megatron", "pipeline_parallel": 2, "threads": 1},
    "megatron dp2": {"engine": "megatron", "data_parallel": 2, "threads": 1},
}
PROMPTS, COMPLETIONS, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 8, 128, 48
VOCABULARY = 4096
ROUNDS = 5
"""measured periods of each engine, after one that warms up"""


def trainer() -> dict[str, Any]:
    """{engine: {"tokens_per_s", "publish_s", "over_torch"}}; tokens are those that a pass computes."""
    grpo = GRPO(
        prompts_per_period=PROMPTS,
        num_generations=COMPLETIONS,
        max_completion_length=COMPLETION_TOKENS,
        lr_scheduler_type="constant",
    )
    seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
    publish: dict[str, list[float]] = {name: [] for name in ENGINES}
    with tempfile.TemporaryDirectory() as folder:
        model = _save_model(Path(folder) / "model")
        shared = session_directory(f"bench-{os.getpid()}")
        runtimes: list[LocalRuntime] = []
        groups: dict[str, TrainerGroup] = {}
        try:
            for name, options in ENGINES.items():
                config = Config(grpo, trainer=Trainer(tokens_per_microstep=1024, shared_prompt=True, **options))
                (shared / name).mkdir()
                runtimes.append(LocalRuntime(Path(folder) / name, shared / name))
                plan = plan_devices("cpu", config.rollout, config.trainer)
                groups[name] = TrainerGroup(Launcher(runtimes[-1], config, plan, str(model)).trainer())
            for group in groups.values():
                group.wait_ready()
            for period in range(1 + ROUNDS):
                for name, group in groups.items():
                    trained, published = _period(group, period, shared / name)
                    if period:
                        seconds[name].append(trained)
                        publish[name].append(published)
        finally:
            for runtime in runtimes:
                runtime.close()
            shutil.rmtree(shared)
    tokens = sum(group.tokens(shared_prompt=True) for group in _groups(0))
    return _table({name: tokens / min(s) for name, s in seconds.items()}, {n: min(s) for n, s in publish.items()})


def _period(group: TrainerGroup, period: int, directory: Path) -> tuple[float, float]:
    """Seconds of (one period's training, publishing the result)."""
    data = _groups(period)
    started = time.perf_counter()
    group.call("begin_period", period, period, PROMPTS)
    group.call("accumulate", data)
    group.call("finish_update")
    trained = time.perf_counter()
    group.call("publish", str(directory))
    return trained - started, time.perf_counter() - trained


def _table(speeds: dict[str, float], publish: dict[str, float]) -> dict[str, Any]:
    print(f"{'engine':14} {'tokens/s':>9} {'x torch':>8} {'publish s':>10}", file=sys.stderr)
    for name, speed in speeds.items():
        print(f"{name:14} {speed:9.0f} {speed / speeds['torch']:8.2f} {publish[name]:10.3f}", file=sys.stderr)
    return {
        name: {
            "tokens_per_s": round(speed),
            "publish_s": round(publish[name], 3),
            "over_torch": round(speed / speeds["torch"], 3),
        }
        for name, speed in speeds.items()
    }


def _groups(period: int) -> list[Group]:
    rng = np.random.default_rng(period)
    groups = []
    for index in range(PROMPTS):
        completions = [
            Completion(
                rng.integers(0, VOCABULARY, COMPLETION_TOKENS).astype(np.int32),
                np.full(COMPLETION_TOKENS, -np.log(VOCABULARY), np.float32),
                "length",
            )
            for _ in range(COMPLETIONS)
        ]
        prompt = tuple(rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist())
        groups.append(Group(period, index, period, prompt, completions, advantages_K=rng.normal(size=COMPLETIONS)))
    return groups


def _save_model(folder: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=48,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
