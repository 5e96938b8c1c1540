"""A real Session steered from its dashboard in a real browser."""

from __future__ import annotations

import re
import time

import psutil
import pytest
from test_browser_dashboard import clean, pane

from prl_notebook.engine import events as ev

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

DRAWN_MS = 1500
"""After this the page shows where a run stands, even on a busy machine; while one goes on it draws less often."""


def wait_period(nb, at_least):
    """Until the page shows a run at this period or a later one: it draws the newest state and may pass over some."""
    deadline = time.monotonic() + 60
    while not ((shown := re.search(r"running, period (\d+)", pane(nb, "status"))) and int(shown[1]) >= at_least):
        assert time.monotonic() < deadline, pane(nb, "status")
        nb.page.wait_for_timeout(200)


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_a_click_on_step_makes_one_period_and_pause_works(notebooks, shots, tmp_path, app):
    cells = [
        f"from prl_notebook import Session\ns = Session(run_dir={str(tmp_path / 'run')!r})\ns.step()\ns.dashboard()",
        "s.mask(group=3)",
        "s.progress()",
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
        live_view = nb.page.locator("[data-pane=detail] .prl-progress")
        live_view.scroll_into_view_if_needed()
        nb.page.wait_for_timeout(DRAWN_MS)
        assert "Period 1 finished" in live_view.inner_text(), "a view on its own follows the run, too"

        nb.page.click(".prl-run")
        wait_period(nb, 4)
        nb.page.screenshot(path=shots / f"session-{app}.png")
        nb.page.click(".prl-pause")
        nb.wait_text("paused", seconds=60)
        nb.page.wait_for_timeout(DRAWN_MS)
        standing = pane(nb, "queue")
        nb.page.wait_for_timeout(1000)
        assert pane(nb, "queue") == standing
        canvas = nb.page.locator("canvas").first
        canvas.scroll_into_view_if_needed()
        canvas.hover(position={"x": 60, "y": 60})
        readout = nb.page.locator(".prl-mask .readout").inner_text()
        assert "query: token" in readout and "key: token" in readout and "may" in readout
        nb.page.click(".prl-stop")
        nb.wait_text("closed", seconds=60)
        clean(nb)


DEBUGGED = """
from prl_notebook import Session, Trainer

def nothing(completions, **_):
    return [0.0] * len(completions)

s = Session(
    reward_funcs=nothing, run_dir={run_dir!r}, prompts_per_period=6, num_generations=2, max_completion_length=16,
    trainer=Trainer(tokens_per_microstep=128),
)
s.dashboard()
"""


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_single_steps_breakpoints_and_runs_are_exact(notebooks, shots, tmp_path, app):
    path = tmp_path / "run" / "events.jsonl"

    def happened(kind):
        return [e for e in ev.read_events(path) if isinstance(e, kind)]

    with notebooks.open([DEBUGGED.format(run_dir=str(path.parent))], app, height=1500) as nb:

        def press(button, kind, count):
            """Press a button; after it `count` more events of this kind have happened, and then it stands still."""
            before, pauses = len(happened(kind)), len(happened(ev.Paused))
            nb.page.click(f".prl-{button}")
            deadline = time.monotonic() + 60
            while len(happened(ev.Paused)) == pauses:
                assert time.monotonic() < deadline, nb.outputs()
                nb.page.wait_for_timeout(100)
            nb.page.wait_for_timeout(DRAWN_MS)
            assert len(happened(kind)) == before + count

        nb.run_all()
        nb.wait_text("ready; next: period 0", seconds=180)
        nb.page.wait_for_timeout(1500)  # the front end opens its comm subshell
        unit, menu = nb.page.locator(".widget-dropdown select").all()

        unit.select_option("group")
        press("step", ev.MicroStep, 1)
        press("step", ev.MicroStep, 1)
        assert [len(step.groups) for step in happened(ev.MicroStep)] == [1, 1]
        unit.select_option("microstep")
        press("step", ev.MicroStep, 1)
        assert len(happened(ev.MicroStep)[-1].groups) > 1, "as many groups as the token budget holds"
        assert "next:" in pane(nb, "status")

        menu.select_option("zero variance")
        nb.wait_text("break on group: zero variance")
        press("run", ev.PeriodFinished, 0)
        nb.wait_text("paused at breakpoint zero variance")
        assert "is scored; next: train it" in pane(nb, "status")
        nb.page.screenshot(path=shots / f"breakpoint-{app}.png")
        nb.page.locator(".widget-checkbox input").uncheck()
        nb.page.locator("input[type=number]").fill("2")
        nb.page.keyboard.press("Enter")
        press("run", ev.PeriodFinished, 2)

        nb.page.click(".prl-stop")
        nb.wait_text("closed", seconds=60)
        assert not [p.pid for p in happened(ev.ProcessStarted) if psutil.pid_exists(p.pid)]
        clean(nb)
