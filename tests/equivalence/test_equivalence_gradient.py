"""A period's gradient is the same for every order, split and layout; bit for bit for equal sequences of micro-steps."""

import random

import pytest
import torch
from training_cases import make_config, make_groups, save_tiny_qwen3

from prl_notebook.training.gradients import compare
from prl_notebook.training.torch_trainer import TorchTrainer

LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "rloo-tis-k2": {"advantage_estimator": "rloo", "importance_sampling_correction": True, "kl_estimator": "k2"},
}
PERIOD = {"prompts_per_period": 5, "beta": 0.1, "mask_truncated_completions": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return save_tiny_qwen3(root / "policy", 0), save_tiny_qwen3(root / "reference", 1)


def splits(groups, seed: int = 0):
    """Sequences of micro-steps: one by one, reversed, and random permutations cut at random places."""
    rng = random.Random(seed)
    yield [[group] for group in groups]
    yield [list(reversed(groups))]
    for _ in range(2):
        order = rng.sample(groups, len(groups))
        cuts = sorted(rng.sample(range(1, len(order)), 2))
        yield [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]


def accumulated(trainer: TorchTrainer, micro_steps) -> dict[str, torch.Tensor]:
    """Gradient sums that real accumulate() calls leave behind."""
    trainer.begin_period(0, 0, sum(map(len, micro_steps)))
    for groups in micro_steps:
        trainer.accumulate(groups)
    return {name: p.grad.clone() for name, p in trainer.models.policy.named_parameters()}


@pytest.mark.strict
@pytest.mark.parametrize(
    ("loss", "shared_prompt"), [*((loss, False) for loss in LOSSES), ("dapo", True), ("gspo", True)]
)
def test_order_and_split_do_not_matter(folders, loss, shared_prompt):
    config = make_config({"dtype": "float64", "shared_prompt": shared_prompt}, **PERIOD | LOSSES[loss])
    trainer = TorchTrainer(folders[0], config, folders[1])
    groups = make_groups(config.grpo)
    assert trainer.gradient([groups], yardstick=True)["norm"] > 0
    for micro_steps in splits(groups):
        answer = trainer.gradient(micro_steps)
        assert answer["relative_error"] <= 1e-12, [[g.group for g in step] for step in micro_steps]


@pytest.mark.strict
@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_layout_and_token_budget_do_not_matter(folders, loss):
    """Separate rows against shared prompts, whole groups against groups cut to a budget below their size."""
    groups = make_groups(make_config(**PERIOD | LOSSES[loss]).grpo)
    gradients = []
    for shared_prompt, budget in ((False, 4096), (False, 20), (True, 4096), (True, 20)):
        options = {"dtype": "float64", "shared_prompt": shared_prompt, "tokens_per_microstep": budget}
        trainer = TorchTrainer(folders[0], make_config(options, **PERIOD | LOSSES[loss]), folders[1])
        gradients.append(accumulated(trainer, [groups[:2], groups[2:]]))
    for other in gradients[1:]:
        assert compare(other, gradients[0])["relative_error"] <= 1e-12


@pytest.mark.strict
@pytest.mark.parametrize("shared_prompt", [False, True])
def test_equal_sequences_are_bitwise_equal_in_float32(folders, shared_prompt):
    config = make_config({"shared_prompt": shared_prompt}, **PERIOD)
    groups = make_groups(config.grpo)
    micro_steps = [groups[3:], groups[:1], groups[1:3]]
    trainer = TorchTrainer(folders[0], config, folders[1])
    trainer.gradient(micro_steps, yardstick=True)
    assert trainer.gradient(micro_steps)["bitwise"]
    other = trainer.gradient([groups])
    assert not other["bitwise"] and other["relative_error"] < 1e-4
    fresh = TorchTrainer(folders[0], config, folders[1])
    first, second = accumulated(trainer, micro_steps), accumulated(fresh, micro_steps)
    assert compare(first, second)["bitwise"]


@pytest.mark.parametrize("old_policy", ["auto", "always"])
def test_gradient_changes_nothing(folders, old_policy):
    """Between periods and in the middle of one, a run with gradient() calls ends with the same bits."""
    config = make_config({"old_policy": old_policy}, num_iterations=2, **PERIOD)
    ends = []
    for watched in (False, True):
        trainer = TorchTrainer(folders[0], config, folders[1])
        for period in range(2):
            groups = make_groups(config.grpo, period, trainer.version)
            if watched:
                trainer.gradient([groups], yardstick=True)
            trainer.begin_period(period, trainer.version, len(groups))
            trainer.accumulate(groups[:2])
            if watched:
                trainer.gradient([groups], yardstick=True)
                assert trainer.gradient([groups[:3], groups[3:]])["relative_error"] < 1e-4
            trainer.accumulate(groups[2:])
            trainer.finish_update(last=False)
            with pytest.raises(RuntimeError, match="between the optimizer steps"):
                trainer.gradient([groups], yardstick=True)
            trainer.accumulate(groups)
            metrics = trainer.finish_update().metrics
        ends.append((metrics, trainer.models.policy.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert compare(ends[0][1], ends[1][1])["bitwise"]


def test_gradient_needs_a_yardstick_and_the_right_version(folders):
    trainer = TorchTrainer(folders[0], make_config())
    groups = make_groups(trainer.grpo)
    with pytest.raises(RuntimeError, match="yardstick=True"):
        trainer.gradient([groups])
    groups[2].version = 1
    with pytest.raises(ValueError, match="policy version 1"):
        trainer.gradient([groups], yardstick=True)
    groups[2].version = 0
    assert trainer.gradient([groups], yardstick=True)["norm"] > 0
