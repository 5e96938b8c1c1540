"""Mask, completions, replay and report in a real browser."""

import numpy as np
import pytest

from prl_notebook.attention.layout import pack
from prl_notebook.attention.mask import dense_mask
from prl_notebook.views.attention_mask import mask_data
from prl_notebook.widgets.bundle import static

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

LAYOUT = """
from synthetic_run import *
from prl_notebook.attention.layout import pack
from prl_notebook.widgets import *
records = synthetic_records(3, groups=3, generations=4)
layout = pack([(r.group, r.prompt_ids, [c.ids for c in r.completions]) for r in records], shared=True)
"""
HUGE = "MaskExplorer(pack([(g, range(100), [range(g, g + 116) for _ in range(8)]) for g in range(4)], shared=True))"


def clean(nb):
    assert nb.failed_requests == []
    assert nb.errors == []


@pytest.mark.parametrize("app", ["lab", "notebook"])
def test_mask_answers_to_hover(notebooks, shots, app):
    with notebooks.open([LAYOUT + "MaskExplorer(layout, records)"], app) as nb:
        nb.run_all()
        nb.wait_text("Point at a pair")
        canvas = nb.page.locator("canvas").first
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        side = box["width"] - 30

        def point(q, k, size):
            canvas.hover(position={"x": 30 + side * (k + 0.5) / size, "y": 30 + side * (q + 0.5) / size})
            return nb.page.locator(".prl-mask .readout").inner_text()

        size = int(nb.page.locator(".prl-mask-picture h4").first.inner_text().split(":")[1].split()[0])
        text = point(20, 3, size)
        assert "(group 0, completion 0, position" in text and "(group 0, prompt, position 3)" in text
        assert "✓ may attend: the completion's own prompt" in text
        assert "✗ may not attend: the key comes later" in point(3, 20, size)
        assert "another completion of the same prompt" in point(25, 10, size)
        nb.page.screenshot(path=shots / f"mask-{app}-light.png")
        canvas.dblclick(position={"x": 150, "y": 150})
        canvas.dblclick(position={"x": 150, "y": 150})
        nb.theme("Dark")
        nb.page.wait_for_timeout(300)
        nb.page.screenshot(path=shots / f"mask-{app}-dark-zoomed.png")
        clean(nb)


def test_a_cell_that_fails_ends_the_wait_for_it(notebooks):
    with notebooks.open(["undefined_name", "1"]) as nb:
        nb.run_all()
        with pytest.raises(RuntimeError, match="NameError: name 'undefined_name' is not defined"):
            nb.wait_text("never")
        with pytest.raises(RuntimeError, match="NameError"):
            nb.wait_done()


def test_mask_of_4096_tokens_does_not_freeze(notebooks, shots):
    with notebooks.open([LAYOUT + HUGE]) as nb:
        nb.run_all()
        nb.wait_text("Point at a pair")
        assert "4,112 tokens" in nb.outputs()
        median = nb.page.evaluate(
            """async () => {
                const canvas = document.querySelector('canvas'), box = canvas.getBoundingClientRect();
                const frame = () => new Promise(requestAnimationFrame);
                const times = [];
                for (let i = 0; i < 20; i++) {
                    const start = performance.now();
                    const at = {clientX: box.left + 50 + 5 * i, clientY: box.top + 400 - 5 * i, bubbles: true};
                    canvas.dispatchEvent(new PointerEvent('pointermove', at));
                    await frame(); await frame();
                    times.push(performance.now() - start);
                }
                return times.sort((a, b) => a - b)[10];
            }"""
        )
        nb.page.screenshot(path=shots / "mask-4096.png")
        assert median < 200, f"{median} ms for two frames"
        clean(nb)


def test_javascript_and_python_agree_on_the_mask(notebooks):
    """Every pair of a layout with several groups, rows, and padding."""
    groups = [(0, [1, 2, 3], [[4, 5], [6], [7, 8, 9]]), (1, [1], [[2], [3]]), (2, [1, 2], [[3, 4, 5]])]
    script = """async ([source, layout]) => {
        const m = await import(URL.createObjectURL(new Blob([source], {type: 'text/javascript'})));
        const ix = m.index(layout), all = [...Array(ix.size).keys()];
        return [all.map(q => all.map(k => m.attends(ix, q, k)[0])), [...ix.position]];
    }"""
    with notebooks.open(["1"]) as nb:
        for layout in (pack(groups, shared=True, tokens_per_row=9), pack(groups, shared=False)):
            allowed, position = nb.page.evaluate(script, [static("mask.js"), mask_data(layout)])
            rows, width = layout.shape
            expected = np.zeros((rows * width, rows * width), bool)
            for row in range(rows):
                real = layout.block_BS[row] >= 0
                at = slice(row * width, (row + 1) * width)
                expected[at, at] = dense_mask(layout, row) & real[:, None] & real[None, :]
            assert np.array_equal(np.array(allowed), expected)
            assert position == layout.position_ids_BS.reshape(-1).tolist()


def test_completions_and_replay(notebooks, shots):
    cells = [LAYOUT + "CompletionExplorer(records, 'dapo')", "ReplayPlayer(synthetic_events(5), synthetic_records)"]
    with notebooks.open(cells, height=1900) as nb:
        nb.run_all()
        nb.wait_text("finished in")
        nb.page.locator(".widget-dropdown select").nth(2).select_option("loss")
        nb.wait_text("before the period's normaliser) under loss_type='dapo'")
        token = nb.page.locator(".prl-tokens .token.pos, .prl-tokens .token.neg").nth(6)
        token.hover()
        tip = token.evaluate("e => getComputedStyle(e, '::after').content")
        assert "policy" in tip and "entropy" in tip and "loss" in tip
        nb.page.screenshot(path=shots / "completions-light.png")
        nb.page.locator(".widget-dropdown select").nth(3).select_option("end of period 1")
        nb.page.wait_for_function(
            "() => document.querySelector('.prl-progress h3').innerText.startsWith('Period 1 finished')"
        )
        nb.theme("Dark")
        nb.page.wait_for_timeout(500)
        nb.page.screenshot(path=shots / "replay-dark.png")
        clean(nb)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_needs_nothing_but_itself(notebooks, shots, tmp_path, scheme):
    write = f"""
from pathlib import Path
from prl_notebook.engine.run_state import state_of
from prl_notebook.views import report_html
Path({str(tmp_path / "report.html")!r}).write_text(report_html(state_of(synthetic_events(50)), records))"""
    with notebooks.open([LAYOUT + write]) as nb:
        nb.run_all()
        nb.wait_idle()
        nb.page.wait_for_function("() => document.querySelector('.jp-OutputArea-output')?.innerText > 0")
        page = nb.page.context.browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        problems = []
        page.on("console", lambda m: problems.append(m.text))
        page.on("requestfailed", lambda r: problems.append(r.url))
        page.goto(f"file://{tmp_path}/report.html")
        assert page.locator("script").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "fits 1280 px"
        page.screenshot(path=shots / f"report-{scheme}.png", full_page=True)
        page.close()
        assert problems == []
