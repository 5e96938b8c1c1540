"""The completions table: everything survives a round trip, under whatever names users give their functions."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq

from prl_notebook.engine.records import CompletionRecord, GroupRecord, completions_path, read_groups, write_groups


def record(functions: dict[str, float | None]) -> GroupRecord:
    completions = [
        CompletionRecord(
            text=f"answer {k}",
            ids=[5, 6, 7][: k + 1],
            tokens=["a", "b", "c"][: k + 1],
            finish_reason="stop",
            reward=None if k else 1.5,
            by_function=functions,
            advantage=0.25,
            extras={"note": f"n{k}", "group": "an extra column named as one of ours"},
            numbers={"policy": np.arange(k + 1, dtype=np.float32)},
            mask=np.ones(k + 1, bool),
        )
        for k in range(2)
    ]
    return GroupRecord(3, 1, 3, 0, 2, "1+2=", [9, 8], ["1", "2"], completions)


def test_records_survive_a_round_trip(tmp_path):
    path = completions_path(tmp_path, 3)
    for functions in ({"reward": 1.0, "prompt": None}, {"accuracy": 0.5}):
        write_groups(path, [record(functions)])
        (read,) = read_groups(path)
        expected = record(functions)
        assert (read.prompt, read.prompt_ids, read.micro_step) == (expected.prompt, expected.prompt_ids, 2)
        for got, want in zip(read.completions, expected.completions, strict=True):
            assert (got.text, got.ids, got.reward, got.by_function) == (want.text, want.ids, want.reward, functions)
            assert got.extras == want.extras
            np.testing.assert_array_equal(got.numbers["policy"], want.numbers["policy"])
            assert "reference" not in got.numbers


def test_the_table_has_trl_s_columns(tmp_path):
    path = completions_path(tmp_path, 12)
    write_groups(path, [record({"accuracy": 0.5})])
    assert path.name == "completions_00012.parquet"
    assert {"step", "prompt", "completion", "accuracy", "note", "advantage"} <= set(pq.read_schema(path).names)
