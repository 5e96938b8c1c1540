"""Configuration: TRL's names and defaults, and messages for what cannot work."""

from __future__ import annotations

import dataclasses

import pytest

from prl_notebook.config import GRPO, Config, Rewards, Rollout, Run, Trainer
from prl_notebook.runtime.launch import threads_of
from prl_notebook.session import configure

SAME_NAMES = (
    *("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "loss_type", "beta", "epsilon"),
    *("importance_sampling_level", "num_iterations", "mask_truncated_completions", "reward_weights", "learning_rate"),
    *("max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "epsilon_high", "scale_rewards"),
    "use_bias_correction_kl",
)


def test_names_and_defaults_are_trl_s():
    from trl import GRPOConfig

    theirs = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    for name in SAME_NAMES:
        assert getattr(GRPO(), name) == theirs[name], name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_generations": 1}, "num_generations=1: a group needs at least 2 completions"),
        ({"loss_type": "bnpo"}, "'bnpo' averages over the tokens of each micro-batch.*Use 'dapo'"),
        ({"loss_type": "ppo"}, "loss_type='ppo' is not one of 'grpo', 'dapo', 'dr_grpo', 'cispo'"),
        ({"scale_rewards": "batch"}, "'batch' divides by the standard deviation of the whole.*'group' or 'none'"),
        ({"temperature": 0}, "temperature=0 must be above 0"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"num_iterations": 0}, "num_iterations=0 must be at least 1"),
        ({"lr_scheduler_type": "cosine"}, "decays over total_periods, which is not set"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        GRPO(**arguments)


def test_other_sections_are_checked_too():
    with pytest.raises(ValueError, match=r"Trainer\(engine='torch'\) is one process"):
        Trainer(tensor_parallel=2)
    with pytest.raises(ValueError, match=r"Rollout\.workers=0 must be at least 1"):
        Rollout(workers=0)
    with pytest.raises(ValueError, match=r"Rollout.urls must name one server per worker \(2\), got 1"):
        Rollout(engine="vllm-server", workers=2, urls=("http://127.0.0.1:1",))
    with pytest.raises(ValueError, match=r"Rewards\.timeout=0 must be above 0"):
        Rewards(timeout=0)
    with pytest.raises(ValueError, match="schedule='async' is not one of"):
        Run(schedule="async")


def test_reproducible_workers_have_one_thread():
    assert threads_of(Config(run=Run(reproducible=True)))[0] == 1
    with pytest.raises(ValueError, match=r"Rollout\.threads=2 with reproducible=True"):
        threads_of(Config(rollout=Rollout(threads=2), run=Run(reproducible=True)))


def test_configuration_survives_a_round_trip_through_plain_data():
    config = Config(GRPO(reward_weights=(1.0, 0.5), beta=0.1), Rollout(workers=3), run=Run(schedule="synchronous"))
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match=r"unknown section 'optimizer'; sections are grpo, rollout"):
        Config.from_dict({"optimizer": {}})
    with pytest.raises(ValueError, match=r"\[grpo\] has no field 'lr'"):
        Config.from_dict({"grpo": {"lr": 1}})


def test_single_settings_go_to_the_section_that_has_them():
    config = configure(Config(), {"grpo": GRPO(beta=0.1)}, {"learning_rate": 1e-3, "reproducible": True})
    assert (config.grpo.beta, config.grpo.learning_rate, config.run.reproducible) == (0.1, 1e-3, True)
    with pytest.raises(TypeError, match="'lr' is no argument of Session and no field of GRPO or Run"):
        configure(Config(), {}, {"lr": 1e-3})


def test_the_batch_size_is_counted_in_prompts():
    assert GRPO(prompts_per_period=4, num_generations=8).completions_per_period == 32
