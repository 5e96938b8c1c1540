"""The shared-prompt benchmark's answer, on loads small enough for a test."""

import json

import pytest

from prl_notebook.bench import shared_prompt as bench


def test_points_have_the_promised_keys(monkeypatch):
    monkeypatch.setattr(bench, "SECONDS_PER_POINT", 0.0)
    monkeypatch.setattr(bench, "_end_to_end", dict)
    (point,) = json.loads(json.dumps(bench.shared_prompt([(96, 4, 6)])))["points"]
    assert {key: point[key] for key in "PRK"} == {"P": 96, "R": 4, "K": 6}
    assert point["ratio"] > 1, "a prompt of 96 tokens and answers of 4 must gain"
    assert 4 < point["flop_ratio"] < 6
    assert point["peak_bytes_separate"] > point["peak_bytes_shared"] > 0


@pytest.mark.slow
def test_a_preamble_gains_end_to_end(monkeypatch, no_orphans):
    monkeypatch.setattr(bench, "END_TO_END_PROMPTS", 2)
    answer = json.loads(json.dumps(bench.shared_prompt([])))
    assert answer["points"] == []
    assert answer["end_to_end"]["ratio"] > 1
