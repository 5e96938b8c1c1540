"""Faults that users of similar tools reported: each is told where the user stands, none hangs the run."""

from __future__ import annotations

import json
import time

import pytest
from small_runs import SMALL, digit_share, events_of

from prl_notebook import Rewards, Run, SessionError
from prl_notebook.engine import events as ev
from prl_notebook.rollout.guard import MismatchError
from prl_notebook.runtime.local import RemoteError


def hangs_on_three(completion_ids, prompts, **_):
    if prompts[0].startswith("3"):
        time.sleep(3600)
    return digit_share(completion_ids)


def raises_on_three(completion_ids, prompts, **_):
    if prompts[0].startswith("3"):
        raise ZeroDivisionError("no reward for a three")
    return digit_share(completion_ids)


EVERY_THIRD = [{"prompt": f"{a}+{b}="} for a in (1, 3, 5, 7) for b in (1, 2)]
ALL = {"dataset": EVERY_THIRD, "grpo": SMALL.__class__(**{**vars(SMALL), "prompts_per_period": 8})}


@pytest.mark.parametrize("function", [hangs_on_three, raises_on_three])
def test_a_failing_reward_is_counted_as_invalid_and_the_run_goes_on(make_session, function):
    session = make_session(**ALL, reward_funcs=function, rewards=Rewards(timeout=2.0, on_error="invalid"))
    metrics = session.step().metrics
    assert metrics["rewards/invalid"] == 8, "two prompts of four completions start with 3"
    assert metrics["reward"] > 0 and metrics["grad_norm"] > 0
    scored = {e.group: e for e in events_of(session, ev.GroupScored)}
    assert sum(e.invalid for e in scored.values()) == 8
    invalid = next(e for e in scored.values() if e.invalid)
    assert invalid.rewards == [None] * 4 and invalid.advantages == [0.0] * 4
    told = [e.text for e in events_of(session, ev.Notice)]
    expected = "took longer than Rewards.timeout=2 s" if function is hangs_on_three else "no reward for a three"
    assert len(told) == 2 and all("has no valid rewards" in t and expected in t for t in told)


def test_an_exception_in_a_reward_function_stops_the_run_with_its_traceback(make_session):
    session = make_session(**ALL, reward_funcs=raises_on_three)
    with pytest.raises(RemoteError, match="rewards: RewardError: reward function 'raises_on_three' raised") as caught:
        session.step()
    assert any("no reward for a three" in note and "Traceback" in note for note in caught.value.__notes__)
    with pytest.raises(SessionError, match="the run has failed"):
        session.step()
    assert "no reward for a three" in session.logs("rewards")


def test_a_hanging_reward_stops_the_run_after_its_time_out(make_session):
    session = make_session(**ALL, reward_funcs=hangs_on_three, rewards=Rewards(timeout=1.0))
    with pytest.raises(RuntimeError, match=r"scoring group \d of period 0 took longer than Rewards.timeout=1 s"):
        session.step()


def test_a_reward_of_the_wrong_length_names_the_function(make_session):
    session = make_session(reward_funcs=lambda completions, **_: [1.0])
    with pytest.raises(RemoteError, match="reward function 'lambda' returned 1 rewards for 4 completions"):
        session.step()


def test_a_stall_is_told_and_names_what_is_waited_for(make_session):
    def slow(completion_ids, **_):
        time.sleep(3.0)
        return digit_share(completion_ids)

    session = make_session(reward_funcs=slow, run=Run(stall_after=1.0))
    session.step("group")
    stalls = events_of(session, ev.Stalled)
    assert stalls and any("is being scored by the reward functions" in w for w in stalls[0].waiting)


def test_a_worker_that_cannot_start_says_why_within_seconds(make_session, small_model, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in small_model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": 48}))
    session = make_session(model=broken)
    began = time.monotonic()
    with pytest.raises(RemoteError, match=r"(trainer|rollout)-0: .*\[log: .*-0.log\]"):
        session.step()
    assert time.monotonic() - began < 60


def test_zero_variance_and_abstaining_rewards_leave_finite_metrics(make_session):
    def partly(completion_ids, **_):
        return [None if k == 0 else 1.0 for k in range(len(completion_ids))]

    metrics = make_session(reward_funcs=partly).step().metrics
    assert metrics["frac_reward_zero_std"] == 1 and metrics["grad_norm"] == 0
    assert all(value == value for value in metrics.values())


@pytest.mark.parametrize(("top_p", "shift"), [(1.0, 0.01), (0.8, 0.3)])
def test_a_sampler_that_disagrees_with_the_trainer_stops_the_run_with_the_numbers(make_session, top_p, shift):
    session = make_session(top_p=top_p)
    session.step()
    engine = session._parts.engine
    put = engine.queue.put

    def shifted(group):
        for completion in group.completions:
            completion.logprobs_R = completion.logprobs_R - shift
        return put(group)

    session._parts.scorer._put = shifted
    with pytest.raises(MismatchError, match=r"differ from the trainer's by 0\.\d+ .*0.0001 is allowed in float32"):
        session.step()
