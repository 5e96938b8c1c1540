"""Ready-made breakpoint conditions, on hand-made groups and reports and inside a real session."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from small_runs import SMALL

from prl_notebook import Rewards, conditions
from prl_notebook.engine.types import Completion, Group
from prl_notebook.training.trainer import MicroStepReport

NAN = float("nan")


def group(rewards, lengths=None, reasons=None, number=0, period=0) -> Group:
    lengths, reasons = lengths or [3] * len(rewards), reasons or ["stop"] * len(rewards)
    completions = [
        Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), reason)
        for n, reason in zip(lengths, reasons, strict=True)
    ]
    return Group(period, number, 0, (1,), completions, rewards_K=np.array(rewards))


def report(**stats: float) -> MicroStepReport:
    return MicroStepReport([0], 10, 8, 0.1, 0.0, shared_prompt=True, stats=stats)


def test_zero_variance_is_every_group_without_a_policy_gradient():
    when = conditions.zero_variance().when
    assert when(group([0.0, 0.0, 0.0])) and when(group([0.1 + 0.2, 0.3])) and when(group([1.0, NAN]))
    assert not when(group([0.0, 1.0])) and not when(group([NAN, 0.0, 1.0]))


def test_all_truncated_needs_every_completion_cut_off():
    when = conditions.all_truncated().when
    assert when(group([0.0, 1.0], reasons=["length", "length"]))
    assert not when(group([0.0, 1.0], reasons=["length", "stop"]))


def test_reward_failed_is_a_group_without_any_valid_reward():
    when = conditions.reward_failed().when
    assert when(group([NAN, NAN]))
    assert not when(group([NAN, 0.0]))


def test_a_straggler_is_compared_with_the_groups_before_it_in_its_period():
    when = conditions.straggler(2.0).when
    lengths = [[4, 9], [10, 2], [11, 5], [21, 3], [20, 20]]
    found = [when(group([0.0, 1.0], n, number=i)) for i, n in enumerate(lengths)]
    assert found == [False, False, False, True, False]
    assert not when(group([0.0, 1.0], [60, 60], number=0, period=1)), "nothing to compare with in a new period"


def test_a_group_that_comes_again_after_a_rewind_is_not_compared_with_itself():
    when = conditions.straggler(2.0).when
    for i, n in enumerate([10, 10, 10, 30]):
        seen = when(group([0.0, 1.0], [n, n], number=i))
    assert seen and when(group([0.0, 1.0], [30, 30], number=3))


def test_limits_on_what_the_trainer_reports():
    kl, ratio = conditions.kl_above(0.1).when, conditions.ratio_above(1.5).when
    assert kl(report(ratio_max=1.0, kl_mean=0.2)) and not kl(report(ratio_max=1.0, kl_mean=0.1))
    assert ratio(report(ratio_max=1.6)) and not ratio(report(ratio_max=1.5))
    assert not kl(report()) and not ratio(report()), "every token masked: nothing was measured yet"
    with pytest.raises(ValueError, match="set beta above 0"):
        kl(report(ratio_max=1.0))


def test_a_session_stops_at_a_condition(make_session):
    session = make_session(reward_funcs=lambda completions, **_: [0.5] * len(completions))
    point = session.breakpoint(conditions.zero_variance())
    stopped = session.step()
    assert (point.on, stopped.breakpoint, point.hits) == ("group", "zero variance", 1)
    assert "next: train it" in stopped.where
    point.enabled = False
    no_kl = session.breakpoint(conditions.kl_above(0.1), name="too far away")
    stopped = session.step()
    assert stopped.breakpoint.startswith("too far away (switched off") and "beta" in stopped.breakpoint
    assert not no_kl.enabled

    with pytest.raises(ValueError, match="one of 'period', 'group', 'microstep'"):
        session.breakpoint(on="epoch")
    with pytest.raises(ValueError, match="one or the other"):
        session.breakpoint(conditions.zero_variance(), when=bool)


def test_kl_ratio_and_failed_rewards_are_found_in_a_real_run(make_session):
    def fails_later(completion_ids, trainer_state, **_):
        if trainer_state.period:
            raise RuntimeError("no judge")
        return [sum(i < 40 for i in ids) / len(ids) for ids in completion_ids]

    session = make_session(
        reward_funcs=fails_later,
        rewards=Rewards(on_error="invalid"),
        grpo=dataclasses.replace(SMALL, beta=0.01, num_iterations=2),
    )
    session.breakpoint(conditions.ratio_above(1.0001))
    session.breakpoint(conditions.kl_above(1e-9))
    session.breakpoint(conditions.reward_failed())
    stopped = session.step()
    assert stopped.breakpoint == "ratio above 1.0001" and "micro-step" in stopped.where
    session.breakpoints[0].enabled = False
    assert session.step().breakpoint == "KL above 1e-09"
    session.breakpoints[1].enabled = False
    assert session.run(2).wait().breakpoint == "no valid reward"


def test_a_fork_can_change_the_reward_function(make_session, tmp_path):
    session = make_session(reward_funcs=lambda completions, **_: [0.0] * len(completions))
    session.step()
    fork = session.fork(tmp_path / "fixed", reward_funcs=lambda completions, **_: [1.0] * len(completions))
    try:
        assert [m["reward"] for m in fork.metrics] == [0.0]
        assert fork.step().metrics["reward"] == 1.0
        assert session.step().metrics["reward"] == 0.0
    finally:
        fork.close()
