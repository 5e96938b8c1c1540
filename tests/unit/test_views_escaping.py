"""Text of datasets, models and exceptions never becomes markup."""

from dataclasses import replace

import pytest
from synthetic_run import synthetic_events, synthetic_records

from prl_notebook import views
from prl_notebook.attention.layout import pack
from prl_notebook.engine import events as ev
from prl_notebook.engine.records import CompletionRecord, GroupRecord
from prl_notebook.engine.run_state import reduce, state_of
from prl_notebook.views.attention_mask import mask_data

EVIL = "</pre></span>\"'><script>alert(1)</script><img src=x onerror=alert(2)>"


def evil_state():
    events = [replace(e, task=EVIL, model=EVIL, run_dir=EVIL, parent_run=EVIL) if isinstance(e, ev.RunStarted) else e
              for e in synthetic_events(2)]  # fmt: skip
    events[-1] = replace(events[-1], metrics={**events[-1].metrics, EVIL: 1.0, f"rewards/{EVIL}/mean": 1.0})
    state = state_of(events)
    for extra in (
        ev.Notice(text=EVIL),
        ev.Stalled(period=1, waiting=[EVIL], seconds=1.0),
        ev.ProcessDied(name="rollout-0", exit_code=1, requeued=[], log=EVIL, reason=EVIL),
        ev.Paused(period=1, boundary="group", where=EVIL, breakpoint=EVIL),
        ev.RunFailed(error=EVIL, traceback=EVIL),
    ):
        state = reduce(state, replace(extra, t=state.t))
    return replace(state, status="paused", config={"grpo": {"loss_type": EVIL}})


def evil_record() -> GroupRecord:
    base = synthetic_records()[1]
    c = CompletionRecord(
        EVIL, [1, 2], [EVIL, "\n" + EVIL], EVIL, 1.0, {EVIL: 1.0}, 0.5, {EVIL: EVIL},
        {k: v[:2] for k, v in base.completions[0].numbers.items()},
    )  # fmt: skip
    return replace(base, prompt=EVIL, prompt_tokens=[EVIL], prompt_ids=[1], completions=[c, c])


def assert_harmless(html: str) -> None:
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize("view", [views.status, views.curves])
def test_views_of_a_run(view):
    assert_harmless(view(evil_state()).html)


@pytest.mark.parametrize("view", [views.queue, views.timeline, views.progress])
def test_views_without_foreign_text_stay_clean(view):
    assert "<script" not in view(evil_state()).html


def test_views_of_completions():
    record = evil_record()
    assert_harmless(views.group(record).html)
    for color in ("advantage", "loss"):
        assert_harmless(views.tokens(record, 0, color, loss_type=EVIL).html)


def test_report():
    assert_harmless(views.report_html(evil_state(), [evil_record()]))


def test_mask_widget_data_is_plain_text():
    """The canvas draws token texts with textContent; the only HTML it is given is made by views."""
    record = evil_record()
    layout = pack([(record.group, record.prompt_ids, [c.ids for c in record.completions])], shared=True)
    assert mask_data(layout, [record])["texts"][0][0] == EVIL
    assert "<script" not in views.mask(layout).html
