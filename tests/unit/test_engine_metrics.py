"""Metrics of rewards and completion lengths."""

import numpy as np
import pytest

from prl_notebook.engine.metrics import batch_metrics
from prl_notebook.engine.types import Completion, Group

NAN = float("nan")


def group(number, lengths, reasons, rewards, **by_function) -> Group:
    completions = [
        Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), reason)
        for n, reason in zip(lengths, reasons, strict=True)
    ]
    functions = {name: np.array(values) for name, values in by_function.items()}
    return Group(0, number, 0, (1,), completions, rewards_K=np.array(rewards), rewards_by_function=functions)


def test_metrics_of_a_period():
    groups = [
        group(0, [4, 9], ["stop", "length"], [2.0, 0.0], exact=[1.0, 0.0], style=[NAN, NAN]),
        group(1, [2, 5], ["stop", "stop"], [NAN, 1.0], exact=[NAN, 0.5], style=[NAN, NAN]),
        group(2, [7, 9], ["stop", "abort"], [0.1 + 0.2, 0.3], exact=[0.15, 0.15], style=[NAN, 3.0]),
    ]
    metrics = batch_metrics(groups)
    rewards = [2.0, 0.0, 1.0, 0.3, 0.3]
    assert metrics == pytest.approx(
        {
            "reward": np.mean(rewards),
            "reward_std": np.std(rewards, ddof=1),
            "frac_reward_zero_std": 2 / 3,
            "rewards/invalid": 1.0,
            "rewards/exact/mean": np.mean([1.0, 0.0, 0.5, 0.15, 0.15]),
            "rewards/exact/std": np.std([1.0, 0.0, 0.5, 0.15, 0.15], ddof=1),
            "rewards/style/mean": 3.0,
            "rewards/style/std": 0.0,
            "completions/mean_length": 6.0,
            "completions/min_length": 2.0,
            "completions/max_length": 9.0,
            "completions/mean_terminated_length": 4.5,
            "completions/min_terminated_length": 2.0,
            "completions/max_terminated_length": 7.0,
            "completions/clipped_ratio": 1 / 3,
        }
    )


def test_nothing_is_nan_without_rewards_or_ends():
    metrics = batch_metrics([group(0, [3, 3], ["length", "length"], [NAN, NAN], exact=[NAN, NAN])])
    assert np.isfinite(list(metrics.values())).all()
    assert "reward" not in metrics
    assert metrics["completions/max_terminated_length"] == 0
    assert metrics["completions/clipped_ratio"] == 1


def test_unscored_group_is_named():
    unscored = group(7, [3], ["stop"], [1.0])
    unscored.rewards_K = None
    with pytest.raises(ValueError, match="group 7"):
        batch_metrics([unscored])
