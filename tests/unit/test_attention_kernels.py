"""Kernels against the dense reference on random queries, keys and values."""

import pytest
import torch

from prl_notebook.attention.kernels import Plan, choose, npu, partial, split
from prl_notebook.attention.layout import pack

CPU = torch.device("cpu")
SCALE = 0.3


def ragged(lengths_per_group, shared=True, tokens_per_row=None):
    groups = [
        (number, [1] * prompt, [[2] * n for n in lengths]) for number, (prompt, lengths) in enumerate(lengths_per_group)
    ]
    return pack(groups, shared=shared, tokens_per_row=tokens_per_row)


LAYOUTS = {
    "equal lengths": ragged([(9, [4, 4, 4])]),
    "ragged": ragged([(9, [1, 12, 3, 11, 3, 10]), (1, [2, 7]), (5, [6])]),
    "padded rows": ragged([(9, [4, 2]), (3, [8]), (6, [1, 1, 1])], tokens_per_row=16),
    "longer than a query slice": ragged([(300, [300, 310]), (2, [5])]),
    "longer than a causal block": ragged([(530, [3]), (2, [515, 600])]),
}


def random_qkv(layout, dtype=torch.float64, heads=4, kv_heads=2, size=8, device=CPU):
    (B, S), generator = layout.shape, torch.Generator().manual_seed(0)
    shapes = [(B, heads, S, size), (B, kv_heads, S, size), (B, kv_heads, S, size)]
    return [torch.randn(s, dtype=dtype, generator=generator).to(device).requires_grad_() for s in shapes]


def output_and_gradients(layout, kernel, qkv):
    real_BS = torch.from_numpy(layout.block_BS >= 0).to(qkv[0].device)
    o_BSHD = Plan.of(layout, qkv[0].device, kernel).attend(*qkv, SCALE, layer=0) * real_BS[..., None, None]
    weight = torch.randn(o_BSHD.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(o_BSHD)
    return [o_BSHD, *torch.autograd.grad((o_BSHD * weight).sum(), qkv)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("plain", [False, True])
def test_split_equals_dense(layout, plain, monkeypatch):
    if plain:  # what devices other than the CPU run
        monkeypatch.setattr(partial, "_flash", partial.plain)
        monkeypatch.setattr(partial, "_flash_backward", partial.plain_backward)
    qkv = random_qkv(layout)
    expected = output_and_gradients(layout, "dense", qkv)
    for ours, reference in zip(output_and_gradients(layout, "split", qkv), expected, strict=True):
        assert (ours - reference).abs().max() < 1e-12


def test_split_in_bfloat16_is_as_close_as_dense():
    layout = LAYOUTS["ragged"]
    exact = output_and_gradients(layout, "dense", random_qkv(layout))
    half = random_qkv(layout, torch.bfloat16)
    worst = {}
    for kernel in ("dense", "split"):
        pairs = zip(output_and_gradients(layout, kernel, half), exact, strict=True)
        worst[kernel] = max((ours.double() - reference).abs().max().item() for ours, reference in pairs)
    assert worst["split"] < 2 * worst["dense"]


def test_split_never_holds_queries_by_keys():
    layout = ragged([(256, [64] * 8)])
    largest = max(x.numel() for x in random_qkv(layout))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        output_and_gradients(layout, "split", random_qkv(layout))
    assert max(sizes) <= largest < layout.shape[1] ** 2


def test_spans_share_a_bucket_only_when_padding_stays_small():
    buckets = list(split.bucket([(0, 100), (100, 80), (180, 20), (200, 19)], CPU))
    assert [tokens.spans for tokens in buckets] == [2, 2]
    contiguous = next(split.bucket([(5, 3), (8, 3), (11, 3)], CPU))
    assert contiguous.at == slice(5, 14), "equal contiguous spans are not copied"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_forward_on_cpu_equals_dense():
    layout = LAYOUTS["padded rows"]
    q, k, v = (x.detach().float() for x in random_qkv(layout, size=16))
    outputs = [Plan.of(layout, CPU, kernel).attend(q, k, v, SCALE, layer=0) for kernel in ("dense", "flex")]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flex", "split"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_kernels_on_cuda_equal_dense(layout, kernel):
    qkv = random_qkv(layout, torch.float32, size=16, device=torch.device("cuda"))
    expected = output_and_gradients(layout, "dense", qkv)
    for ours, reference in zip(output_and_gradients(layout, kernel, qkv), expected, strict=True):
        assert (ours - reference).abs().max() < 2e-3  # TF32 products


def test_kernel_is_chosen_by_device_and_layout():
    shared, separate = ragged([(2, [1, 1])]), ragged([(2, [1, 1])], shared=False)
    assert choose(CPU, shared) == "split"
    assert choose(torch.device("cuda"), shared) == "flex"
    assert choose(torch.device("cuda"), shared, torch.float64) == "split"
    assert {choose(torch.device(d), separate) for d in ("cpu", "cuda")} == {"causal"}
    with pytest.raises(ValueError, match="'flash' is not one of"):
        Plan.of(shared, CPU, "flash")
    with pytest.raises(ValueError, match="responses packed before"):
        Plan.of(shared, CPU, "causal")


def test_npu_takes_the_full_mask_when_there_are_too_many_segments():
    few, many = ragged([(2, [1] * 1023)]), ragged([(2, [1] * 1024)])
    assert isinstance(npu.prepare(few, CPU), npu.Segments)
    assert isinstance(npu.prepare(many, CPU), npu.FullMask)
