"""The views of a live session and of the same run loaded from disk."""

from __future__ import annotations

from prl_notebook import load_run


def test_a_session_and_its_replay_show_the_same(make_session):
    session = make_session()
    session.run(2).wait()
    shown = {
        "queue": session.queue,
        "timeline": session.timeline(),
        "progress": session.progress(),
        "curves": session.curves(),
        "group": session.group(1),
        "tokens": session.tokens(1, 2, "loss"),
    }
    layout = session.layout(1)
    widget = session.mask(group=1)
    assert layout.kind in ("shared", "separate") and 1 in {g for g, _ in layout.sequences}
    assert "text/html" in session._repr_mimebundle_()[0] and "text/html" in widget._repr_mimebundle_()[0]
    of_live_run = session.queue._repr_mimebundle_()[0]
    assert of_live_run.keys() >= {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    session.close()
    assert session.queue._repr_mimebundle_().keys() == {"text/html", "text/plain"}, "nothing moves any more"

    run = load_run(session.run_dir)
    assert run.state.history == session.state.history
    assert run.tokens(1, 2, "loss").html == shown["tokens"].html
    assert run.group(1).html == shown["group"].html
    assert run.curves().html == shown["curves"].html
    assert "period 1" in run.timeline().text and "period 1" in shown["timeline"].text
    assert "text/html" in run._repr_mimebundle_()[0]
    middle = run.at(run.events[len(run.events) // 2].t)
    assert len(middle.state.history) < 2
    report = (session.run_dir / "report.html").read_text()
    assert len(report) < 3_000_000 and "<script" not in report
    assert "Shared prompts" in report and "Separate rows" in report and "FLOPs, forward + backward" in report


def test_the_dashboard_s_menu_adds_ready_made_breakpoints(make_session):
    session = make_session()
    dashboard = session.dashboard()
    row = dashboard.children[0].children[0].children
    menu = row[-1]
    menu.label = "zero variance"
    assert [b.name for b in session.breakpoints] == ["zero variance"] and menu.index == 0
    (box,) = dashboard.children[1].children
    box.value = False
    assert not session.breakpoints[0].enabled
    dashboard.close()


def test_sizes_of_a_model_are_read_from_its_folder(small_model):
    from transformers import AutoModelForCausalLM

    from prl_notebook.attention.costs import ModelDims

    assert ModelDims.from_folder(small_model) == ModelDims.from_model(AutoModelForCausalLM.from_pretrained(small_model))
