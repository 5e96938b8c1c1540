"""The shared-prompt benchmark's answer, on a point small enough for a test."""

import json

from prl_notebook.bench import shared_prompt as bench


def test_answer_has_the_promised_keys(monkeypatch, no_orphans):
    monkeypatch.setattr(bench, "SECONDS_PER_POINT", 0.0)
    monkeypatch.setattr(bench, "END_TO_END_PROMPTS", 2)
    answer = json.loads(json.dumps(bench.shared_prompt([(96, 4, 6)])))
    assert answer["end_to_end"]["ratio"] > 1, "a preamble of 512 tokens must gain"
    (point,) = answer["points"]
    assert {key: point[key] for key in "PRK"} == {"P": 96, "R": 4, "K": 6}
    assert point["ratio"] > 1, "a prompt of 96 tokens and answers of 4 must gain"
    assert 4 < point["flop_ratio"] < 6
    assert point["peak_bytes_separate"] > point["peak_bytes_shared"] > 0
