"""Shared prompts equal unpadded single rows: log-probs and gradients, float64, within 1e-10."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_prompt_models import (
    CONFIGS,
    fixed_groups,
    float64_model,
    gradients,
    largest_difference,
    ragged_groups,
    single_rows,
    weights,
)

from prl_notebook.attention import hf
from prl_notebook.attention.kernels import Plan
from prl_notebook.attention.layout import pack, split
from prl_notebook.attention.prefix import Prefix, split_group_backward

TOLERANCE = 1e-10
model_of = functools.cache(float64_model)
quick = settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
thorough = settings(quick, max_examples=30)


def check(model, groups, layout, **options):
    """Log-probs and gradient of one layout against single rows."""
    logprob_T, expected = single_rows(model, groups)
    model.zero_grad()
    shared_T, _ = hf.logprobs(model, layout, **options)
    assert (shared_T - logprob_T).abs().max() <= TOLERANCE
    (shared_T * weights(groups)).sum().backward()
    assert largest_difference(gradients(model), expected) <= TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
@given(groups=ragged_groups(), chunk=st.sampled_from([3, 2048]))
@quick
def test_split_kernel_equals_single_rows(name, groups, chunk):
    check(model_of(name), groups, pack(groups, shared=True), kernel="split", chunk=chunk)


@given(groups=ragged_groups(most_completions=6, most_groups=5), slack=st.integers(0, 40))
@quick
def test_several_padded_rows_equal_single_rows(groups, slack):
    longest = max(len(prompt) + sum(map(len, responses)) for _, prompt, responses in groups)
    layout = pack(groups, shared=True, tokens_per_row=longest + slack)
    for kernel in ("split", "dense"):
        check(model_of("qwen3"), groups, layout, kernel=kernel)


@given(groups=ragged_groups())
@quick
def test_separate_rows_take_the_same_path(groups):
    check(model_of("qwen3"), groups, pack(groups, shared=False))


@pytest.mark.parametrize("completions", range(1, 17))
def test_every_group_size(completions):
    groups = fixed_groups(completions)
    check(model_of("qwen3"), groups, pack(groups, shared=True))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kernel", ["dense", "split"])
def test_activation_checkpointing(name, kernel):
    model = float64_model(name)
    model.gradient_checkpointing_enable()
    groups = fixed_groups()
    check(model, groups, pack(groups, shared=True), kernel=kernel, chunk=5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plain_causal_mask_fails(name):
    """Negative control: the same check must notice when responses see each other."""
    model, groups = model_of(name), fixed_groups()
    layout = pack(groups, shared=True)
    logprob_T, expected = single_rows(model, groups)
    hf.use_layouts(model)
    model.zero_grad()
    h_BSD = hf.decode(model, layout, Plan(layout, "causal", torch.device("cpu"), None))
    h_TD = h_BSD.flatten(0, 1)[torch.from_numpy(layout.source_T)]
    leaking_T, _ = hf.token_logprobs(model, h_TD, torch.from_numpy(layout.target_ids_T))
    assert (leaking_T - logprob_T).abs().max() > 1e-3
    (leaking_T * weights(groups)).sum().backward()
    assert largest_difference(gradients(model), expected) > 1e-3


def backward_in_parts(model, groups, budget, **options):
    """Gradient of every group through split_group_backward, and the log-probs it saw."""
    model.zero_grad()
    weight_T, seen, at = weights(groups), [], 0

    def loss(logprob_T, entropy_T, layout):
        nonlocal at
        part = slice(at, at := at + len(logprob_T))
        seen.append(logprob_T.detach())
        return (logprob_T * weight_T[part]).sum()

    for group in groups:
        split_group_backward(model, group, loss, budget=budget, **options)
    return torch.cat(seen), gradients(model)


@pytest.mark.parametrize("name", CONFIGS)
@given(groups=ragged_groups(most_completions=6), budget=st.integers(1, 40))
@quick
def test_groups_larger_than_a_micro_step(name, groups, budget):
    model = model_of(name)
    logprob_T, expected = single_rows(model, groups)
    parts_T, gradient = backward_in_parts(model, groups, budget, chunk=4)
    assert (parts_T - logprob_T).abs().max() <= TOLERANCE
    assert largest_difference(gradient, expected) <= TOLERANCE


def test_groups_larger_than_a_micro_step_with_checkpointing():
    model, groups = float64_model("qwen3"), fixed_groups()
    _, expected = single_rows(model, groups)
    model.gradient_checkpointing_enable()
    _, gradient = backward_in_parts(model, groups, budget=12)
    assert largest_difference(gradient, expected) <= TOLERANCE
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        backward_in_parts(model, groups, budget=12)


def test_prefix_without_gradients_serves_a_reference_model():
    model, groups = model_of("llama"), fixed_groups()[:1]
    logprob_T, _ = single_rows(model, groups)
    with torch.no_grad():
        prefix = Prefix(model, groups[0][1])
        parts = [prefix.logprobs(layout)[0] for layout in split(groups, 12, shared=True)]
    assert len(parts) > 1
    assert (torch.cat(parts) - logprob_T).abs().max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["dense", "split"])
@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_equal_single_rows_thoroughly(name, kernel):
    @given(groups=ragged_groups(most_completions=16), rows=st.booleans(), budget=st.integers(1, 60))
    @thorough
    def run(groups, rows, budget):
        longest = max(len(prompt) + sum(map(len, responses)) for _, prompt, responses in groups)
        layout = pack(groups, shared=True, tokens_per_row=longest if rows else None)
        check(model_of(name), groups, layout, kernel=kernel)
        _, expected = single_rows(model_of(name), groups)
        assert largest_difference(backward_in_parts(model_of(name), groups, budget)[1], expected) <= TOLERANCE

    run()
