"""Our losses, gradients and advantages against TRL's GRPOTrainer on the same batch.

Shapes: B groups, K completions, S = B * K rows, P padded prompt, R padded completion.
"""

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from training_cases import EOS, PAD, VOCABULARY, make_config, make_groups, save_tiny_qwen3
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from prl_notebook.config import GRPO
from prl_notebook.training.advantages import group_advantages
from prl_notebook.training.losses import LossInputs, token_losses
from prl_notebook.training.metrics import UpdateMetrics
from prl_notebook.training.normalisers import denominator, sequence_weights
from prl_notebook.training.torch_trainer import TorchTrainer

LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
}
KL = {"no-kl": {"beta": 0.0}, "kl": {"beta": 0.3}, "kl-uncorrected": {"beta": 0.3, "use_bias_correction_kl": False}}


CASES = {f"{loss}-{kl}": LOSSES[loss] | KL[kl] for loss in LOSSES for kl in ("no-kl", "kl")}
CASES["dapo-kl-uncorrected"] = LOSSES["dapo"] | KL["kl-uncorrected"]
CASES["dapo-clip-higher-no-kl"] = {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return save_tiny_qwen3(root / "policy", 0), save_tiny_qwen3(root / "reference", 1)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request, folders, tmp_path_factory):
    """(fields of GRPO, TRL's trainer for them)"""
    return request.param, build_trl(folders, tmp_path_factory.mktemp("trl"), make_config(**request.param).grpo)


def build_trl(folders, tmp_path, grpo: GRPO) -> GRPOTrainer:
    """A real GRPOTrainer in float64, ready for compute_loss."""
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")),
        unk_token="w0",
        eos_token=f"w{EOS}",
        pad_token=f"w{PAD}",
    )
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": torch.float64},
        per_device_train_batch_size=grpo.completions_per_period,
        num_generations=grpo.num_generations,
        max_completion_length=grpo.max_completion_length,
        loss_type=grpo.loss_type,
        importance_sampling_level=grpo.importance_sampling_level,
        beta=grpo.beta,
        use_bias_correction_kl=grpo.use_bias_correction_kl,
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon_high,
        temperature=grpo.temperature,
    )
    trainer = GRPOTrainer(
        model=str(folders[0]),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * grpo.completions_per_period}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    if trainer.ref_model is not None:
        other = type(trainer.ref_model).from_pretrained(folders[1], dtype=torch.float64)
        trainer.ref_model.load_state_dict(other.state_dict())
    trainer.model.eval()
    return trainer


def padded_inputs(groups, grpo: GRPO) -> dict[str, torch.Tensor]:
    """TRL's batch: prompts padded left, completions right."""
    rows = [(g.prompt_ids, c, a) for g in groups for c, a in zip(g.completions, g.advantages_K, strict=True)]
    P, R = max(len(p) for p, _, _ in rows), max(len(c.ids_R) for _, c, _ in rows)
    inputs = {
        "prompt_ids": torch.full((len(rows), P), PAD),
        "prompt_mask": torch.zeros(len(rows), P, dtype=torch.long),
        "completion_ids": torch.full((len(rows), R), PAD),
        "completion_mask": torch.zeros(len(rows), R, dtype=torch.long),
        "advantages": torch.tensor([a for _, _, a in rows], dtype=torch.float64),
    }
    for i, (prompt_ids, completion, _) in enumerate(rows):
        inputs["prompt_ids"][i, P - len(prompt_ids) :] = torch.tensor(prompt_ids)
        inputs["prompt_mask"][i, P - len(prompt_ids) :] = 1
        n = len(completion.ids_R)
        inputs["completion_ids"][i, :n] = torch.from_numpy(completion.ids_R)
        inputs["completion_mask"][i, :n] = int(
            completion.finish_reason == "stop" or not grpo.mask_truncated_completions
        )
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    return inputs


def trl_logprobs(trainer, model, inputs) -> torch.Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_period_gradient_equals_trl(folders, case):
    """The whole trainer, on-policy: loss, gradient and metrics of one period, truncated completions masked."""
    fields, trl = case
    config = make_config({"dtype": "float64"}, mask_truncated_completions=True, **fields)
    groups = make_groups(config.grpo)
    trl._metrics["eval"].clear()
    inputs = padded_inputs(groups, config.grpo)
    if config.grpo.beta:
        with torch.no_grad():
            inputs["ref_per_token_logps"] = trl_logprobs(trl, trl.ref_model, inputs)
    expected_loss = trl.compute_loss(trl.model, inputs)
    expected_loss.backward()
    expected = gradients(trl.model)

    ours = TorchTrainer(folders[0], config, reference_path=folders[1])
    ours.begin_period(0, 0, len(groups))
    for group in groups:
        ours.accumulate([group])
    divisor = denominator(config.grpo, len(groups), ours._period.metrics.tokens)
    flat = torch.cat([p.grad.flatten() for p in ours.models.policy.parameters()]) / divisor
    expected_flat = torch.cat([expected[name].flatten() for name, _ in ours.models.policy.named_parameters()])
    assert (flat - expected_flat).norm() <= 1e-6 * expected_flat.norm()
    metrics = ours.finish_update().metrics
    assert metrics["grad_norm"] == pytest.approx(expected_flat.norm().item(), rel=1e-6)
    assert metrics["loss"] == pytest.approx(expected_loss.item(), rel=1e-6, abs=1e-9)
    logged = trl._metrics["eval"]
    for name in ("entropy", "kl", "cispo_clip_ratio", "clip_ratio/region_mean"):
        assert (name in metrics) == (name in logged)
        if name in logged:
            assert metrics[name] == pytest.approx(logged[name][0], rel=1e-6, abs=1e-9)


def test_off_policy_loss_equals_trl(case, monkeypatch):
    """An old policy far from the policy, so that clipping works; gradient with respect to the log-probs."""
    fields, trl = case
    grpo = make_config(**fields).grpo
    trl._metrics["eval"].clear()
    inputs = padded_inputs(make_groups(grpo), grpo)
    with torch.no_grad():
        policy = trl_logprobs(trl, trl.model, inputs).double()
    noise = torch.Generator().manual_seed(3)
    mask = inputs["completion_mask"].bool()
    inputs["old_per_token_logps"] = policy + 0.3 * torch.randn(policy.shape, generator=noise, dtype=torch.float64)
    inputs["ref_per_token_logps"] = policy + 0.3 * torch.randn(policy.shape, generator=noise, dtype=torch.float64)

    leaf = policy.clone().requires_grad_()
    entropy = torch.zeros_like(policy)
    monkeypatch.setattr(trl, "_get_per_token_logps_and_entropies", lambda *args, **kwargs: (leaf, entropy, None))
    expected = trl.compute_loss(trl.model, inputs)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)

    policy_T = policy[mask].requires_grad_()
    x = LossInputs(
        policy_T=policy_T,
        old_T=inputs["old_per_token_logps"][mask],
        reference_T=inputs["ref_per_token_logps"][mask] if grpo.beta else None,
        sampler_T=inputs["old_per_token_logps"][mask],
        sequence_T=mask.nonzero()[:, 0],
        mask_T=torch.ones_like(policy_T, dtype=torch.bool),
        kl_mask_T=torch.ones_like(policy_T, dtype=torch.bool),
        advantage_S=inputs["advantages"],
    )
    result = token_losses(x, grpo)
    total = (result.loss_T * sequence_weights(grpo, x.tokens_S)[x.sequence_T]).sum()
    divisor = denominator(grpo, grpo.prompts_per_period, len(policy_T))
    (gradient_T,) = torch.autograd.grad(total / divisor, policy_T)
    torch.testing.assert_close(total / divisor, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient_T, expected_gradient[mask], rtol=1e-9, atol=1e-12)

    totals = UpdateMetrics(grpo.importance_sampling_level == "sequence", grpo.loss_type == "cispo")
    totals.add(x, result, torch.zeros_like(policy_T), total.item())
    metrics = totals.result(divisor)
    logged = {name: values[0] for name, values in trl._metrics["eval"].items()}
    compared = {name: metrics[name] for name in logged}
    assert compared == pytest.approx(logged, rel=1e-6)
    assert any(value > 0 for name, value in logged.items() if "clip" in name)


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_advantages_equal_trl(folders, tmp_path, scale_rewards):
    """TRL's own scoring of a batch, with None rewards and an abstaining group."""
    rewards = [1.0, 0.0, None, 0.5, 2.0, 2.0, 2.0, 2.0, None, None, None, None, 0.3, None, 0.9, 0.1]
    grpo = make_config(prompts_per_period=4, scale_rewards=scale_rewards).grpo
    trl = build_trl(folders, tmp_path, grpo)
    trl.scale_rewards = scale_rewards
    trl.reward_funcs = [lambda completions, **_: rewards]
    torch.manual_seed(0)
    trl.model.eval()
    trl.num_generations_eval = grpo.num_generations
    batch = trl._generate_and_score_completions([{"prompt": "w3 w4"}] * len(rewards))
    grouped = np.array([np.nan if r is None else r for r in rewards]).reshape(4, 4)
    ours = np.concatenate([group_advantages(rewards_K, grpo) for rewards_K in grouped])
    np.testing.assert_allclose(ours, batch["advantages"].double().numpy(), rtol=1e-5, atol=1e-6)
