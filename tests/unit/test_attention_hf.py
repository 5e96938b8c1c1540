"""Layouts through transformers models: what is refused, by name; temperature, entropy, and what never exists."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from prl_notebook.attention import hf
from prl_notebook.attention.costs import ModelDims
from prl_notebook.attention.layout import pack

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPS = [(0, [3, 4, 5], [[6, 7], [8], [9, 10, 11]])]


def tiny(config=None):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES))


@pytest.mark.parametrize("shared", [True, False])
def test_last_feed_forward_runs_where_its_output_is_read(shared):
    model, layout = tiny(), pack(GROUPS, shared=shared)
    expected_T, _ = hf.logprobs(tiny(), layout)
    tokens = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.up_proj.register_forward_hook(
            lambda m, args, _, n=number: tokens.update({n: args[0][..., 0].numel()})
        )
    hf.use_layouts(model)
    logprob_T, _ = hf.logprobs(model, layout)
    assert tokens == {0: layout.input_ids_BS.size, 1: len(set(layout.source_T.tolist()))}
    assert (logprob_T - expected_T).abs().max() < 1e-5
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.model.layers[-1].mlp.down_proj.weight)
    assert not torch.equal(hf.logprobs(other, layout)[0], logprob_T), "a copy uses its own weights"
    assert torch.equal(hf.logprobs(model, layout)[0], logprob_T)
    model.set_attn_implementation("sdpa")
    model(torch.tensor([[1, 2, 3]]))
    assert tokens[1] == 3, "plain forwards compute every token"


@pytest.mark.parametrize("kind", [MixtralConfig, Qwen3MoeConfig])
def test_last_feed_forward_may_be_a_mixture_of_experts(kind):
    config = kind(**SIZES, num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    separate, shared = (hf.logprobs(tiny(config), pack(GROUPS, shared=shared))[0] for shared in (False, True))
    assert (separate - shared).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=4096), "sliding window of 4096"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        (Gemma2Config(), "sliding_attention"),
        (GptOssConfig(), "sliding_attention"),
        (Qwen3NextConfig(), "linear_attention"),
        (MambaConfig(), "mamba"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_unsupported_attention_is_named(config, reason):
    assert reason in hf.check_supported(config)


@pytest.mark.parametrize(
    "config", [LlamaConfig(), Qwen3Config(), Qwen2Config(), GPT2Config(), MistralConfig(sliding_window=None)]
)
def test_supported_attention(config):
    assert hf.check_supported(config) is None


def test_a_model_with_its_own_attention_is_refused():
    model = tiny(BloomConfig(vocab_size=37, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="BloomForCausalLM does not use transformers' attention interface"):
        hf.logprobs(model, pack(GROUPS, shared=True))


def test_a_sliding_window_model_runs_separate_rows_only():
    model = tiny(MistralConfig(**SIZES, sliding_window=4))
    with pytest.raises(ValueError, match=r"sliding window of 4 .* Use separate rows"):
        hf.logprobs(model, pack(GROUPS, shared=True))
    logprob_T, _ = hf.logprobs(model, pack(GROUPS, shared=False))
    logits_SV = model(torch.tensor([[3, 4, 5, 9, 10, 11]])).logits[0, 2:5]
    assert torch.allclose(logprob_T[3:], logits_SV.log_softmax(-1)[range(3), [9, 10, 11]], atol=1e-6)


def test_dropout_is_refused_in_training_and_can_be_disabled():
    model = tiny(GPT2Config(vocab_size=37, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)).train()
    with pytest.raises(ValueError, match=r"dropout 0\.1 in training mode"):
        hf.logprobs(model, pack(GROUPS, shared=True))
    attention_only = tiny(LlamaConfig(**SIZES, attention_dropout=0.2)).train()
    with pytest.raises(ValueError, match=r"attention dropout is 0\.2"):
        hf.logprobs(attention_only, pack(GROUPS, shared=True))
    for each in (model, attention_only):
        hf.disable_dropout(each)
        hf.logprobs(each, pack(GROUPS, shared=True))


def test_a_plain_forward_after_sharing_says_what_to_do():
    model = tiny()
    hf.logprobs(model, pack(GROUPS, shared=True))
    with pytest.raises(ValueError, match='set_attn_implementation\\("sdpa"\\)'):
        model(torch.tensor([[1, 2]]))
    model.set_attn_implementation("sdpa")
    model(torch.tensor([[1, 2]]))


def test_the_attention_name_is_not_saved_with_the_model(tmp_path):
    model = tiny()
    hf.logprobs(model, pack(GROUPS, shared=True))
    model.save_pretrained(tmp_path)
    assert hf.NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("chunk", [2, 100])
def test_temperature_and_entropy(chunk):
    model = tiny().double()
    layout = pack(GROUPS, shared=True)
    logprob_T, entropy_T = hf.logprobs(model, layout, temperature=0.7, chunk=chunk)
    distribution = torch.distributions.Categorical(
        logits=model.get_output_embeddings()(hf.hidden_states(model, layout)) / 0.7
    )
    assert torch.allclose(logprob_T, distribution.log_prob(torch.from_numpy(layout.target_ids_T)), atol=1e-12)
    assert torch.allclose(entropy_T, distribution.entropy(), atol=1e-12)
    assert logprob_T.requires_grad
    assert not entropy_T.requires_grad


class Largest(TorchDispatchMode):
    """Remembers the most rows of any tensor as wide as the vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[1] == self.vocabulary:
            self.rows = max(self.rows, result.shape[0])
        return result


def test_logits_exist_for_one_chunk_of_responses_at_a_time():
    model = tiny(LlamaConfig(**SIZES | {"vocab_size": 101}))
    layout = pack([(0, list(range(60)), [list(range(30))] * 4)], shared=True)
    with Largest(vocabulary=101) as seen:
        logprob_T, _ = hf.logprobs(model, layout, chunk=25)
        logprob_T.sum().backward()
    assert len(logprob_T) == 120
    assert seen.rows == 25


def test_final_softcap_is_applied_and_logit_scales_are_refused():
    model = tiny(Gemma2Config(**SIZES, head_dim=8, sliding_window=64, final_logit_softcapping=2.0))
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    logprob_T, _ = hf.logprobs(model, pack(GROUPS, shared=False))
    logits_SV = model(torch.tensor([[3, 4, 5, 6, 7]])).logits[0, 2:4]
    assert torch.allclose(logprob_T[:2], logits_SV.log_softmax(-1)[range(2), [6, 7]], atol=1e-5)
    scaled = tiny()
    scaled.config.logit_scale = 0.1
    with pytest.raises(ValueError, match="logit_scale"):
        hf.logprobs(scaled, pack(GROUPS, shared=True))


def test_dims_count_what_tokens_are_multiplied_with():
    attention, mlp = 16 * 16 * 2 + 16 * 8 * 2, 3 * 16 * 24
    dims = ModelDims.from_model(tiny())
    assert dims == ModelDims(2 * (attention + mlp), attention_width=2 * 2 * 8, head_parameters=16 * 37)
    gpt2 = tiny(GPT2Config(vocab_size=37, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2))
    assert ModelDims.from_model(gpt2).layer_parameters == 12 * 16 * 16
