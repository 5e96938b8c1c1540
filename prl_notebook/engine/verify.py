"""Verify the promise on the run at hand: one period's gradient, computed in several orders and splits.

The next period's completions are sampled once; the trainer then computes their gradient as the synchronous schedule
would, as the periodic schedule would with the groups in the order in which they really arrived, and under random
permutations and micro-step splits. Weights, optimizer, data position and random states stay as they were.
"""

from __future__ import annotations

import html
import random
from dataclasses import dataclass

from prl_notebook.engine.engine import POLL_SECONDS, Engine
from prl_notebook.engine.queue import micro_steps
from prl_notebook.engine.schedules import PERIODIC
from prl_notebook.engine.types import Group


@dataclass(frozen=True)
class Comparison:
    """Gradient of one order and split against the synchronous one."""

    name: str
    micro_steps: int
    relative_error: float
    """L2 norm of the difference over L2 norm of the gradient"""
    max_abs_difference: float
    bitwise: bool


@dataclass(frozen=True)
class VerifyReport:
    """What `session.verify()` shows."""

    period: int
    version: int
    groups: int
    gradient_norm: float
    comparisons: tuple[Comparison, ...]
    dtype: str
    tolerance: float
    """largest relative error that rounding explains in this dtype"""

    @property
    def largest(self) -> float:
        """Largest relative error."""
        return max(c.relative_error for c in self.comparisons)

    @property
    def ok(self) -> bool:
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        lines = [
            f"period {self.period}, policy version {self.version}: {self.groups} groups, gradient norm "
            f"{self.gradient_norm:.6g} ({self.dtype})",
            f"{'against the synchronous schedule':34} {'steps':>5} {'relative error':>15} {'largest diff':>14}  bits",
        ]
        lines += [
            f"{c.name:34} {c.micro_steps:5} {c.relative_error:15.2e} {c.max_abs_difference:14.2e}  "
            f"{'same' if c.bitwise else 'differ'}"
            for c in self.comparisons
        ]
        verdict = "the same gradient" if self.ok else "NOT THE SAME GRADIENT"
        lines.append(f"{verdict}: largest relative error {self.largest:.2e}, tolerance {self.tolerance:.0e}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


TOLERANCES = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


def verify(engine: Engine, permutations: int, seed: int) -> VerifyReport:
    """Runs in the engine's thread, at a period boundary."""
    prompts = engine.source.batch(engine.period)
    engine.producer.hold(False)
    engine.roll_out(prompts, engine.requests(prompts))
    budget = engine.config.trainer.tokens_at_once
    shared = engine.config.trainer.shared_prompt is not False
    arrivals: list[list[Group]] = []
    while sum(map(len, arrivals)) < len(prompts):
        engine.stepper.raise_if_closed()
        if batch := engine.queue.take(PERIODIC, "arrival", budget, shared, POLL_SECONDS):
            arrivals.append(batch)
    engine.producer.hold(True)
    arrived = [group for batch in arrivals for group in batch]
    in_order = sorted(arrived, key=lambda g: g.group)
    synchronous = micro_steps(in_order, budget, shared)
    norm = engine.trainer.call("gradient", synchronous, yardstick=True)["norm"]

    plans = {
        "synchronous, once more": synchronous,
        "periodic, order of arrival": arrivals,
        "one group a micro-step": [[g] for g in in_order],
        "all groups in one micro-step": [in_order],
    }
    chance = random.Random(seed)
    for i in range(permutations):
        shuffled = chance.sample(arrived, len(arrived))
        plans[f"random permutation and split {i + 1}"] = _random_split(shuffled, chance)
    comparisons = []
    for name, plan in plans.items():
        answer = engine.trainer.call("gradient", plan)
        comparisons.append(
            Comparison(name, len(plan), answer["relative_error"], answer["max_abs_difference"], answer["bitwise"])
        )
    dtype = engine.config.trainer.dtype
    return VerifyReport(engine.period, engine.version, len(prompts), norm, tuple(comparisons), dtype, TOLERANCES[dtype])


def _random_split(groups: list[Group], chance: random.Random) -> list[list[Group]]:
    cuts = sorted(chance.sample(range(1, len(groups)), chance.randint(0, len(groups) - 1)))
    return [groups[a:b] for a, b in zip([0, *cuts], [*cuts, len(groups)], strict=True)]
