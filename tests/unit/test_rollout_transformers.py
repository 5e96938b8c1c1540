"""The transformers rollout worker against plain forward passes and `model.generate` of the same models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_models import CONFIGS, build, request, run, sample_groups, save, start
from transformers import AutoModelForCausalLM, BambaConfig, BloomConfig, GenerationConfig, MambaConfig, PreTrainedModel

from prl_notebook.engine.types import Group, Sampling
from prl_notebook.rollout.batched_model import BatchedModel
from prl_notebook.rollout.sampling import uniforms, warp
from prl_notebook.rollout.transformers_worker import TransformersWorker
from prl_notebook.rollout.worker import GroupDone, RowsDone
from prl_notebook.weights import checksum, named_weights, publish

PROMPTS = [(5, 9, 13), tuple(range(2, 38)), (30,), (7, 7, 8, 20, 21, 3, 4, 39, 11, 12)]
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}


def plain_logprobs(model: PreTrainedModel, group: Group, sampling: Sampling) -> list[np.ndarray]:
    """Per completion, from one unpadded single-row forward pass without a cache."""
    out = []
    for completion in group.completions:
        ids = torch.tensor([*group.prompt_ids, *completion.ids_R.tolist()])
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
        sampled = torch.from_numpy(completion.ids_R).long()[:, None]
        out.append(warp(logits, sampling).log_softmax(-1).gather(1, sampled)[:, 0].numpy())
    return out


def assert_logprobs_are_those_of(model: PreTrainedModel, groups: dict[int, Group], sampling: Sampling) -> None:
    for group in groups.values():
        for completion, expected in zip(group.completions, plain_logprobs(model, group, sampling), strict=True):
            np.testing.assert_allclose(completion.logprobs_R, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_equal_plain_single_row_forward(name: str, reproducible: bool, tmp_path: Path) -> None:
    model = build(name)
    worker = start(model, tmp_path, reproducible=reproducible)
    requests = [request(index, prompt, **SAMPLING) for index, prompt in enumerate(PROMPTS)]
    groups = sample_groups(worker, *requests)
    assert sorted(groups) == [0, 1, 2, 3]
    assert len({tuple(c.ids_R) for group in groups.values() for c in group.completions}) > 8
    assert_logprobs_are_those_of(model, groups, requests[0].sampling)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_generate(name: str, tmp_path: Path) -> None:
    model = build(name)
    worker = start(model, tmp_path)
    groups = sample_groups(worker, *(request(i, prompt, 2, top_k=1) for i, prompt in enumerate(PROMPTS)))
    for index, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        for completion in groups[index].completions:
            assert completion.ids_R.tolist() == out[0, len(prompt) :].tolist()


def test_first_tokens_have_the_models_frequencies(tmp_path: Path) -> None:
    model = build("qwen3")
    worker = start(model, tmp_path, max_rows=4000)
    group = sample_groups(worker, request(0, PROMPTS[0], completions=4000, length=1))[0]
    with torch.no_grad():
        expected = 4000 * model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount([c.ids_R[0] for c in group.completions], minlength=len(expected))
    often = expected > 5
    assert ((counts - expected)[often] ** 2 / expected[often]).sum() < often.sum() + 4 * np.sqrt(2 * often.sum())


def test_each_row_draws_with_its_own_seed(tmp_path: Path) -> None:
    model = build("gpt2")
    group = sample_groups(start(model, tmp_path), request(3, PROMPTS[0], completions=6, length=1))[3]
    with torch.no_grad():
        cdf = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).cumsum(-1)
    for sample, completion in enumerate(group.completions):
        u = torch.tensor(uniforms(3000 + sample, 1))
        assert completion.ids_R.tolist() == torch.searchsorted(cdf, u, right=True).tolist()


def test_every_end_token_ends_a_completion_and_is_kept(tmp_path: Path) -> None:
    model = build("qwen3")
    ends = [1, 4, 17, 23]  # 1 is also the pad token
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=1)
    groups = sample_groups(start(model, tmp_path), *(request(i, prompt, 16) for i, prompt in enumerate(PROMPTS)))
    reasons = {}
    for completion in (c for group in groups.values() for c in group.completions):
        assert not set(completion.ids_R[:-1].tolist()) & set(ends)
        ended = completion.ids_R[-1] in ends
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.ids_R) == 24
        reasons.setdefault(completion.finish_reason, set()).add(int(completion.ids_R[-1]))
    assert reasons["stop"] == set(ends)
    assert "length" in reasons


def test_a_single_end_token_given_as_integer(tmp_path: Path) -> None:
    model = build("qwen3")
    model.generation_config = GenerationConfig(eos_token_id=17)
    group = sample_groups(start(model, tmp_path), request(0, PROMPTS[0], completions=32))[0]
    assert {17} == {int(c.ids_R[-1]) for c in group.completions if c.finish_reason == "stop"}


def test_groups_are_reported_when_done_and_join_a_running_batch(tmp_path: Path) -> None:
    model = build("qwen3")
    model.generation_config = GenerationConfig(eos_token_id=None)
    worker = start(model, tmp_path)
    worker.submit(request(0, PROMPTS[1], length=60))
    worker.submit(request(1, PROMPTS[0], length=5))
    events = [event for _ in range(5) for event in worker.step()]
    assert [e.group.group for e in events if isinstance(e, GroupDone)] == [1]
    worker.submit(request(2, PROMPTS[3], length=8))
    assert worker.has_work
    assert [e.group.group for e in run(worker) if isinstance(e, GroupDone)] == [2, 0]


def test_rows_are_reported_as_they_finish(tmp_path: Path) -> None:
    model = build("qwen3")
    model.generation_config = GenerationConfig(eos_token_id=[1, 4, 17, 23])
    worker = start(model, tmp_path)
    worker.submit(request(0, PROMPTS[0], completions=16))
    events = run(worker)
    progress = [event for event in events if isinstance(event, RowsDone)]
    group = events[-1].group
    assert len(progress) > 2
    assert [event.done for event in progress] == sorted({event.done for event in progress})
    assert (progress[-1].done, progress[-1].tokens) == (16, sum(group.lengths))


def test_groups_wait_for_free_rows(tmp_path: Path) -> None:
    model = build("qwen3")
    worker = start(model, tmp_path, max_rows=8)
    requests = [request(index, PROMPTS[index % 4], completions=3, **SAMPLING) for index in range(9)]
    groups = sample_groups(worker, *requests)
    assert sorted(groups) == list(range(9))
    assert_logprobs_are_those_of(model, groups, requests[0].sampling)


def test_different_sampling_in_one_batch(tmp_path: Path) -> None:
    model = build("llama_tied")
    worker = start(model, tmp_path)
    hot, cold = request(0, PROMPTS[0], temperature=1.5), request(1, PROMPTS[1], temperature=0.5, top_k=3)
    groups = sample_groups(worker, hot, cold)
    assert_logprobs_are_those_of(model, {0: groups[0]}, hot.sampling)
    assert_logprobs_are_those_of(model, {1: groups[1]}, cold.sampling)


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "qwen3"])
def test_load_replaces_everything(name: str, tmp_path: Path) -> None:
    """Tied heads, caches and checksum all follow the new version."""
    old, new = build(name, seed=0), build(name, seed=1)
    worker = start(old, tmp_path)
    before = sample_groups(worker, request(0, PROMPTS[1]))
    ref = publish(named_weights(new), 1, tmp_path)
    ack = worker.load(ref)
    assert (ack.version, ack.checksum) == (1, ref.checksum)
    after = sample_groups(worker, request(0, PROMPTS[1], version=1))
    assert_logprobs_are_those_of(old, before, Sampling())
    assert_logprobs_are_those_of(new, after, Sampling())


def test_load_is_refused_with_groups_in_flight(tmp_path: Path) -> None:
    model = build("qwen3")
    worker = start(model, tmp_path)
    ref = publish(named_weights(model), 1, tmp_path)
    worker.submit(request(0, PROMPTS[0]))
    with pytest.raises(RuntimeError, match=r"load\(version 1\): 1 groups wait"):
        worker.load(ref)
    worker.step()
    with pytest.raises(RuntimeError, match="4 completions are being sampled under version 0"):
        worker.load(ref)
    worker.abort()
    assert not worker.has_work
    assert worker.load(ref).version == 1


def test_aborted_groups_are_not_reported(tmp_path: Path) -> None:
    model = build("qwen3")
    worker = start(model, tmp_path)
    worker.submit(request(0, PROMPTS[0]))
    worker.step()
    worker.submit(request(1, PROMPTS[1]))
    worker.abort()
    groups = sample_groups(worker, request(2, PROMPTS[2]))
    assert list(groups) == [2]
    assert_logprobs_are_those_of(model, groups, Sampling())


def test_requests_that_cannot_be_served(tmp_path: Path) -> None:
    path = save(build("gpt2"), tmp_path)
    worker = TransformersWorker(path, max_rows=4)
    with pytest.raises(ValueError, match="asks for policy version 0, but version None is loaded"):
        worker.submit(request(0, PROMPTS[0]))
    worker.load(publish(named_weights(build("gpt2")), 3, tmp_path))
    with pytest.raises(ValueError, match="asks for policy version 2, but version 3 is loaded"):
        worker.submit(request(0, PROMPTS[0], version=2))
    with pytest.raises(ValueError, match=r"a prompt of 250 tokens and max_completion_length=24 exceed .* 256 tokens"):
        worker.submit(request(0, (3,) * 250, version=3))
    with pytest.raises(ValueError, match="wants 5 completions; max_rows=4"):
        worker.submit(request(0, PROMPTS[0], completions=5, version=3))
    with pytest.raises(ValueError, match="group 0 has an empty prompt"):
        worker.submit(request(0, (), version=3))


def test_long_prompts_are_prefilled_over_several_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prl_notebook.rollout.transformers_worker.PREFILL_TOKENS", 80)
    model = build("qwen3")
    worker = start(model, tmp_path)
    requests = [request(index, tuple(range(2, 38)) * (1 + index % 3)) for index in range(6)]
    assert_logprobs_are_those_of(model, sample_groups(worker, *requests), Sampling())


def test_loading_weights_from_disk_equals_the_model(tmp_path: Path) -> None:
    model = build("qwen3")
    worker = TransformersWorker(save(model, tmp_path))
    assert worker.load(publish(named_weights(model), 0, tmp_path)).checksum == checksum(named_weights(model))


MAMBA = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)
BAMBA = BambaConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2,
    num_key_value_heads=1, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=4, attn_layer_indices=[1],
)  # fmt: skip
BLOOM = BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2)


@pytest.mark.parametrize("config", [MAMBA, BAMBA, BLOOM], ids=["mamba", "bamba", "bloom"])
def test_models_that_cannot_be_batched_are_refused_by_name(config) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(NotImplementedError, match=type(model).__name__):
        BatchedModel(model)
