"""The torch trainer on tiny real models: bookkeeping, first ratio, optimizer, checkpoints, per-token detail."""

import json
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_cases import make_config, make_groups, save_tiny_qwen3, with_rewards
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    get_scheduler,
)

from prl_notebook.training.torch_trainer import TorchTrainer
from prl_notebook.weights import checksum, named_weights, open_version


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return save_tiny_qwen3(tmp_path_factory.mktemp("reference"), seed=1)


def train(trainer: TorchTrainer, periods: range, updates: int = 1) -> list[dict[str, float]]:
    reports = []
    for period in periods:
        groups = make_groups(trainer.grpo, period, trainer.version)
        trainer.begin_period(period, trainer.version, len(groups))
        for update in range(updates):
            for group in groups:
                trainer.accumulate([group])
            reports.append(trainer.finish_update(last=update == updates - 1).metrics)
    return reports


def weights(trainer: TorchTrainer) -> str:
    return checksum(named_weights(trainer.models.policy))


def parameters(trainer: TorchTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.models.policy.parameters()])


def test_group_of_another_version_is_refused_and_leaves_nothing_behind(folder):
    trainer = TorchTrainer(folder, make_config())
    groups = make_groups(trainer.grpo)
    with pytest.raises(ValueError, match="version 3"):
        trainer.begin_period(0, 3, 3)
    trainer.begin_period(0, 0, 3)
    groups[1].version = 7
    with pytest.raises(ValueError, match="group 1 of period 0 was sampled by policy version 7"):
        trainer.accumulate(groups)
    assert all(p.grad is None for p in trainer.models.policy.parameters())


def test_every_group_enters_exactly_once(folder):
    trainer = TorchTrainer(folder, make_config())
    groups = make_groups(trainer.grpo)
    with pytest.raises(RuntimeError, match="begin_period"):
        trainer.accumulate(groups)
    trainer.begin_period(0, 0, 3)
    trainer.accumulate([groups[1]])
    for again in ([groups[1]], [groups[0], groups[0]]):
        with pytest.raises(ValueError, match="already entered"):
            trainer.accumulate(again)
    with pytest.raises(RuntimeError, match="0, 2 are missing"):
        trainer.finish_update()
    with pytest.raises(RuntimeError, match="unfinished"):
        trainer.begin_period(1, 0, 3)
    trainer.accumulate([groups[2], groups[0]])
    assert trainer.finish_update().version == trainer.version == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"period": 4}, "period 4 was given to period 0"),
        ({"group": 3}, "not one of the period's groups 0..2"),
        ({"advantages_K": None}, "no advantages"),
        ({"advantages_K": np.array([0.0, np.nan, 1.0, 1.0])}, "finite advantage"),
        ({"advantages_K": np.zeros(3)}, "finite advantage"),
    ],
)
def test_unusable_groups_are_named(folder, change, message):
    trainer = TorchTrainer(folder, make_config())
    group = make_groups(trainer.grpo)[0]
    for name, value in change.items():
        setattr(group, name, value)
    trainer.begin_period(0, 0, 3)
    with pytest.raises(ValueError, match=message):
        trainer.accumulate([group])


def test_missing_completion_still_counts_in_fixed_denominators(folder):
    """A group with a member missing keeps B * K, and its completions keep their own prompt."""
    config = make_config({"dtype": "float64"}, loss_type="grpo")
    groups = make_groups(config.grpo)
    trainer = TorchTrainer(folder, config)
    trainer.begin_period(0, 0, 3)
    full = [trainer.accumulate([group], detail=True) for group in groups]
    dropped = [d for d in full[1].detail if d.completion == 3]
    expected = sum(r.loss_sum for r in full) - sum(d.loss_R.sum() for d in dropped)
    trainer.finish_update()

    trainer = TorchTrainer(folder, config)
    del groups[1].completions[3]
    groups[1].advantages_K = groups[1].advantages_K[:3]
    trainer.begin_period(0, 0, 3)
    trainer.accumulate([groups[2], groups[1]])
    trainer.accumulate([groups[0]])
    assert trainer.finish_update().metrics["loss"] == pytest.approx(expected / 12, rel=1e-6)


def save_gpt2_with_dropout(folder):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    assert config.attn_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("old_policy", ["auto", "always"])
@pytest.mark.parametrize("shared_prompt", [False, True])
@pytest.mark.parametrize("family", ["qwen3-dropout", "gpt2-dropout"])
def test_first_ratio_is_exactly_one(tmp_path, family, shared_prompt, old_policy):
    save = save_gpt2_with_dropout if "gpt2" in family else lambda f: save_tiny_qwen3(f, attention_dropout=0.5)
    options = {"old_policy": old_policy, "shared_prompt": shared_prompt}
    trainer = TorchTrainer(save(tmp_path / "model"), make_config(options))
    trainer.begin_period(0, 0, 3)
    report = trainer.accumulate(make_groups(trainer.grpo), detail=True)
    assert report.shared_prompt == shared_prompt
    for detail in report.detail:
        assert (detail.ratio_R == 1).all()
        assert np.array_equal(detail.policy_R, detail.old_R)


def test_always_and_auto_give_the_same_gradient(folder, reference):
    found = []
    for old_policy in ("auto", "always"):
        trainer = TorchTrainer(folder, make_config({"old_policy": old_policy}, beta=0.1), reference)
        train(trainer, range(2))
        found.append(weights(trainer))
    assert found[0] == found[1]


def test_later_updates_of_a_period_compare_with_the_policy_that_sampled(folder):
    trainer = TorchTrainer(folder, make_config(num_iterations=3))
    groups = make_groups(trainer.grpo)
    trainer.begin_period(0, 0, 3)
    seen = []
    for update in range(3):
        detail = trainer.accumulate(groups, detail=True).detail
        seen.append(detail[0])
        report = trainer.finish_update(last=update == 2)
    assert report.version == 1
    assert report.metrics["num_tokens"] == sum(g.tokens(shared_prompt=False) for g in groups)
    for later in seen[1:]:
        np.testing.assert_array_equal(later.old_R, seen[0].old_R)
        assert not np.array_equal(later.policy_R, later.old_R)
        np.testing.assert_allclose(later.ratio_R, np.exp(later.policy_R - later.old_R), rtol=1e-5)


def test_mismatch_stays_constant_at_learning_rate_zero(folder):
    trainer = TorchTrainer(folder, make_config(learning_rate=0.0))
    groups, seen = make_groups(trainer.grpo), []
    for period in range(3):
        for group in groups:
            group.period, group.version = period, trainer.version
        trainer.begin_period(period, trainer.version, 3)
        trainer.accumulate(groups)
        metrics = trainer.finish_update().metrics
        seen.append({name: value for name, value in metrics.items() if name.startswith("sampling/")})
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["sampling/sampling_logp_difference/max"] > 0


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_period_without_a_counted_token_changes_nothing(folder, reference, loss_type):
    config = make_config(loss_type=loss_type, mask_truncated_completions=True, beta=0.1)
    trainer = TorchTrainer(folder, config, reference)
    before = weights(trainer)
    groups = make_groups(trainer.grpo, truncated=1.0)
    trainer.begin_period(0, 0, 3)
    trainer.accumulate(groups)
    metrics = trainer.finish_update().metrics
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["grad_norm"] == metrics["loss"] == 0
    assert weights(trainer) == before


def test_zero_variance_group_has_a_kl_gradient_unless_it_is_masked(folder, reference):
    norms = {}
    for masked in (False, True):
        trainer = TorchTrainer(folder, make_config(beta=0.1, mask_zero_variance_kl=masked), reference)
        groups = [with_rewards(g, [0.1] * 4, trainer.grpo) for g in make_groups(trainer.grpo)]
        trainer.begin_period(0, 0, 3)
        trainer.accumulate(groups)
        norms[masked] = trainer.finish_update().metrics["grad_norm"]
    assert norms[False] > 0
    assert norms[True] == 0


def test_detail_adds_up_to_the_loss(folder, reference):
    trainer = TorchTrainer(folder, make_config({"tokens_per_microstep": 40}, beta=0.1), reference)
    groups = make_groups(trainer.grpo)
    trainer.begin_period(0, 0, 3)
    report = trainer.accumulate(groups, detail=True)
    assert [(d.group, d.completion) for d in report.detail] == [(g, k) for g in range(3) for k in range(4)]
    for detail in report.detail:
        completion = groups[detail.group].completions[detail.completion]
        assert len(detail.kl_R) == len(detail.entropy_R) == len(detail.reference_R) == len(completion.ids_R)
        assert detail.advantage == pytest.approx(groups[detail.group].advantages_K[detail.completion])
    total = sum(float(d.loss_R.sum(dtype=np.float64)) for d in report.detail)
    tokens = sum(sum(g.lengths) for g in groups)
    assert report.loss_sum == pytest.approx(total, rel=1e-5)
    assert trainer.finish_update().metrics["loss"] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_learning_rate_follows_transformers(folder, kind):
    trainer = TorchTrainer(
        folder, make_config(lr_scheduler_type=kind, total_periods=3, num_iterations=2, warmup_steps=2)
    )
    used = [metrics["learning_rate"] for metrics in train(trainer, range(3), updates=2)]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    name = "constant_with_warmup" if kind == "constant" else kind
    schedule = get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=6)
    expected = []
    for _ in range(6):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert used == pytest.approx(expected, rel=1e-12)


def test_decaying_schedule_needs_its_length(folder):
    with pytest.raises(ValueError, match="total_periods"):
        TorchTrainer(folder, make_config(lr_scheduler_type="linear"))


def test_gradient_is_clipped_after_the_normaliser(folder):
    """Steps of the clipped and the unclipped gradient differ only through AdamW's epsilon, so make that large."""
    moved = {}
    for limit in (0.0, 1e-3):
        trainer = TorchTrainer(folder, make_config(max_grad_norm=limit, adam_epsilon=1e3, learning_rate=1.0))
        before = parameters(trainer)
        normalised = trainer.gradient([make_groups(trainer.grpo)], yardstick=True)["norm"]
        (metrics,) = train(trainer, range(1))
        assert metrics["grad_norm"] == pytest.approx(normalised, rel=1e-5)
        moved[limit] = (parameters(trainer) - before).norm().item(), metrics["grad_norm"]
    assert moved[0.0][1] == moved[1e-3][1] > 1e-3
    assert moved[1e-3][0] / moved[0.0][0] == pytest.approx(1e-3 / moved[0.0][1], rel=0.05)


def test_bfloat16_policy_keeps_updates_below_its_resolution(folder):
    trainer = TorchTrainer(folder, make_config({"dtype": "bfloat16"}, learning_rate=1e-5, adam_epsilon=1e-12))
    train(trainer, range(4))
    state = trainer.optimizer.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    parameter = dict(trainer.models.policy.named_parameters())[name]
    assert parameter.dtype == torch.bfloat16
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()[name].float()
    moved = (state[f"{name}/master"] - original).abs()
    assert state[f"{name}/master"].dtype == torch.float32
    assert moved.median() > 5e-6
    assert torch.equal(parameter, state[f"{name}/master"].bfloat16())


def test_activation_checkpointing_gives_the_same_weights(tmp_path):
    found = set()
    folder = save_gpt2_with_dropout(tmp_path / "gpt2")
    for checkpointing in (False, True):
        trainer = TorchTrainer(folder, make_config({"gradient_checkpointing": checkpointing}))
        train(trainer, range(1))
        found.add(weights(trainer))
    assert len(found) == 1


def test_shared_prompts_of_an_unfit_model(tmp_path, caplog):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"shared_prompt=True.*sliding window"):
        TorchTrainer(tmp_path, make_config({"shared_prompt": True}))
    with caplog.at_level(logging.WARNING):
        trainer = TorchTrainer(tmp_path, make_config())
    assert caplog.text.count("sliding window") == 1
    trainer.begin_period(0, 0, 3)
    assert not trainer.accumulate(make_groups(trainer.grpo)).shared_prompt


def test_auto_shares_prompts_when_it_pays(folder):
    trainer = TorchTrainer(folder, make_config())
    groups = make_groups(trainer.grpo)
    groups[1].prompt_ids = tuple(range(3, 20)) * 3
    trainer.begin_period(0, 0, 3)
    for group in groups:
        for completion in group.completions if group.group == 0 else ():
            completion.ids_R = np.resize(completion.ids_R, 40)
            completion.logprobs_R = np.resize(completion.logprobs_R, 40)
    groups[0].prompt_ids = groups[0].prompt_ids[:1]
    assert [trainer.accumulate([group]).shared_prompt for group in groups[:2]] == [False, True]


def test_publish_gives_the_policy_in_the_rollout_dtype(folder, tmp_path):
    trainer = TorchTrainer(folder, make_config({"dtype": "float64"}))
    train(trainer, range(2))
    ref = trainer.publish(str(tmp_path))
    published = open_version(ref)
    assert ref.version == 2
    assert ref.checksum == checksum(published)
    assert torch.equal(published["model.norm.weight"], trainer.models.policy.model.norm.weight.float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_run_equals_the_uninterrupted_one(folder, reference, tmp_path, dtype):
    config = make_config({"dtype": dtype}, beta=0.1, lr_scheduler_type="cosine", total_periods=6, num_iterations=2)
    whole = TorchTrainer(folder, config, reference)
    expected = train(whole, range(4), updates=2)

    first = TorchTrainer(folder, config, reference)
    reports = train(first, range(2), updates=2)
    first.save(tmp_path / "checkpoint")
    drawn = torch.rand(3)
    second = TorchTrainer(folder, config, reference)
    second.begin_period(0, 0, 3)  # an unfinished period is dropped by load
    second.accumulate(make_groups(config.grpo))
    assert second.load(tmp_path / "checkpoint") == 2
    assert torch.equal(torch.rand(3), drawn)
    reports += train(second, range(2, 4), updates=2)
    assert reports == expected
    assert weights(second) == weights(whole)


def test_checkpoint_is_a_hugging_face_folder_without_pickles(folder, reference, tmp_path):
    trainer = TorchTrainer(folder, make_config(beta=0.1), reference)
    train(trainer, range(1))
    for _ in range(2):  # the second one replaces the first
        trainer.save(tmp_path / "checkpoint")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    files = sorted(p.relative_to(tmp_path / "checkpoint").as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert {p.rsplit(".")[-1] for p in files} <= {"json", "safetensors", "jinja"}
    assert "policy/chat_template.jinja" in files
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint" / "policy", dtype=torch.float32)
    assert checksum(named_weights(again)) == weights(trainer)
    assert "prl" not in (tmp_path / "checkpoint" / "policy" / "config.json").read_text()
    assert json.loads((tmp_path / "checkpoint" / "trainer.json").read_text())["version"] == 1
    assert "model.norm.weight/exp_avg" in load_file(tmp_path / "checkpoint" / "trainer.safetensors")


def test_checkpoint_errors_say_what_to_do(folder, reference, tmp_path):
    trainer = TorchTrainer(folder, make_config(beta=0.1), reference)
    trainer.save(tmp_path / "checkpoint")
    other = TorchTrainer(folder, make_config(beta=0.1))
    with pytest.raises(ValueError, match="reference_path"):
        other.load(tmp_path / "checkpoint")
    with pytest.raises(FileNotFoundError, match="no trainer checkpoint"):
        other.load(tmp_path)
    trainer.begin_period(0, 0, 3)
    with pytest.raises(RuntimeError, match="between periods"):
        trainer.save(tmp_path / "other")


def test_overflowing_gradient_stops_before_the_step(folder):
    trainer = TorchTrainer(folder, make_config())
    before = weights(trainer)
    groups = make_groups(trainer.grpo)
    groups[0].advantages_K = np.full(4, 1e38)
    trainer.begin_period(0, 0, 3)
    trainer.accumulate(groups)
    with pytest.raises(FloatingPointError, match="policy is unchanged"):
        trainer.finish_update()
    assert weights(trainer) == before
