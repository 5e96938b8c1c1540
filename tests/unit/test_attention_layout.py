"""Layouts: positions, targets, rows, budgets, costs; checked against the definition token by token."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl_notebook.attention.costs import ModelDims, attention_pairs, flop_ratio, flops, pays
from prl_notebook.attention.layout import Layout, pack, repack, split
from prl_notebook.attention.mask import dense_mask, tiles
from prl_notebook.engine.types import Completion, Group

GROUPS = [(3, [11, 12, 13], [[1, 2], [4]]), (5, [21], [[7, 8, 9]])]
DIMS = ModelDims(layer_parameters=1000, attention_width=64, head_parameters=100)

ids = st.integers(0, 99)
groups_of_any_shape = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.lists(ids, min_size=1, max_size=8),
        st.lists(st.lists(ids, min_size=1, max_size=8), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)
quick = settings(max_examples=50, deadline=None, derandomize=True)


def test_shared_layout_by_hand():
    layout = pack(GROUPS, shared=True)
    assert layout.input_ids_BS.tolist() == [[11, 12, 13, 1, 2, 4, 21, 7, 8, 9]]
    assert layout.position_ids_BS.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 3]]
    assert layout.response_BS.tolist() == [[0, 0, 0, 1, 1, 2, 0, 1, 1, 1]]
    assert layout.block_BS.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1, 1]]
    assert layout.sequences == ((3, 0), (3, 1), (5, 0))
    assert layout.target_ids_T.tolist() == [1, 2, 4, 7, 8, 9]
    assert layout.source_T.tolist() == [2, 3, 2, 6, 7, 8], "the last prompt token predicts every response's first"
    assert layout.sequence_T.tolist() == [0, 0, 1, 2, 2, 2]
    assert layout.token_T.tolist() == [0, 1, 0, 0, 1, 2]


def test_separate_layout_by_hand():
    layout = pack(GROUPS, shared=False)
    assert layout.input_ids_BS.tolist() == [[11, 12, 13, 1, 2], [11, 12, 13, 4, 0], [21, 7, 8, 9, 0]]
    assert layout.source_T.tolist() == [2, 3, 7, 10, 11, 12]
    assert layout.target_ids_T.tolist() == [1, 2, 4, 7, 8, 9]
    assert layout.response_BS.tolist()[1] == [0, 0, 0, 1, -1]


def test_groups_of_the_engine_are_accepted():
    completions = [Completion(np.array(r, np.int32), np.zeros(len(r), np.float32), "stop") for r in GROUPS[0][2]]
    group = Group(period=0, group=3, version=0, prompt_ids=(11, 12, 13), completions=completions)
    assert pack([group], shared=True).to_dict() == pack(GROUPS[:1], shared=True).to_dict()


@given(groups_of_any_shape, st.booleans(), st.integers(0, 20))
@quick
def test_target_arrays_do_not_depend_on_the_layout(groups, shared, slack):
    longest = max(len(p) + sum(map(len, rs)) for _, p, rs in groups)
    layout = pack(groups, shared=shared, tokens_per_row=longest + slack if shared else None)
    flat = layout.input_ids_BS.reshape(-1)
    assert layout.target_ids_T.tolist() == [t for _, _, rs in groups for r in rs for t in r]
    expected_sources = [t for _, prompt, rs in groups for r in rs for t in ([prompt[-1], *r][: len(r)])]
    assert flat[layout.source_T].tolist() == expected_sources
    assert layout.tokens == sum(len(p) * (1 if shared else len(rs)) + sum(map(len, rs)) for _, p, rs in groups)
    restored = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    for name in ("input_ids_BS", "position_ids_BS", "block_BS", "response_BS", "source_T", "sequence_T", "token_T"):
        assert np.array_equal(getattr(restored, name), getattr(layout, name)), name


@given(groups_of_any_shape, st.integers(1, 60), st.booleans())
@quick
def test_split_keeps_every_completion_once_and_the_budget(groups, budget, shared):
    layouts = split(groups, budget, shared=shared)
    numbered = [(number, prompt, rs) for number, (_, prompt, rs) in enumerate(groups)]
    layouts = split(numbered, budget, shared=shared)
    trained = sorted(pair for layout in layouts for pair in layout.sequences)
    assert trained == [(number, k) for number, _, rs in numbered for k in range(len(rs))]
    for layout in layouts:
        rows, width = layout.shape
        assert rows * width <= budget or len(layout.sequences) == 1
    again = split(numbered, budget, shared=shared)
    assert [layout.to_dict() for layout in again] == [layout.to_dict() for layout in layouts]


@given(groups_of_any_shape, st.booleans(), st.booleans())
@quick
def test_repacked_is_packed_the_other_way(groups, shared, before):
    numbered = [(number, prompt, rs) for number, (_, prompt, rs) in enumerate(groups)]
    other = repack(pack(numbered, shared=before), shared=shared)
    assert other.to_dict() == pack(numbered, shared=shared).to_dict()


def test_repacked_parts_of_a_group_keep_their_completion_numbers():
    part = split([(0, [1, 2, 3, 4], [[5, 6], [7, 8], [9]])], budget=8, shared=True)[1]
    assert repack(part, shared=False).sequences == ((0, 2),)


def test_split_cuts_a_large_group_between_completions():
    layouts = split([(0, [1, 2, 3, 4], [[5, 6], [7, 8], [9]])], budget=8, shared=True)
    assert [layout.input_ids_BS[0].tolist() for layout in layouts] == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9]]
    assert [layout.sequences for layout in layouts] == [((0, 0), (0, 1)), ((0, 2),)]


def test_mask_by_hand():
    mask = dense_mask(pack([(0, [1, 2], [[3, 4], [5]])], shared=True), row=0)
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


@given(groups_of_any_shape, st.booleans())
@quick
def test_tiles_and_counts_equal_the_dense_mask(groups, shared):
    layout = pack(groups, shared=shared)
    pairs = 0
    for row in range(layout.shape[0]):
        drawn = np.zeros((layout.shape[1],) * 2, int)
        for tile in tiles(layout, row):
            ones = np.ones((tile.queries[1] - tile.queries[0], tile.keys[1] - tile.keys[0]), int)
            drawn[slice(*tile.queries), slice(*tile.keys)] += np.tril(ones) if tile.kind == "causal" else ones
        real = layout.block_BS[row] >= 0
        assert np.array_equal(drawn[real][:, real], dense_mask(layout, row)[real][:, real])
        pairs += drawn.sum()
    assert attention_pairs(layout) == pairs


def test_flops_by_hand():
    layout = pack([(0, [1, 2], [[3], [4]])], shared=True)
    forward = 2 * 1000 * 4 + 4 * 64 * (3 + 2 * (2 + 1)) + 2 * 100 * 2
    assert flops(layout, DIMS) == 3 * forward


def test_sharing_pays_for_long_prompts_only():
    long_prompt, long_answers = [(0, list(range(90)), [[1] * 9] * 8)], [(0, [1, 2], [[1] * 90] * 8)]
    assert pays(long_prompt, DIMS)
    assert not pays(long_answers, DIMS)
    assert not pays([(0, list(range(90)), [[1]])], DIMS), "one completion shares nothing"
    assert 1 < flop_ratio(long_answers, DIMS) < 1.1


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([(4, [], [[1]])], "group 4 has an empty prompt"),
        ([(4, [1], [])], "group 4 has no response"),
        ([(4, [1], [[1], []])], "group 4, completion 1 is empty"),
        ([(4, [1, 2], [[1, 2, 3]])], "group 4 has 5 tokens, above tokens_per_row=4"),
    ],
)
def test_bad_groups_are_named(groups, message):
    with pytest.raises(ValueError, match=message):
        pack(groups, shared=True, tokens_per_row=4)


def test_layouts_need_no_torch():
    code = (
        "import sys, prl_notebook.attention.layout, prl_notebook.attention.mask, prl_notebook.attention.costs\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
