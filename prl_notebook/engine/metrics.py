"""Metrics of a period's groups under TRL's names: rewards and completion lengths. Numpy only.

Metrics that need the model (loss, kl, entropy, clip ratios) come from the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prl_notebook.engine.types import Group


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics over all completions of the period, in TRL's definitions.

    - reward, reward_std: of the weighted rewards (`reward_weights` applied), sample standard deviation (ddof=1);
      rewards/{function}/mean and /std: of one function, unweighted. NaN rewards are left out.
    - frac_reward_zero_std: share of groups whose valid rewards are all equal, which have no policy gradient.
    - rewards/invalid: number of completions without any reward.
    - completions/*_length: true lengths in tokens, also of completions that are masked from the loss;
      *_terminated_length: of those that ended by themselves; clipped_ratio: share of those that did not.

    Nothing is NaN: without any valid reward the statistics of rewards are left out, the std of a single value is 0, and
    the terminated lengths are 0 when no completion ended by itself.

    Raises:
        ValueError: naming a group without rewards.
    """
    metrics: dict[str, float] = {}
    for group in groups:
        if group.rewards_K is None:
            raise ValueError(f"group {group.group} of period {group.period} has no rewards yet")
    rewards = [np.asarray(group.rewards_K, dtype=np.float64) for group in groups]
    if not rewards:
        return metrics
    flat = np.concatenate(rewards)
    _add_mean_std(metrics, "reward", "reward_std", flat)
    metrics["frac_reward_zero_std"] = float(np.mean([all_rewards_equal(r_K) for r_K in rewards]))
    metrics["rewards/invalid"] = float(np.isnan(flat).sum())
    for name in dict.fromkeys(name for group in groups for name in group.rewards_by_function):
        values = np.concatenate([g.rewards_by_function[name] for g in groups if name in g.rewards_by_function])
        _add_mean_std(metrics, f"rewards/{name}/mean", f"rewards/{name}/std", values)

    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(c.ids_R) for c in completions])
    terminated = np.array([c.finish_reason == "stop" for c in completions])
    for kind, chosen in (("length", lengths), ("terminated_length", lengths[terminated])):
        values = chosen if len(chosen) else np.zeros(1)
        metrics[f"completions/mean_{kind}"] = float(values.mean())
        metrics[f"completions/min_{kind}"] = float(values.min())
        metrics[f"completions/max_{kind}"] = float(values.max())
    metrics["completions/clipped_ratio"] = float(1 - terminated.mean())
    return metrics


def all_rewards_equal(rewards_K: np.ndarray) -> bool:
    """Whether a group's valid rewards do not differ, up to rounding; true of fewer than two."""
    valid = rewards_K[~np.isnan(rewards_K)]
    return len(valid) < 2 or bool(np.isclose(np.ptp(valid), 0.0))


def _add_mean_std(metrics: dict[str, float], mean: str, std: str, values: np.ndarray) -> None:
    valid = values[~np.isnan(values)]
    if len(valid):
        metrics[mean] = float(valid.mean())
        metrics[std] = float(valid.std(ddof=1)) if len(valid) > 1 else 0.0
