"""A real Session steered from its dashboard in a real browser."""

from __future__ import annotations

import pytest
from test_browser_dashboard import clean, pane

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_a_click_on_step_makes_one_period_and_pause_works(notebooks, shots, tmp_path, app):
    cells = [
        f"from prl_notebook import Session\ns = Session(run_dir={str(tmp_path / 'run')!r})\ns.step()\ns.dashboard()",
        "s.mask(group=3)",
    ]
    with notebooks.open(cells, app, height=1700) as nb:
        nb.run_all()
        nb.wait_text("policy version 1", seconds=180)
        nb.wait_idle()
        nb.page.wait_for_timeout(1500)  # the front end opens its comm subshell
        nb.page.click(".prl-step")
        nb.wait_text("period 1 is finished", seconds=60)
        nb.page.wait_for_timeout(1500)
        assert "period 1 is finished" in pane(nb, "status"), "one click on Step must be exactly one period"

        nb.page.click(".prl-run")
        nb.wait_text("running, period 4", seconds=60)
        nb.page.screenshot(path=shots / f"session-{app}.png")
        nb.page.click(".prl-pause")
        nb.wait_text("paused", seconds=60)
        nb.page.wait_for_timeout(500)
        standing = pane(nb, "queue")
        nb.page.wait_for_timeout(1000)
        assert pane(nb, "queue") == standing
        canvas = nb.page.locator("canvas").first
        canvas.scroll_into_view_if_needed()
        canvas.hover(position={"x": 60, "y": 60})
        nb.wait_text("may")
        nb.page.click(".prl-stop")
        nb.wait_text("closed", seconds=60)
        clean(nb)
