"""`prl bench shared-prompt`: one group's forward and backward with separate rows and with its prompt computed once.

One thread, one model (Qwen3-shaped, 3.3 million parameters), float32. Separate rows go through transformers' own
scaled-dot-product attention, unpadded, with logits at response positions only, so the ratio shows the shared prompt
and nothing else. Runs of both sides alternate and the fastest of each counts; time is the process's CPU time, which on
one thread is wall time without the neighbours' share. Peak memory is what a forked child's resident set grows by in
one forward and backward. Optimizer and data are left out there; `end_to_end` has them: whole periods of the bundled
model behind a preamble of 512 tokens.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from prl_notebook.attention.costs import ModelDims, flop_ratio
from prl_notebook.attention.hf import logprobs
from prl_notebook.attention.layout import Layout, pack
from prl_notebook.bench.periods import measured
from prl_notebook.config import Run, Trainer
from prl_notebook.tasks.tiny import running_sum_reward, tiny_preset, tiny_rows

POINTS = ((64, 64, 8), (256, 64, 8), (512, 64, 8), (1024, 64, 8), (1024, 64, 16), (2048, 32, 16), (256, 512, 8))
"""(prompt tokens P, completion tokens R, completions K)"""
RUNS_AT_LEAST, SECONDS_PER_POINT = 2, 5.0
PREAMBLE, END_TO_END_PROMPTS = 512, 16


def shared_prompt(points: Sequence[tuple[int, int, int]] = POINTS) -> dict[str, Any]:
    """Measure every (P, R, K).

    Returns:
        {"points": [{P, R, K, ratio, flop_ratio, peak_bytes_separate, peak_bytes_shared}], "end_to_end": {preamble,
        separate, shared, ratio}}; a point's ratio is time of separate rows over time with the shared prompt, flop_ratio
        the same of the operations needed. End to end it is the trainer's completion tokens per second.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # All memory first: a child inherits what its parent's allocator holds on to.
        groups = [_group(*point) for point in points]
        peaks = [[_in_child(_peak_bytes, group, shared) for shared in (False, True)] for group in groups]
        print("    P    R   K  ratio  of FLOPs  peak MiB separate  shared", file=sys.stderr)
        found = [_point(*each) for each in zip(points, groups, peaks, strict=True)]
    finally:
        torch.set_num_threads(threads)
    return {"points": found, "end_to_end": _end_to_end()}


def _end_to_end() -> dict[str, float]:
    grpo = dataclasses.replace(tiny_preset().grpo, prompts_per_period=END_TO_END_PROMPTS)
    rows, run = tiny_rows(preamble_tokens=PREAMBLE), Run(schedule="synchronous", checkpoint_every=0)
    speeds = []
    for shared in (False, "auto"):
        trainer = Trainer(shared_prompt=shared, threads=1)
        periods = measured(2, "tiny", rows, running_sum_reward, grpo=grpo, trainer=trainer, run=run)
        tokens = sum(m["completions/mean_length"] for m in periods) * grpo.prompts_per_period * grpo.num_generations
        speeds.append(tokens / sum(m["timing_s/training"] for m in periods))
    separate, shared_prompt = speeds
    print(f"end to end, tokens/s: {separate:.0f} separate, {shared_prompt:.0f} shared", file=sys.stderr)
    return {
        "preamble": PREAMBLE,
        "separate": round(separate, 1),
        "shared": round(shared_prompt, 1),
        "ratio": round(shared_prompt / separate, 2),
    }


def _point(shape: tuple[int, int, int], group: tuple, peaks: list[int]) -> dict[str, Any]:
    (P, R, K), times = shape, _times(group)
    print(
        f"{P:5} {R:4} {K:3} {times['ratio']:6.2f} {times['flop_ratio']:9.2f} {peaks[0] >> 20:18} {peaks[1] >> 20:7}",
        file=sys.stderr,
    )
    return {"P": P, "R": R, "K": K, **times, "peak_bytes_separate": peaks[0], "peak_bytes_shared": peaks[1]}


def _model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").float().train()


def _group(P: int, R: int, K: int) -> tuple[int, list[int], list[list[int]]]:
    ids = np.random.default_rng(0).integers(0, 512, P + K * R).tolist()
    return 0, ids[:P], [ids[P + k * R : P + (k + 1) * R] for k in range(K)]


def _micro_step(model: PreTrainedModel, layout: Layout) -> None:
    model.zero_grad(set_to_none=True)
    logprob_T, _ = logprobs(model, layout)
    logprob_T.sum().backward()


def _times(group: tuple) -> dict[str, float]:
    separate_model, shared_model = _model(), _model()
    sides = [(separate_model, pack([group], shared=False)), (shared_model, pack([group], shared=True))]
    best, runs, started = [float("inf")] * 2, 0, time.process_time()
    while runs < RUNS_AT_LEAST or time.process_time() - started < SECONDS_PER_POINT:
        for number, side in enumerate(sides):
            start = time.process_time()
            _micro_step(*side)
            best[number] = min(best[number], time.process_time() - start)
        runs += 1
    return {"ratio": best[0] / best[1], "flop_ratio": flop_ratio([group], ModelDims.from_model(shared_model))}


def _peak_bytes(group: tuple, shared: bool) -> int:
    model, layout = _model(), pack([group], shared=shared)
    before = _resident_peak()
    _micro_step(model, layout)
    return _resident_peak() - before


def _resident_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _in_child(measure: Callable[..., int], *arguments: Any) -> int:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, arguments)
