"""The engine benchmark runs, and its ideal makespan is right."""

from __future__ import annotations

from prl_notebook.bench import engine as bench


def test_makespan_is_list_scheduling():
    assert bench.makespan([3, 1, 1, 1], 2) == 3
    assert bench.makespan([1, 1, 3], 2) == 4
    assert bench.makespan([2, 2, 2], 1) == 6


def test_two_emulated_workers_come_near_the_ideal(no_orphans, monkeypatch):
    monkeypatch.setattr(bench, "MEDIAN_SECONDS", 0.05)
    (efficiency,) = bench.engine((2,))["efficiency"].values()
    assert 0.3 < efficiency <= 1.0
