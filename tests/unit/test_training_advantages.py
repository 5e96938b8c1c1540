"""Advantages of one group: estimators, missing rewards, equal rewards."""

import numpy as np
import pytest
from training_cases import make_config

from prl_notebook.training.advantages import group_advantages

NAN = float("nan")


def advantages(rewards, **grpo):
    return group_advantages(np.array(rewards), make_config(**grpo).grpo)


def test_grpo_divides_by_the_sample_standard_deviation():
    np.testing.assert_allclose(
        advantages([0.0, 1.0, 2.0, 3.0]), np.array([-1.5, -0.5, 0.5, 1.5]) / (np.sqrt(5 / 3) + 1e-4)
    )


def test_scale_none_only_centres():
    np.testing.assert_allclose(advantages([0.0, 1.0, 2.0, 3.0], scale_rewards="none"), [-1.5, -0.5, 0.5, 1.5])


def test_rloo_compares_with_the_mean_of_the_others():
    np.testing.assert_allclose(
        advantages([0.0, 1.0, 5.0], advantage_estimator="rloo"), [0 - 3.0, 1 - 2.5, 5 - 0.5], atol=1e-12
    )


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_missing_rewards_are_left_out_of_the_statistics(estimator):
    with_gap = advantages([0.0, NAN, 1.0, 3.0], advantage_estimator=estimator)
    without = advantages([0.0, 1.0, 3.0], advantage_estimator=estimator)
    np.testing.assert_array_equal(with_gap, np.insert(without, 1, 0.0))


@pytest.mark.parametrize("rewards", [[NAN, NAN, NAN], [NAN, 0.7, NAN], [0.1] * 7, [1 / 3] * 11])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_nothing_to_compare_gives_exactly_zero(rewards, estimator):
    """Equal rewards too: the rounding error of their mean must not be divided by 1e-4."""
    assert not advantages(rewards, advantage_estimator=estimator).any()


def test_infinite_reward_is_refused():
    with pytest.raises(ValueError, match="infinite"):
        advantages([0.0, float("inf"), 1.0])
