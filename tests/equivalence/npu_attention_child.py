"""Runs the npu kernel inside a transformers model, with a CPU reference behind the real operator; prints JSON.

The reference follows the documented semantics of npu_fusion_attention for the two forms in use: a full mask whose True
means masked (sparse_mode 1), and per-segment causality from the lower right with a compressed mask (sparse_mode 3).
"""

import json

import torch
import torch_npu
from shared_prompt_models import fixed_groups, float64_model, gradients, largest_difference, single_rows, weights

from prl_notebook.attention import hf
from prl_notebook.attention.kernels import Plan, npu
from prl_notebook.attention.layout import pack

CPU = torch.device("cpu")
calls = []


def reference(*args, **kwargs):
    """(o, and six results that the kernel does not read); arguments by the schema's names, defaults left out."""
    schema = torch.ops.npu.npu_fusion_attention.default._schema.arguments
    given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    query, key, value, heads, form = (given[a.name] for a in schema[:5])
    used = {a.name: given[a.name] for a in schema[5:] if a.name in given and given[a.name] != a.default_value}
    masked, scale, mode = used["atten_mask"], used["scale"], used["sparse_mode"]
    calls.append((form, mode))
    assert masked.dtype == torch.bool
    if (form, mode) == ("SBH", 1):
        assert set(used) == {"atten_mask", "scale", "sparse_mode"}
        S, B, width = query.shape
        heads_first = [x.view(S, B, -1, width // heads).permute(1, 2, 0, 3) for x in (query, key, value)]
        o = attention(*heads_first, masked, scale).permute(2, 0, 1, 3).reshape(S, B, width)
    else:
        assert (form, mode) == ("TND", 3)
        assert set(used) == {"atten_mask", "scale", "sparse_mode", "actual_seq_qlen", "actual_seq_kvlen"}
        assert query.shape[1] == heads
        assert torch.equal(masked, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        ends = (used["actual_seq_qlen"], used["actual_seq_kvlen"], used["actual_seq_kvlen"])
        segments = zip(*(segments_of(x, e) for x, e in zip((query, key, value), ends, strict=True)), strict=True)
        o = torch.cat([lower_right_causal(*segment, scale) for segment in segments])
    empty = o.new_empty(0)
    return o, empty, empty, empty, 0, 0, 0


def lower_right_causal(q, k, v, scale):
    masked = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
    return attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), masked, scale)[0].transpose(0, 1)


def attention(q, k, v, masked, scale):
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(masked, -torch.inf).softmax(-1) @ v


def segments_of(x, ends):
    return [x[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def errors(form, groups, tokens_per_row):
    """Largest log-prob and gradient differences from single rows."""
    model = float64_model("qwen3")
    logprob_T, expected = single_rows(model, groups)
    model.zero_grad()
    hf.use_layouts(model)
    layout = pack(groups, shared=True, tokens_per_row=tokens_per_row)
    state = npu.full_mask(layout, CPU) if form == "SBH" else npu.prepare(layout, CPU)
    h_TD = hf.decode(model, layout, Plan(layout, "npu", CPU, state)).flatten(0, 1)[torch.from_numpy(layout.source_T)]
    shared_T, _ = hf.token_logprobs(model, h_TD, torch.from_numpy(layout.target_ids_T))
    (shared_T * weights(groups)).sum().backward()
    return [(shared_T - logprob_T).abs().max().item(), largest_difference(gradients(model), expected)]


def wrong_keyword_is_rejected():
    q = torch.empty(4, 1, 8, device="meta", dtype=torch.bfloat16)
    try:
        torch_npu.npu_fusion_attention(q, q, q, 2, "SBH", attn_mask=None, scale=0.1)
    except (RuntimeError, TypeError) as error:
        return "attn_mask" in str(error)
    return False


if __name__ == "__main__":
    operators = torch.library.Library("npu", "IMPL")
    operators.impl("npu_fusion_attention", reference, "AutogradCPU")
    groups = fixed_groups(5)
    longest = max(len(prompt) + sum(map(len, responses)) for _, prompt, responses in groups)
    results = {
        f"{form}, {name}": errors(form, groups, tokens_per_row)
        for form in ("TND", "SBH")
        for name, tokens_per_row in (("one row", None), ("padded rows", longest + 3))
    }
    print(json.dumps({"errors": results, "forms": sorted(set(calls)), "rejects": wrong_keyword_is_rejected()}))
