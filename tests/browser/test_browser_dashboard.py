"""The dashboard in a real browser: it moves, its buttons steer, it costs little, and it is readable."""

import json
import time

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

SHOW = "from feeder import Feeder\nfrom prl_notebook.widgets import Dashboard\ns = Feeder()\nd = Dashboard(s)\nd"


def pane(nb, name):
    return nb.page.locator(f"[data-pane={name}]").first.inner_text()


def shown(nb):
    nb.run_all()
    nb.wait_text("No period has started yet")
    nb.wait_idle()
    nb.page.wait_for_timeout(1500)  # the front end opens its comm subshell


def moves(nb):
    """Within 4 seconds, however busy the machine is: the page draws less often where drawing is slow."""
    before = pane(nb, "queue")
    nb.page.wait_for_function(
        "before => document.querySelector('[data-pane=queue]').innerText !== before", arg=before, timeout=4000
    )


def clean(nb):
    assert nb.failed_requests == []
    assert nb.errors == []


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_buttons_steer_and_panes_move(notebooks, shots, app):
    with notebooks.open([SHOW], app, height=1500) as nb:
        shown(nb)
        nb.page.click(".prl-step")
        nb.wait_text("running, period 0")
        moves(nb)
        nb.page.screenshot(path=shots / f"dashboard-{app}-light.png")
        nb.wait_text("period 0 is finished")
        assert "policy version 1" in pane(nb, "status")
        nb.page.wait_for_timeout(800)
        assert "period 0 is finished" in pane(nb, "status"), "one click on Step must be exactly one period"

        nb.page.click(".prl-run")
        nb.wait_text("running, period 1")
        nb.page.click(".prl-run")
        nb.wait_text("pause() or wait() first")
        nb.page.click(".prl-pause")
        nb.wait_text("told to pause")
        standing = pane(nb, "queue")
        nb.page.wait_for_timeout(800)
        assert pane(nb, "queue") == standing
        nb.theme("Dark")
        nb.page.wait_for_timeout(300)
        nb.page.screenshot(path=shots / f"dashboard-{app}-dark.png")
        clean(nb)


def test_moves_while_a_cell_runs_and_says_when_buttons_act(notebooks):
    cells = [SHOW, "s.run(3)\nimport time\ntime.sleep(4)\nprint('cell over', s.calls)"]
    with notebooks.open(cells) as nb:
        nb.run_all()
        nb.wait_text("running, period 0")
        moves(nb)
        assert "they act when it ends" in nb.outputs()
        nb.page.click(".prl-pause")
        nb.wait_text("cell over")
        nb.wait_text("told to pause")
        clean(nb)


def test_costs_little(notebooks):
    idle = "import time\nt = time.process_time()\ntime.sleep(3)\nprint('cpu', time.process_time() - t)"
    with notebooks.open([SHOW, idle]) as nb:
        nb.run_all()
        nb.wait_text("cpu")
        assert float(nb.outputs().split("cpu")[1].split()[0]) < 0.1, "an idle dashboard must cost nothing"
        nb.page.wait_for_timeout(1500)
        nb.page.click(".prl-run")
        nb.wait_text("running, period 0")
        start = time.perf_counter()
        nb.page.wait_for_timeout(4000)
        messages = [size for t, size in nb.messages if t > start]
        assert len(messages) / 4 <= 20
        nb.page.click(".prl-pause")
        nb.wait_text("told to pause")
        size = nb.save().stat().st_size
        assert size < 5 * 100_000, f"{size} bytes saved for the five views of a dashboard"
        assert json.loads(nb.path.read_text())["cells"][0]["outputs"][0]["data"].keys() >= {"text/html", "text/plain"}
        clean(nb)
