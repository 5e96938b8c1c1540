"""What views show, from events alone: no kernel, no process, no browser."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console
from synthetic_run import synthetic_events, synthetic_records

from prl_notebook import views
from prl_notebook.attention.costs import ModelDims
from prl_notebook.attention.layout import pack
from prl_notebook.engine import events as ev
from prl_notebook.engine.run_state import RunState, reduce, state_of
from prl_notebook.views import analysis, base, terminal
from prl_notebook.views.attention_mask import MAX_SHAPES
from prl_notebook.views.metric_curves import CHARTS, MAX_POINTS, charts
from prl_notebook.views.scrub import KEPT_EVERY, Scrubber
from prl_notebook.widgets.dashboard import run_views

EVENTS = synthetic_events()
FINISHED = state_of(EVENTS)
LIVE = next(s for s in map(Scrubber(EVENTS).at, [e.t for e in EVENTS if e.t > 5.8]) if s.current.count("trained") >= 5)
"""Period 3 with 5 or more of its 16 groups trained."""
OF_STATE = [views.status, views.queue, views.timeline, views.progress, views.curves]


class Balanced(HTMLParser):
    """Checks that tags are closed in order, and counts classes."""

    VOID = ("meta", "br", "link")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.classes = [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.classes += dict(attrs).get("class", "").split()
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def count(view, css):
    return Balanced(str(view.body)).classes.count(css)


@pytest.mark.parametrize("view", OF_STATE)
@pytest.mark.parametrize(
    "state", [RunState(), state_of(EVENTS[:1]), LIVE, FINISHED], ids=["empty", "start", "live", "end"]
)
def test_views_of_any_state_are_sound_and_pure(view, state):
    first, second = view(state), view(state)
    assert first == second
    Balanced(str(first.body))
    assert first.text
    bundle = first._repr_mimebundle_()
    assert bundle.keys() == {"text/html", "text/plain"}
    assert bundle["text/html"].startswith("<style>")
    assert "http" not in re.sub(r"http://www.w3.org", "", bundle["text/html"]), "a view must not load anything"


def test_queue_shows_every_group_in_its_stage():
    view = views.queue(LIVE)
    assert count(view, "chip") == 16
    for stage in ("waiting", "generating", "scoring", "queued", "trained"):
        assert len(re.findall(rf'class="stage {stage}"', view.body)) == 1
        assert f"{stage:<10} {LIVE.current.count(stage):>4}" in view.text
    assert "policy version 3" in view.body
    busy = next(g for g in LIVE.current.groups if g.status == "generating")
    assert f"{busy.group} · w{busy.worker} · {busy.done}/8" in view.body


def test_a_chip_carries_the_policy_version_that_sampled_its_group():
    groups = LIVE.current.groups
    sampled = sum(g.version is not None for g in groups)
    assert 0 < sampled < len(groups)
    assert views.queue(LIVE).body.count("<small>v3</small>") == sampled
    trained = [g for g in groups if g.status == "trained"]
    assert f"{trained[0].group} · {base.number(trained[0].reward_mean)} v3, " in views.queue(LIVE).text
    older = replace(LIVE.current, groups=(replace(groups[0], version=2), *groups[1:]))
    assert views.queue(replace(LIVE, periods=(older,))).body.count("<small>v2</small>") == 1


def test_progress_says_when_the_whole_run_is_expected_to_end():
    events = synthetic_events(4)
    first = next(i for i, e in enumerate(events) if isinstance(e, ev.PeriodStarted))
    events.insert(first, ev.Resumed(t=events[first].t, goal="10 periods", periods=10))
    state = state_of(events)
    assert state.periods_to_go == 6
    lengths = [p.finished_t - p.started_t for p in state.periods]
    assert analysis.remaining_of_run(state) == pytest.approx(6 * np.mean(lengths))
    assert f"6 periods to go, ends in about {base.rough(6 * np.mean(lengths))}" in views.progress(state).text
    assert "6 periods to go, ends in about" in views.progress(state).body
    ends = [i for i, e in enumerate(events) if isinstance(e, ev.PeriodFinished)]
    during = state_of(events[: ends[-1] - 20])
    earlier = lengths[:-1]
    left = max(0.0, np.median(earlier) - (during.t - during.current.started_t)) + 6 * np.mean(earlier)
    assert during.periods_to_go == 7 and analysis.remaining_of_run(during) == pytest.approx(left)
    assert "10 periods to go, its end is not known yet" in views.progress(state_of(events[: first + 2])).text
    paused = reduce(state, ev.Paused(t=state.t, period=4, boundary="period", where="told to"))
    assert "to go" not in views.progress(paused).text
    assert "to go" not in views.progress(reduce(paused, ev.Resumed(t=state.t, goal="3 groups"))).text


def test_stragglers_are_named():
    late = next(g for g in LIVE.current.groups if g.status == "generating")
    later = replace(LIVE, t=LIVE.t + 60)
    assert f"group {late.group} on rollout-{late.worker}" in views.queue(later).text
    assert "Straggler" in views.queue(later).body
    assert analysis.stragglers(state_of(EVENTS[:20]).current, 1e6) == [], "nothing to compare with yet"


def test_a_group_that_went_out_again_says_so():
    worker = LIVE.current.groups[0].worker
    lost = [g.group for g in LIVE.current.groups if g.status == "generating"]
    died = ev.ProcessDied(t=LIVE.t, name=f"rollout-{worker}", exit_code=-9, requeued=lost, log="x.log", reason="killed")
    state = reduce(LIVE, died)
    state = reduce(state, ev.GroupDispatched(t=LIVE.t, period=3, group=lost[0], worker=1 - worker, version=3))
    assert "sent 2 times" in views.queue(state).body
    assert "died: killed" in views.status(state).text


def test_timeline_says_who_waits_and_what_synchronous_costs():
    view = views.timeline(FINISHED, periods=2)
    assert len(re.findall("<h4>Period", view.body)) == 2
    period = FINISHED.current
    costs = analysis.costs(period, FINISHED.t, workers=2)
    last_group = max(g.finished_t for g in period.groups) - min(g.dispatched_t for g in period.groups)
    training = sum(m.end - m.start for m in period.micro_steps)
    rest = period.finished_t - period.micro_steps[-1].end
    assert costs.synchronous == pytest.approx(last_group + training + rest)
    assert costs.synchronous > costs.seconds
    assert f"{costs.synchronous / costs.seconds:.2f}x" in view.text
    assert "trainer waited" in view.text and "(fence:" in view.text
    assert count(views.timeline(FINISHED, 1), "generate") == 16 + 1, "16 groups and the legend"


def test_idle_time_and_waits_add_up():
    costs = analysis.costs(FINISHED.current, FINISHED.t, workers=2)
    waited = sum(w.seconds for w in costs.waits if w.lane == "trainer")
    assert waited == pytest.approx(costs.trainer_idle * costs.seconds, abs=0.05 * costs.seconds)
    for w in range(2):
        assert sum(x.seconds for x in costs.waits if x.lane == f"rollout-{w}") <= costs.seconds
    assert 0 < costs.overlap < costs.seconds


def test_the_synchronous_schedule_is_called_by_its_name():
    state = state_of(synthetic_events(2, schedule="synchronous"))
    assert "Synchronous schedule: the trainer started after the last group" in views.timeline(state).text
    assert analysis.costs(state.current, state.t, 2).overlap == pytest.approx(0, abs=1e-9)


def test_progress_compares_with_the_period_before():
    view = views.progress(LIVE)
    assert f"trained {LIVE.current.count('trained')}/16" in view.text and "left" in view.text
    assert "reward" in view.text and "before" in view.text
    assert "finished in" in views.progress(FINISHED).text
    closed = reduce(LIVE, ev.RunClosed(t=LIVE.t, version=3))
    assert "not finished: the run was closed" in views.progress(closed).text


def test_curves_say_that_a_loss_of_zero_is_expected():
    view = views.curves(FINISHED)
    assert "A loss of 0 is expected here" in view.body
    for section in ("train", "stability", "performance"):
        assert f"<h4>{section} " in view.body
    assert sum(len(c.series) for c in charts(FINISHED)) == len(FINISHED.last_metrics), "no metric is left out"


def test_a_metric_nobody_foresaw_is_still_shown():
    state = replace(FINISHED, history=((0, {"my/metric": 1.0}), (1, {"my/metric": None})))
    assert [c.section for c in charts(state)] == ["more"]
    assert "my/metric" in views.curves(state).body


def test_a_fork_is_drawn_beside_its_origin():
    fork = state_of(synthetic_events(6, seed=1))
    assert "the run this one was forked from" in views.curves(fork, FINISHED).body
    assert "forked from" not in views.curves(fork).body


def test_curves_figure_has_the_same_series():
    figure = views.curves_figure(FINISHED)
    assert {t.name for t in figure.data} == set(FINISHED.last_metrics)


def test_every_chart_has_a_known_section():
    assert {c[0] for c in CHARTS} <= {"train", "evaluation", "stability", "performance"}


def test_status_shows_the_fence_failures_and_pauses():
    behind = reduce(FINISHED, ev.WeightsPublished(t=FINISHED.t, version=5, checksum="c" * 16, nbytes=1, seconds=0.1))
    assert "rollout-0 holds version 4" in views.status(behind).text
    assert "fence: loads 5" in views.status(behind).body
    failed = reduce(FINISHED, ev.RunFailed(t=FINISHED.t, error="worker gone", traceback=""))
    assert "FAILED: worker gone" in views.status(failed).text
    pause = ev.Paused(t=FINISHED.t, period=3, boundary="group", where="group 2 scored", breakpoint="zero variance")
    assert "paused at breakpoint zero variance: group 2 scored" in views.status(reduce(FINISHED, pause)).text
    stalled = ev.Stalled(t=FINISHED.t, period=3, waiting=["group 3 on rollout-1"], seconds=30)
    assert "waiting for group 3 on rollout-1" in views.status(reduce(FINISHED, stalled)).text


@pytest.mark.parametrize(
    "color", ["advantage", "loss", "ratio", "kl", "entropy", "policy", "old", "reference", "sampler"]
)
def test_tokens_by_every_colour(color):
    record = synthetic_records()[1]
    view = views.tokens(record, 0, color, loss_type="dapo")
    Balanced(str(view.body))
    c = record.completions[0]
    assert view.body.count("data-tip") == len(c.tokens)
    for name in ("policy", "reference", "ratio", "kl", "entropy", "loss", "advantage"):
        assert f"{name} " in re.search(r'data-tip="([^"]*)"', view.body)[1]
    assert ("loss_type=" in view.body) == (color == "loss")


def test_masked_and_truncated_tokens_are_visible():
    view = views.tokens(synthetic_records()[1], 3)
    assert count(view, "masked") == len(synthetic_records()[1].completions[3].tokens)
    assert "cut at the length limit" in view.body and "masked: not in the loss" in view.body


def test_tokens_refuse_what_is_not_there():
    record = synthetic_records()[0]
    del record.completions[0].numbers["kl"]
    with pytest.raises(ValueError, match="no reference model is loaded with beta=0"):
        views.tokens(record, 0, "kl")
    with pytest.raises(ValueError, match="color='colour'"):
        views.tokens(record, 0, "colour")
    with pytest.raises(IndexError, match="has 4 completions"):
        views.tokens(record, 4)


def test_group_shows_rewards_and_warns_without_variance():
    flat, mixed = synthetic_records()[:2]
    assert "gives no policy gradient" in views.group(flat).text
    assert "gives no policy gradient" not in views.group(mixed).text
    rewards = [c.reward for c in mixed.completions]
    assert f"std {np.std(rewards, ddof=1):.4g}" in views.group(mixed).text
    assert count(views.group(mixed), "card") == 4
    assert "abstained" in views.group(mixed).body


def test_mask_compares_with_separate_rows():
    layout = pack([(0, range(10), [range(3), range(4)]), (1, range(5), [range(2)])], shared=True)
    view = views.mask(layout)
    Balanced(str(view.body))
    assert "Shared prompts (this micro-step): 24 tokens" in view.body
    assert "Separate rows: 42 tokens in 3 rows" in view.body
    assert "group 0: prompt 0-9, r0 10-12, r1 13-16" in view.text
    shared, separate = 55 + 30 + 6 + 40 + 10 + 15 + 10 + 3, 55 + 30 + 6 + 55 + 40 + 10 + 15 + 10 + 3
    assert re.search(rf"attention pairs +shared prompts +{shared} +separate rows +{separate} ", view.text)
    assert "FLOPs" not in view.text


def test_mask_of_separate_rows_is_beside_the_shared_layout():
    groups = [(0, range(10), [range(3), range(4)]), (1, range(5), [range(2)])]
    dims = ModelDims(layer_parameters=1000, attention_width=64, head_parameters=500)
    shared, separate = (views.mask(pack(groups, shared=kind), dims) for kind in (True, False))
    assert "Separate rows (this micro-step): 42 tokens in 3 rows" in separate.body
    assert "Shared prompts: 24 tokens" in separate.body
    table = lambda view: re.search("<table>.*</table>", view.body, re.DOTALL)[0]  # noqa: E731
    assert table(shared) == table(separate) and "FLOPs, forward + backward" in table(shared)


def test_terminal_view_renders_any_state():
    for state in (RunState(), LIVE, FINISHED):
        console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(terminal.render(state))
        text = console.export_text()
        assert "policy version" in text
    assert "rollout idle" in text and "tokens/s" in text and "reward" in text


def test_scrubber_finds_every_moment():
    scrubber = Scrubber(EVENTS)
    assert len(EVENTS) > 2 * KEPT_EVERY
    for i in (0, 1, KEPT_EVERY - 1, KEPT_EVERY, KEPT_EVERY + 1, len(EVENTS) - 1):
        t = EVENTS[i].t
        upto = [e for e in EVENTS if e.t <= t]
        assert scrubber.at(t) == state_of(upto)
    assert scrubber.at(-1.0) == RunState()
    assert scrubber.after(len(EVENTS)) == FINISHED
    assert scrubber.after(scrubber.period_ends[1]).current.finished_t is not None
    assert scrubber.period_ends.keys() == {0, 1, 2, 3}


def test_views_import_without_jupyter_and_torch():
    code = "import sys, prl_notebook.views, prl_notebook.views.terminal, prl_notebook.views.scrub; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"IPython", "ipywidgets", "anywidget", "torch", "plotly"} & set(loaded)


# ---- huge


def test_a_thousand_periods_stay_small():
    history = tuple((i, dict(FINISHED.last_metrics)) for i in range(1000))
    view = views.curves(replace(FINISHED, history=history))
    assert max(len(s.periods) for c in charts(replace(FINISHED, history=history)) for s in c.series) <= MAX_POINTS + 1
    assert len(view.body) < 60_000
    assert len(views.curves_figure(replace(FINISHED, history=history)).data[0].x) == 1000, "all of them to zoom into"


def test_a_metric_logged_now_and_then_is_drawn_in_a_long_run():
    history = tuple((i, {"reward": 0.1} | ({"eval_reward": float(i)} if i % 97 == 96 else {})) for i in range(1000))
    drawn = next(s for c in charts(replace(FINISHED, history=history)) for s in c.series if s.name == "eval_reward")
    assert drawn.values == [float(i) for i in range(96, 1000, 97)]


def test_a_thousand_periods_do_not_make_an_update_slower():
    def work(periods):
        """Function calls of an update, which unlike its time are the same on every machine."""
        state = replace(FINISHED, history=tuple((i, dict(FINISHED.last_metrics)) for i in range(periods)))
        run_views(state)  # fills caches
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            run_views(state)
        finally:
            sys.setprofile(None)
        return calls

    few, many = work(MAX_POINTS), work(1000)
    assert few > 1000 and many < 1.5 * few, f"{few} calls with {MAX_POINTS} periods, {many} with 1000"


def test_512_groups_stay_readable():
    state = state_of(synthetic_events(1, groups=512, workers=4))
    view = views.queue(state)
    assert count(view, "chip") == 512 and count(view, "small") == 512
    assert len(view.text) < 5000
    Balanced(str(views.timeline(state).body))
    assert len(views.report_html(state)) < 3_000_000


def test_a_4096_token_mask_is_small_however_many_completions():
    few = pack([(g, range(100), [range(116)] * 8) for g in range(4)], shared=True)
    assert few.tokens >= 4096
    assert len(views.mask(few).body) < 50_000
    many = pack([(g, [1, 2], [[3]] * 4) for g in range(700)], shared=True)
    assert views.mask(many).body.count("<path") <= 2 * MAX_SHAPES + 10
    assert "smaller parts are not drawn" in views.mask(many).body


def test_report_of_50_periods_is_below_3_mb():
    state = state_of(synthetic_events(50))
    page = views.report_html(state, [r for p in range(50) for r in synthetic_records(p)])
    Balanced(page)
    assert len(page.encode()) < 3_000_000
    for title in ("Curves", "Timeline", "Rollout queue", "Attention mask", "Group ", "Settings"):
        assert title in page
    assert "<script" not in page
    Balanced(views.report_html(RunState()))


def test_configuration_in_the_report_is_json_of_the_run():
    assert json.dumps(FINISHED.config)
    assert "grpo.num_generations" in views.report_html(FINISHED)
