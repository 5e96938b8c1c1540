"""Parts of the trainer on megatron-core that need no second rank: scores, refusals, patches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_cases import SIZES
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from prl_notebook.config import Trainer

pytestmark = pytest.mark.megatron


@pytest.fixture
def lone_group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("chunk_bytes", [1, 200, 1 << 20])
def test_scores_in_chunks_equal_log_softmax(lone_group, monkeypatch, chunk_bytes):
    from prl_notebook.training.megatron import scores

    monkeypatch.setattr(scores, "CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    target, factor = torch.randint(0, 16, (7,)), torch.randn(7)
    logprob, entropy = scores.vocab_parallel_scores(hidden, weight, target, 0.7, lone_group)
    found = torch.autograd.grad((logprob * factor).sum(), (hidden, weight))

    wanted = (hidden @ weight.T / 0.7).log_softmax(-1)
    expected = torch.autograd.grad((wanted.gather(1, target[:, None])[:, 0] * factor).sum(), (hidden, weight))
    torch.testing.assert_close(logprob, wanted.gather(1, target[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(wanted.exp() * wanted).sum(-1))
    torch.testing.assert_close(found, expected)
    assert not entropy.requires_grad


def test_scores_of_no_token(lone_group):
    from prl_notebook.training.megatron.scores import vocab_parallel_scores

    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    logprob, _ = vocab_parallel_scores(hidden, weight, torch.zeros(0, dtype=torch.long), 1.0, lone_group)
    logprob.sum().backward()
    assert weight.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("hf", "sizes", "message"),
    [
        (GPT2Config(), {}, "knows llama, qwen2, qwen3, not model_type='gpt2'"),
        (Qwen3Config(**SIZES, attention_bias=True), {}, "cannot train a model with attention_bias"),
        (Qwen2Config(**SIZES, use_sliding_window=True), {}, "cannot train a model with use_sliding_window"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            {},
            "rope_type='dynamic'",
        ),
        (
            Qwen3Config(**SIZES),
            {"tensor_parallel": 4},
            "tensor_parallel=4 does not divide the model's num_key_value_heads=2",
        ),
        (
            Qwen3Config(**SIZES),
            {"pipeline_parallel": 4},
            "pipeline_parallel=4 does not divide the model's num_hidden_layers=2",
        ),
    ],
    ids=["architecture", "bias", "window", "rope", "heads", "layers"],
)
def test_models_and_sizes_that_cannot_work_are_named(hf, sizes, message):
    from prl_notebook.training.megatron.model import transformer_config

    with pytest.raises(ValueError, match=message):
        transformer_config(hf, Trainer(engine="megatron", **sizes), torch.float32)


def test_a_dtype_without_an_optimizer_is_refused():
    from prl_notebook.training.megatron.model import transformer_config

    with pytest.raises(ValueError, match=r"Trainer.dtype='float64'.*engine='torch'"):
        transformer_config(Qwen3Config(**SIZES), Trainer(engine="megatron"), torch.float64)


def test_the_patches_end_with_their_block():
    from prl_notebook.training.megatron.patches import megatron_on

    before = torch.cuda.current_device, torch.cuda.get_rng_state
    with megatron_on(torch.device("cpu")):
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).cuda().type() == "torch.cuda.FloatTensor"
    assert (torch.cuda.current_device, torch.cuda.get_rng_state) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
