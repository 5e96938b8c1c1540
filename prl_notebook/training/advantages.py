"""Advantages of one group: how much better each completion did than the others of its prompt.

Only the group itself is needed, so a group can be trained the moment it is scored. Left out on purpose: statistics over
the whole period (`scale_rewards="batch"`), which are unknown until the last group has arrived. Numpy only: the engine
calls this where there is no torch.

Shapes: K completions of one prompt.
"""

from __future__ import annotations

import numpy as np

from prl_notebook.config import GRPO

STD_EPSILON = 1e-4
"""TRL's guard against division by a vanishing standard deviation."""


def group_advantages(rewards_K: np.ndarray, grpo: GRPO) -> np.ndarray:
    """Advantages of one group, float64 [K].

    'grpo' (Shao et al. 2024, TRL): (r - mean) / (std + 1e-4) with the sample standard deviation (ddof=1), or r - mean
    with `scale_rewards="none"`. 'rloo' (Ahmadian et al. 2024): r minus the mean of the other rewards.

    A NaN reward (every function abstained, or the completion is invalid) is left out of the statistics and gets
    advantage 0. So does every completion of a group whose valid rewards are all equal: exactly 0, not a rounding error
    divided by 1e-4. A single valid completion has nothing to be compared with and gets 0 too.

    Args:
        rewards_K: float [K], NaN where there is no reward.

    Raises:
        ValueError: if a reward is infinite.
    """
    rewards_K = np.asarray(rewards_K, dtype=np.float64)
    if np.isinf(rewards_K).any():
        raise ValueError(
            f"rewards {rewards_K.tolist()} contain an infinite value; a reward function must return finite ones"
        )
    valid_K = ~np.isnan(rewards_K)
    valid = rewards_K[valid_K]
    advantages_K = np.zeros_like(rewards_K)
    if len(valid) < 2 or np.ptp(valid) == 0:
        return advantages_K
    if grpo.advantage_estimator == "rloo":
        advantages_K[valid_K] = valid - (valid.sum() - valid) / (len(valid) - 1)
    else:
        advantages_K[valid_K] = valid - valid.mean()
        if grpo.scale_rewards == "group":
            advantages_K[valid_K] /= valid.std(ddof=1) + STD_EPSILON
    return advantages_K
