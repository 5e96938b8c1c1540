"""A made-up but consistent run, as events and completion records: what views are tested on without any process.

A small discrete-event simulation: workers sample several groups at once, rewards take a moment, the trainer takes what
has arrived, and every period ends with publish and load. Same arguments, same events.
"""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from prl_notebook.config import GRPO, Config, Rollout
from prl_notebook.engine import events as ev
from prl_notebook.engine.records import CompletionRecord, GroupRecord

REWARDS = ("correct", "format")


def synthetic_events(
    periods: int = 4,
    groups: int = 16,
    generations: int = 8,
    workers: int = 2,
    in_flight: int = 4,
    schedule: str = "periodic",
    seed: int = 0,
) -> list[ev.Event]:
    """All events of a run that ends between two periods."""
    rng = np.random.default_rng(seed)
    config = Config(grpo=GRPO(prompts_per_period=groups, num_generations=generations), rollout=Rollout(workers=workers))
    at = _Recorder()
    at(
        0.0,
        ev.RunStarted(
            run_dir="runs/synthetic",
            task="tiny arithmetic",
            model="tiny",
            config=config.to_dict(),
            version=0,
            period=0,
            workers=workers,
            wall=1.7e9,
        ),
    )
    names = [*(f"rollout-{w}" for w in range(workers)), "rewards", "trainer-0"]
    for i, name in enumerate(names):
        at(0.1 + 0.01 * i, ev.ProcessStarted(name=name, pid=4000 + i, seconds=1.2))
    now = _publish(at, 0.3, 0, workers)
    for period in range(periods):
        now = _period(at, rng, now, period, groups, generations, workers, in_flight, schedule)
    return at.events


class _Recorder:
    def __init__(self) -> None:
        self._events: list[tuple[float, int, ev.Event]] = []

    def __call__(self, t: float, event: ev.Event) -> None:
        self._events.append((t, len(self._events), dataclasses.replace(event, t=t)))

    @property
    def events(self) -> list[ev.Event]:
        return [event for _, _, event in sorted(self._events, key=lambda item: item[:2])]


def _publish(at: _Recorder, now: float, version: int, workers: int) -> float:
    checksum = f"{version * 2654435761 + 97:016x}"
    at(now + 0.03, ev.WeightsPublished(version=version, checksum=checksum, nbytes=3_300_000, seconds=0.03))
    for w in range(workers):
        done = now + 0.05 + 0.01 * w
        at(done, ev.WeightsAcknowledged(worker=w, version=version, checksum=checksum, seconds=0.02))
    return now + 0.05 + 0.01 * workers


def _period(at, rng, start, period, groups, generations, workers, in_flight, schedule) -> float:
    at(
        start,
        ev.PeriodStarted(
            period=period,
            version=period,
            groups=groups,
            generations=generations,
            schedule=schedule,
            prompt_tokens=rng.integers(8, 40, groups).tolist(),
        ),
    )
    solved = min(0.95, 0.3 + 0.08 * period)
    slots = [(start + 0.001 * i, i % workers) for i in range(workers * in_flight)]
    heapq.heapify(slots)
    scored: list[tuple[float, int]] = []
    tokens = np.zeros(groups, int)
    for group in range(groups):
        free, worker = heapq.heappop(slots)
        lengths = np.clip(rng.lognormal(2.8, 0.45, generations), 3, 64).astype(int)
        reasons = ["length" if n == 64 else "stop" for n in lengths]
        at(free, ev.GroupDispatched(period=period, group=group, worker=worker, version=period))
        for done, n in enumerate(sorted(lengths), 1):
            at(
                free + 0.02 * n,
                ev.RowsFinished(period=period, group=group, worker=worker, done=done, tokens=int(n) * done),
            )
        finished = free + 0.02 * int(lengths.max()) + 0.002
        heapq.heappush(slots, (finished, worker))
        at(
            finished,
            ev.GroupFinished(
                period=period,
                group=group,
                worker=worker,
                version=period,
                lengths=lengths.tolist(),
                finish_reasons=reasons,
            ),
        )
        scored.append((finished + 0.01, group))
        tokens[group] = lengths.sum()
    first = max(scored)[0] if schedule == "synchronous" else 0.0
    end, waiting = start, sorted(scored)
    index, idle, taken = 0, 0.0, []
    while waiting:
        begin = max(end, first, waiting[0][0])
        batch = [g for t, g in waiting if t <= begin][:4]
        waiting = waiting[len(batch) :]
        taken.append((begin, len(batch)))
        spent = 0.04 + 0.0003 * int(tokens[batch].sum())
        idle += begin - end
        at(
            begin + spent,
            ev.MicroStep(
                period=period,
                index=index,
                iteration=0,
                groups=batch,
                tokens=int(tokens[batch].sum()) + 25 * len(batch),
                completion_tokens=int(tokens[batch].sum()),
                seconds=spent,
                waited=begin - end,
                depth=sum(t <= begin + spent for t, _ in scored) - sum(n for _, n in taken),
                shared_prompt=True,
                stats={"ratio_max": 1.0, "kl_mean": 0.001 * period, "entropy_mean": 0.5, "mismatch_max": 2e-6},
            ),
        )
        end, index = begin + spent, index + 1
    for arrived, (t, group) in enumerate(sorted(scored), 1):
        depth = arrived - sum(n for begin, n in taken if begin <= t)
        by_function = {
            "correct": (rng.random(generations) < solved).astype(float),
            "format": rng.random(generations).round(1),
        }
        reward = sum(by_function.values())
        advantages = (reward - reward.mean()) / (reward.std(ddof=1) + 1e-4)
        at(
            t,
            ev.GroupScored(
                period=period,
                group=group,
                rewards=reward.tolist(),
                by_function={k: v.tolist() for k, v in by_function.items()},
                advantages=advantages.tolist(),
                reward_mean=float(reward.mean()),
                reward_std=float(reward.std(ddof=1)),
                seconds=0.01,
                depth=depth,
            ),
        )
    at(end + 0.05, ev.OptimizerStepped(period=period, iteration=0, version=period + 1, seconds=0.05))
    finish = _publish(at, end + 0.05, period + 1, workers) + 0.005
    at(
        finish,
        ev.PeriodFinished(
            period=period, version=period, metrics=_metrics(rng, period, solved, finish - start, idle, tokens, groups)
        ),
    )
    return finish + 0.002


def _metrics(rng, period, solved, seconds, idle, tokens, groups) -> dict[str, float]:
    noise = lambda scale: float(rng.normal(0, scale))  # noqa: E731
    return {
        "reward": solved + 0.5 + noise(0.03),
        "reward_std": 0.5 + noise(0.02),
        "frac_reward_zero_std": 0.06,
        "rewards/correct/mean": solved + noise(0.02),
        "rewards/correct/std": 0.4,
        "rewards/format/mean": 0.5 + noise(0.02),
        "rewards/format/std": 0.3,
        "loss": noise(1e-8),
        "grad_norm": 0.8 + noise(0.1),
        "learning_rate": 3e-4,
        "kl": 0.001 * period,
        "entropy": 0.6 - 0.01 * period,
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "clip_ratio/region_mean": 0.0,
        "completions/mean_length": float(tokens.mean()) / 8,
        "completions/min_length": 3.0,
        "completions/max_length": 64.0,
        "completions/clipped_ratio": 0.02,
        "num_tokens": float(tokens.sum() * (period + 1)),
        "step_time": seconds,
        "sampling/sampling_logp_difference/mean": 1e-7,
        "sampling/sampling_logp_difference/max": 2e-6,
        "sampling/importance_sampling_ratio/min": 0.999,
        "sampling/importance_sampling_ratio/max": 1.001,
        "idle_ratio/rollout": 0.2 + noise(0.03),
        "idle_ratio/trainer": idle / seconds,
        "queue_wait_time_s": 0.05,
        "weight_sync_time_s": 0.06,
        "buffer_qsize": 1.5,
        "overlap_ratio": 0.7,
        "timing_s/generation": 0.6 * seconds,
        "timing_s/training": 0.7 * seconds,
        "tokens_per_second": float(tokens.sum()) / seconds,
    }


def synthetic_records(period: int = 0, groups: int = 4, generations: int = 4, seed: int = 0) -> list[GroupRecord]:
    """Completions with per-token numbers; the last one of every group was cut at the length limit and is masked."""
    rng = np.random.default_rng((seed, period))
    records = []
    for group in range(groups):
        a, b = rng.integers(1, 9, 2)
        prompt = f"<|user|>{a}+{b}=<|end|><|assistant|>"
        prompt_tokens = ["<|user|>", *f"{a}+{b}=", "<|end|>", "<|assistant|>"]
        completions = []
        rewards = rng.integers(0, 2, generations).astype(float) if group else np.zeros(generations)
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        for k in range(generations):
            truncated = k == generations - 1
            tokens = ["<think>", *f"{a}+{b}={a + b}", "</think>", "\n", "<answer>", *str(a + b), "</answer>", "<|end|>"]
            tokens = tokens[:-3] + [" and", " so", " on"] * 4 if truncated else tokens
            policy = -rng.exponential(0.4, len(tokens)).astype(np.float32)
            kl = rng.exponential(0.01, len(tokens)).astype(np.float32)
            completions.append(
                CompletionRecord(
                    text="".join(tokens),
                    ids=rng.integers(0, 128, len(tokens)).tolist(),
                    tokens=tokens,
                    finish_reason="length" if truncated else "stop",
                    reward=float(rewards[k]),
                    by_function={"correct": float(rewards[k]), "format": None},
                    advantage=float(advantages[k]),
                    numbers={
                        "sampler": policy + 1e-6,
                        "policy": policy,
                        "old": policy,
                        "reference": policy - kl,
                        "kl": kl,
                        "ratio": np.ones(len(tokens), np.float32),
                        "entropy": rng.exponential(0.6, len(tokens)).astype(np.float32),
                        "loss": np.full(len(tokens), -advantages[k] / 500, np.float32),
                    },
                    mask=np.full(len(tokens), not truncated),
                )
            )
        prompt_ids = rng.integers(0, 128, len(prompt_tokens)).tolist()
        records.append(
            GroupRecord(period, group, period, group % 2, group // 2, prompt, prompt_ids, prompt_tokens, completions)
        )
    return records
