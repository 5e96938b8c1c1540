"""The dashboard of a session with a vLLM worker, in a real browser."""

from __future__ import annotations

import importlib.util

import pytest
from small_runs import required
from test_browser_dashboard import clean, pane

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def test_the_dashboard_works_unchanged_and_shows_the_mismatch(notebooks, shots, tmp_path):
    required(importlib.util.find_spec("vllm") is not None, "vLLM is not installed; see the README's install lines")
    show = (
        "from prl_notebook import Rollout, Session\n"
        f"s = Session(rollout=Rollout(engine='vllm'), devices='cpu', run_dir={str(tmp_path / 'run')!r})\n"
        "s.step()\n"
        "s.dashboard()"
    )
    with notebooks.open([show], height=1700) as nb:
        nb.run_all()
        nb.wait_text("policy version 1", seconds=300)
        nb.wait_idle()
        nb.page.wait_for_timeout(1500)  # the front end opens its comm subshell
        nb.page.click(".prl-step")
        nb.wait_text("period 1 is finished", seconds=120)
        curves = pane(nb, "curves")
        assert "Sampler and trainer: log-prob difference" in curves
        assert "sampling/sampling_logp_difference/max" in curves
        assert "rollout-0" in pane(nb, "timeline")
        nb.page.screenshot(path=shots / "session-vllm.png")
        nb.page.click(".prl-stop")
        nb.wait_text("closed", seconds=60)
        clean(nb)
