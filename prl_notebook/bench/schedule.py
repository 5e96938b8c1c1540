"""`prl bench schedule`: what overlapping generation and training is worth.

The bundled model on a load where both sides take about equal time. Three runs of the same periods:

- periodic: one core generates, one core trains, at the same time;
- synchronous: the same two cores, the trainer starts when all groups are there (half of the machine is idle);
- colocated: synchronous, but every core works in both phases (the baseline that leaves nothing idle).

Ratios are old / new, so bigger is better for `periodic`. The limit of the first is 2, that of the second about 1.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from statistics import median
from typing import Any

from prl_notebook.bench.periods import measured
from prl_notebook.config import Config, Rollout, Run, Trainer
from prl_notebook.tasks.tiny import running_sum_reward, tiny_preset, tiny_rows

PROMPTS, PREAMBLE = 96, 448
"""of a period, and tokens before each question: enough work per group that a micro-step of one is no waste"""
PERIODS = 2
"""measured periods of each schedule, after one that warms up"""
GROUPS_IN_FLIGHT = (2, 3)
"""candidates: the fewer groups are sampled at once, the longer generation takes"""


def schedule() -> dict[str, Any]:
    """{"periodic_over_synchronous", "periodic_over_colocated", "idle", "generation_s", "training_s", ...}"""
    grpo = dataclasses.replace(tiny_preset().grpo, prompts_per_period=PROMPTS, learning_rate=0.0)
    trainer = Trainer(threads=1, tokens_per_microstep=2048)
    split = Config(grpo, trainer=trainer, run=Run(schedule="synchronous", checkpoint_every=0, record_tokens=False))

    def with_groups(groups: int, prompts: int = PROMPTS) -> Config:
        rollout = Rollout(threads=1, groups_in_flight=groups)
        return dataclasses.replace(split, grpo=dataclasses.replace(grpo, prompts_per_period=prompts), rollout=rollout)

    balance = {g: _measure(with_groups(g, PROMPTS // 4), 1)[0] for g in GROUPS_IN_FLIGHT}
    groups = min(balance, key=lambda g: abs(balance[g]["timing_s/generation"] / balance[g]["timing_s/training"] - 1))
    base = with_groups(groups)
    cores = os.cpu_count() or 1
    variants = {
        "synchronous": base,
        "periodic": dataclasses.replace(base, run=dataclasses.replace(base.run, schedule="periodic")),
        "colocated": dataclasses.replace(
            base,
            rollout=dataclasses.replace(base.rollout, threads=cores, groups_in_flight=16),
            trainer=dataclasses.replace(trainer, threads=cores),
        ),
    }
    found = {name: _measure(config, PERIODS) for name, config in variants.items()}
    seconds = {name: median(m["step_time"] for m in metrics) for name, metrics in found.items()}
    idle = {
        name: {side: round(median(m[f"idle_ratio/{side}"] for m in metrics), 3) for side in ("rollout", "trainer")}
        for name, metrics in found.items()
    }
    print(f"{'schedule':12} {'s/period':>9} {'rollout idle':>13} {'trainer idle':>13}", file=sys.stderr)
    for name, value in seconds.items():
        print(f"{name:12} {value:9.2f} {idle[name]['rollout']:13.0%} {idle[name]['trainer']:13.0%}", file=sys.stderr)
    synchronous = found["synchronous"]
    return {
        "periodic_over_synchronous": round(seconds["synchronous"] / seconds["periodic"], 3),
        "periodic_over_colocated": round(seconds["colocated"] / seconds["periodic"], 3),
        "idle": idle,
        "seconds_per_period": {name: round(value, 3) for name, value in seconds.items()},
        "generation_s": round(median(m["timing_s/generation"] for m in synchronous), 3),
        "training_s": round(median(m["timing_s/training"] for m in synchronous), 3),
        "prompts": PROMPTS,
        "preamble": PREAMBLE,
        "groups_in_flight": groups,
    }


def _measure(config: Config, periods: int) -> list[dict[str, float]]:
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return measured(periods, "tiny", tiny_rows(preamble_tokens=PREAMBLE), running_sum_reward, **sections)
