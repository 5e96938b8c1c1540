"""`prl bench trl`: completions per second of this engine and of TRL's GRPOTrainer, on the same two cores.

Same model (the bundled one), prompts, K = 8 completions of at most 64 tokens, AdamW and learning rate; prompts of about
16, 256 and 1,024 tokens (a few-shot preamble before the question). Each side as its users would tune it: TRL with all
cores and the faster of two micro-batch sizes, each in a process of its own; this engine with its defaults but the
faster of two numbers of groups in flight (few let the trainer start early, many make large batches).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from statistics import median
from typing import Any

from prl_notebook.bench.periods import measured
from prl_notebook.config import Rollout, Run
from prl_notebook.tasks.tiny import tiny_model_path, tiny_preset, tiny_rows

PREAMBLES = {16: 0, 256: 240, 1024: 1008}
"""prompt length -> tokens of the preamble"""
PROMPTS, K, R = 16, 8, 64
STEPS = 2
"""measured optimizer steps, after one that warms up"""
MICRO_BATCHES = (128, 32)
"""TRL's per_device_train_batch_size; the generation batch stays PROMPTS * K"""
GROUPS_IN_FLIGHT = (16, 2)
"""Rollout.groups_in_flight of this engine"""


def trl() -> dict[str, Any]:
    """{"points": [{P, R, K, ours, trl, ratio}]}: completions per second; ratio = ours / trl."""
    points = []
    print(f"{'P':>5} {'ours /s':>9} {'TRL /s':>9} {'ratio':>6}", file=sys.stderr)
    for length, preamble in PREAMBLES.items():
        ours = PROMPTS * K / min(_our_seconds(preamble, groups) for groups in GROUPS_IN_FLIGHT)
        theirs = PROMPTS * K / min(_trl_seconds(preamble, size) for size in MICRO_BATCHES)
        found = {"ours": round(ours, 1), "trl": round(theirs, 1), "ratio": round(ours / theirs, 2)}
        points.append({"P": length, "R": R, "K": K, **found})
        print(f"{length:5} {ours:9.1f} {theirs:9.1f} {ours / theirs:6.2f}", file=sys.stderr)
    return {"points": points}


def _our_seconds(preamble: int, groups_in_flight: int) -> float:
    """Median seconds of a period."""
    grpo = dataclasses.replace(tiny_preset().grpo, prompts_per_period=PROMPTS, num_generations=K)
    rows = tiny_rows(preamble_tokens=preamble)
    run, rollout = Run(checkpoint_every=0, record_tokens=False), Rollout(groups_in_flight=groups_in_flight)
    periods = measured(STEPS, "tiny", rows, _reward(), grpo=grpo, rollout=rollout, run=run)
    return median(m["step_time"] for m in periods)


def _trl_seconds(preamble: int, micro_batch: int) -> float:
    """Median seconds of a step of TRL's trainer, in a process of its own with all cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    command = [sys.executable, "-m", "prl_notebook.bench.trl", str(preamble), str(micro_batch)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _reward() -> Any:
    from prl_notebook.tasks.tiny import running_sum_reward

    return running_sum_reward


def _train_with_trl(preamble: int, micro_batch: int) -> float:
    import time

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    grpo = tiny_preset().grpo
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            str(tiny_model_path()),
            reward_funcs=_reward(),
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=PROMPTS * K // micro_batch,
                generation_batch_size=PROMPTS * K,
                num_generations=K,
                max_completion_length=R,
                learning_rate=grpo.learning_rate,
                adam_beta2=grpo.adam_beta2,
                max_steps=1 + STEPS,
                model_init_kwargs={"dtype": "float32"},
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(tiny_rows(preamble_tokens=preamble)),
            processing_class=AutoTokenizer.from_pretrained(tiny_model_path(), padding_side="left"),
            callbacks=[Clock()],
        )
        trainer.train()
    return median(b - a for a, b in pairwise(ends))


if __name__ == "__main__":
    print(json.dumps(_train_with_trl(int(sys.argv[1]), int(sys.argv[2]))))
