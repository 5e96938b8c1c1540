"""Widgets without a browser: bundles, steering, throttling, clean end."""

import threading
import time
from types import SimpleNamespace

import pytest
from synthetic_run import synthetic_events, synthetic_records

from prl_notebook import views
from prl_notebook.attention.layout import pack
from prl_notebook.engine import events as ev
from prl_notebook.engine.live import LiveState
from prl_notebook.widgets import CompletionExplorer, Dashboard, LiveView, MaskExplorer, ReplayPlayer
from prl_notebook.widgets.live import UPDATES_PER_SECOND

WIDGET = "application/vnd.jupyter.widget-view+json"
EVENTS = synthetic_events()


class Recorded:
    """A session that only writes down what it is told."""

    parent = None

    def __init__(self):
        self.live, self.breakpoints, self.calls = LiveState(), [], []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.fixture
def dashboard():
    d = Dashboard(Recorded())
    yield d
    d.close()


def button(dashboard, label):
    return next(b for b in dashboard.children[0].children[0].children if getattr(b, "description", "") == label)


def until(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dashboard(Recorded()),
        lambda: LiveView(LiveState(), views.queue),
        lambda: MaskExplorer(pack([(0, range(5), [range(3), range(2)])], shared=True)),
        lambda: CompletionExplorer(synthetic_records()),
        lambda: CompletionExplorer(),
        lambda: ReplayPlayer(EVENTS, synthetic_records),
        lambda: ReplayPlayer([]),
    ],
    ids=["dashboard", "view", "mask", "completions", "no-completions", "replay", "empty-replay"],
)
def test_one_bundle_has_widget_html_and_text(make):
    widget = make()
    data, _ = widget._repr_mimebundle_()
    assert data.keys() >= {WIDGET, "text/html", "text/plain"}
    assert "prl" in data["text/html"] and "Widget" not in data["text/plain"]
    widget.close()


def test_buttons_only_call_methods_that_return_at_once(dashboard):
    for label in ("Step", "Run", "Pause", "Resume", "Stop"):
        button(dashboard, label).click()
    session = dashboard._session
    until(lambda: len(session.calls) == 5)
    assert session.calls[:4] == [
        ("step", ("period",), {"wait": False}),
        ("run", (10,), {}),
        ("pause", (), {}),
        ("resume", (), {}),
    ]
    assert session.calls[4][0] == "close"


def test_an_error_of_the_session_is_told_beside_the_buttons(dashboard):
    def refuse():
        raise RuntimeError("the session <runs>")

    dashboard._session.pause = refuse
    dashboard.children[0].children[0].children[0].click()
    again = Dashboard(dashboard._session)
    button(again, "Pause").click()
    assert "the session &lt;runs&gt;" in again._message.value
    again.close()


def test_breakpoints_are_listed_and_switched(dashboard):
    point = SimpleNamespace(on="group", name="zero variance", enabled=True)
    dashboard._session.breakpoints.append(point)
    dashboard._session.live(EVENTS[0])
    until(lambda: dashboard._breakpoints.children)
    dashboard._breakpoints.children[0].value = False
    assert point.enabled is False


def test_updates_are_throttled_and_the_latest_state_wins(dashboard):
    drawn = len(dashboard.update_seconds)
    start = time.monotonic()
    for event in EVENTS:
        dashboard._session.live(event)
        time.sleep(0.001)
    until(lambda: "finished in" in dashboard._panes.progress)
    elapsed = time.monotonic() - start
    assert len(dashboard.update_seconds) - drawn <= elapsed * UPDATES_PER_SECOND + 2
    assert "policy version 4" in dashboard._panes.status


def test_numbers_timeline_and_curves_take_turns(dashboard):
    until(lambda: len(dashboard.update_seconds) == 3)  # all of the state without a run
    sent = []
    parts = [{"status", "progress", "queue"}, {"timeline"}, {"curves"}]
    dashboard._panes.observe(
        lambda change: sent.append((len(dashboard.update_seconds), change["name"])), names=list(set().union(*parts))
    )
    end = next(i for i, e in enumerate(EVENTS) if isinstance(e, ev.PeriodFinished)) + 1
    for event in EVENTS[:end]:
        dashboard._session.live(event)
    until(lambda: "Period 0" in dashboard._panes.timeline and "finished in" in dashboard._panes.progress)
    until(lambda: "period 0 to 0" in dashboard._panes.curves)
    for update in {update for update, _ in sent}:
        shown = {name for at, name in sent if at == update}
        assert any(shown <= part for part in parts), shown


def test_all_is_up_to_date_soon_after_the_run_stands_still(dashboard, monkeypatch):
    monkeypatch.setattr("prl_notebook.widgets.dashboard.PICTURE_SECONDS", 1000.0)
    for event in EVENTS:
        dashboard._session.live(event)
    dashboard._session.live(ev.Paused(t=EVENTS[-1].t, period=3, boundary="period", where="told to"))
    until(lambda: "told to" in dashboard._panes.status and not dashboard._panes.live)
    until(lambda: "Period 3" in dashboard._panes.timeline and "period 0 to 3" in dashboard._panes.curves)
    dashboard._session.live(ev.RunClosed(t=EVENTS[-1].t, version=4))
    until(lambda: "closed" in dashboard._panes.status)
    assert "told to" not in dashboard._panes.status


def test_all_is_up_to_date_after_a_run_was_closed_under_way(dashboard):
    for event in (*EVENTS, ev.RunClosed(t=EVENTS[-1].t, version=4)):
        dashboard._session.live(event)
    until(lambda: "closed" in dashboard._panes.status)
    until(lambda: "Period 3" in dashboard._panes.timeline and "period 0 to 3" in dashboard._panes.curves)


def test_an_idle_dashboard_does_nothing(dashboard):
    dashboard._session.live(EVENTS[0])
    state = dashboard._session.live.state
    until(lambda: all(dashboard._drawn[part][0] is state for part in ("numbers", "timeline")))
    until(lambda: dashboard._drawn["curves"][0] is state.history)
    time.sleep(0.3)
    drawn = len(dashboard.update_seconds)
    time.sleep(0.6)
    assert len(dashboard.update_seconds) == drawn


def test_a_live_view_follows_its_run():
    live = LiveState()
    shown = LiveView(live, views.progress)
    for event in EVENTS:
        live(event)
    until(lambda: "finished in" in shown.detail)
    assert "finished in" in shown._repr_mimebundle_()[0]["text/html"]
    shown.close()


@pytest.mark.parametrize("make", [Dashboard, lambda session: LiveView(session.live, views.queue)])
def test_close_ends_the_updates(make):
    session = Recorded()
    widget = make(session)
    follower = next(t for t in threading.enumerate() if getattr(t, "_target", None) == widget._follower._follow)
    widget.close()
    session.live(EVENTS[0])
    follower.join(5)
    assert not follower.is_alive()


def test_replay_moves_through_time_and_loads_the_completions_of_the_period():
    asked = []
    player = ReplayPlayer(EVENTS, lambda period: asked.append(period) or synthetic_records(period))
    assert player.state.period == 3
    player._jump.value = player._scrubber.period_ends[1]
    assert player.state.period == 1 and asked == [3, 1]
    assert "period 1" in player._panes.status
    assert "finished in" in player._panes.progress
    assert "completion 0" in player._completions._panes.detail
    player._moment.value = 0
    assert "No period has started yet" in player._panes.queue


def test_completion_explorer_follows_its_menus():
    explorer = CompletionExplorer(synthetic_records(), "dapo")
    explorer._group.value, explorer._completion.value, explorer._color.value = 1, 2, "loss"
    assert "Group 1, completion 2" in explorer._panes.detail and "loss_type=" in explorer._panes.detail
    del explorer._records[2].completions[2].numbers["kl"]
    explorer._group.value, explorer._color.value = 2, "kl"
    assert "kl was not recorded" in explorer._panes.detail
