"""The promise: schedule, order, number of workers, interruption and way of starting change nothing, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import ROWS, SMALL, digit_share, events_of, final_weights

from prl_notebook import Rollout, Run, Session, SessionError, Trainer
from prl_notebook.engine import events as ev

EXACT = Run(reproducible=True, consume="prompt_order")


@pytest.mark.strict
def test_ten_periods_end_in_the_same_weights_for_every_schedule_and_number_of_workers(make_session):
    variants = {
        "one worker": {"run": EXACT},
        "two workers": {"run": EXACT, "rollout": Rollout(workers=2, groups_in_flight=1)},
        "three workers, longest first": {
            "run": dataclasses.replace(EXACT, dispatch="longest_first"),
            "rollout": Rollout(workers=3, groups_in_flight=2),
        },
        "synchronous": {"run": dataclasses.replace(EXACT, schedule="synchronous")},
    }
    weights = {}
    for name, arguments in variants.items():
        session = make_session(**arguments)
        session.run(10).wait()
        weights[name] = final_weights(session)
    assert all(w == weights["one worker"] for w in weights.values())
    other = make_session(run=EXACT, grpo=dataclasses.replace(SMALL, seed=8))
    other.run(10).wait()
    assert final_weights(other) != weights["one worker"], "another seed must end elsewhere"


@pytest.mark.strict
def test_verify_finds_the_same_gradient_in_float64_and_changes_nothing(make_session):
    session = make_session(
        run=EXACT, trainer=Trainer(dtype="float64", tokens_per_microstep=64), rollout=Rollout(dtype="float64")
    )
    session.step()
    report = session.verify(permutations=4)
    assert report.gradient_norm > 0 and report.groups == 4
    assert len(report.comparisons) == 8
    assert report.largest <= 1e-12 and report.ok, str(report)
    assert report.comparisons[0].bitwise
    assert "the same gradient" in str(report)
    session.run(2).wait()
    verified = final_weights(session)

    plain = make_session(
        run=EXACT, trainer=Trainer(dtype="float64", tokens_per_microstep=64), rollout=Rollout(dtype="float64")
    )
    plain.run(3).wait()
    assert final_weights(plain) == verified

    broken = make_session()
    broken.step("group")
    with pytest.raises(SessionError, match="between two periods"):
        broken.verify()


@pytest.mark.strict
def test_a_resumed_run_equals_the_uninterrupted_one(make_session):
    whole = make_session(run=EXACT)
    whole.run(6).wait()
    expected = final_weights(whole)

    first = make_session(run=EXACT)
    first.run(3).wait()
    first.close()
    from small_runs import ROWS, digit_share

    with pytest.raises(ValueError, match="dataset object; pass it again"):
        Session.resume(first.run_dir)
    resumed = Session.resume(first.run_dir, dataset=ROWS, reward_funcs=digit_share)
    assert resumed.state.version == 3 and len(resumed.metrics) == 3
    resumed.run(3).wait()
    assert [p for p, _ in resumed.state.history] == list(range(6))
    assert final_weights(resumed) == expected


@pytest.mark.strict
def test_rewind_and_fork_go_on_from_where_they_say(make_session, tmp_path):
    keep = dataclasses.replace(EXACT, checkpoint_every=1, keep_checkpoints=0)
    session = make_session(run=keep)
    session.run(3).wait()
    session.step("group")
    with pytest.raises(ValueError, match="no checkpoint at period 7"):
        session.rewind(7)
    session.rewind(1)
    assert session.state.version == 1 and len(session.metrics) == 1
    with pytest.raises(ValueError, match="checkpoints at periods 0, 1"):
        session.rewind(2)
    session.run(2).wait()
    fork = session.fork(run_dir=tmp_path / "fork", learning_rate=0.0)
    assert fork.parent is not None and len(fork.metrics) == 3
    fork.step()
    again = final_weights(fork)
    assert again == final_weights(session), "a learning rate of 0 leaves the forked weights as they were"

    straight = make_session(run=keep)
    straight.run(3).wait()
    assert final_weights(straight) == again


@pytest.mark.strict
def test_rewinds_at_random_moments_change_nothing(make_session, tmp_path):
    """While the processes start, at the fence, in the middle of a period, while a checkpoint is written."""
    keep = dataclasses.replace(EXACT, checkpoint_every=1, keep_checkpoints=0)
    straight = make_session(run=keep)
    straight.run(3).wait()
    expected = final_weights(straight)

    session = make_session(run=keep)
    session.step()
    session.close()
    chance = random.Random(0)
    with Session.resume(session.run_dir, ROWS, digit_share) as again:
        for pause in [0.0, 0.0, *(chance.expovariate(5.0) for _ in range(12))]:
            handle = again.run(1000)
            time.sleep(pause)
            again.rewind(chance.choice([0, max(0, len(again.metrics) - 1)]))
            assert handle.done and again.state.status == "paused"
            if not again.metrics:
                again.step()
        again.rewind(1)
        again.run(2).wait()
        assert final_weights(again) == expected


def test_no_prompt_goes_out_before_every_worker_has_acknowledged(make_session):
    session = make_session(rollout=Rollout(workers=2, groups_in_flight=1))
    session.run(3).wait()
    acknowledged: dict[int, set[int]] = {}
    checksums: dict[int, set[str]] = {}
    dispatched = 0
    for event in ev.read_events(session.run_dir / "events.jsonl"):
        if isinstance(event, ev.WeightsPublished):
            checksums[event.version] = {event.checksum}
        elif isinstance(event, ev.WeightsAcknowledged):
            acknowledged.setdefault(event.version, set()).add(event.worker)
            checksums[event.version].add(event.checksum)
        elif isinstance(event, ev.GroupDispatched):
            dispatched += 1
            assert acknowledged.get(event.version) == {0, 1}, "dispatched before the fence"
    assert dispatched == 12
    assert all(len(found) == 1 for found in checksums.values()), "workers hold what was published"
    assert len({c for found in checksums.values() for c in found}) == 4, "every version differs"
    assert not list(session._parts.session_dir.glob("*.safetensors")), "a version is freed when all workers have it"


def test_a_worker_that_does_not_hold_the_published_weights_stops_the_run(make_session):
    session = make_session()
    session.step()
    engine = session._parts.engine

    def publish_something_else():
        ref = engine.publish()
        engine.sync(dataclasses.replace(ref, version=ref.version + 1))

    with pytest.raises(Exception, match=r"version 2 was asked for, but .* holds version 1"):
        session._parts.at_boundary(publish_something_else)


@pytest.mark.strict
def test_notebook_script_and_command_line_give_the_same_run(make_session, small_model, tmp_path):
    from small_runs import ROWS

    session = make_session(run=EXACT)
    session.run(3).wait()
    expected = final_weights(session)

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "my_rewards.py").write_text(
        "def digit_share(completion_ids, **_):\n"
        "    return [sum(i < 40 for i in ids) / len(ids) for ids in completion_ids]\n"
    )
    grpo = "\n".join(
        f"{name} = {json.dumps(value)}"
        for name, value in dataclasses.asdict(SMALL).items()
        if value is not None and value != getattr(type(SMALL)(), name)
    )
    (tmp_path / "run.toml").write_text(
        f'model = "{small_model}"\ndataset = "rows.jsonl"\nreward_funcs = ["my_rewards.py:digit_share"]\nperiods = 3\n'
        f'[grpo]\n{grpo}\n[trainer]\ntokens_per_microstep = 128\n[run]\nreproducible = true\nconsume = "prompt_order"\n'
    )
    command = [sys.executable, "-m", "prl_notebook.cli", "run", str(tmp_path / "run.toml"), "--json"]
    done = subprocess.run([*command, "--run-dir", str(tmp_path / "cli")], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["policy_version"] == 3

    cell = (
        "from prl_notebook import GRPO, Run, Session, Trainer\n"
        "def digit_share(completion_ids, **_):\n"
        "    return [sum(i < 40 for i in ids) / len(ids) for ids in completion_ids]\n"
        f"s = Session({str(small_model)!r}, {ROWS!r}, digit_share, grpo={SMALL!r},\n"
        f"            trainer=Trainer(tokens_per_microstep=128), run={EXACT!r}, run_dir={str(tmp_path / 'nb')!r})\n"
        "s.run(3).wait()\n"
        "s.close()\n"
    )
    run_cell(cell)

    def weights(run_dir: Path) -> bytes:
        return (run_dir / "checkpoints" / "v000003" / "policy" / "model.safetensors").read_bytes()

    def story(run_dir: Path) -> list[str]:
        """What happened in an order that does not depend on timing: kinds of events by period."""
        return sorted(
            f"{type(e).__name__} {getattr(e, 'period', '')} {getattr(e, 'group', '')} {getattr(e, 'rewards', '')}"
            for e in ev.read_events(run_dir / "events.jsonl")
            if isinstance(e, ev.PeriodStarted | ev.GroupDispatched | ev.GroupScored | ev.PeriodFinished)
        )

    assert weights(tmp_path / "cli") == weights(tmp_path / "nb") == expected
    assert story(tmp_path / "cli") == story(tmp_path / "nb") == story(session.run_dir)
    assert len(events_of(session, ev.PeriodFinished)) == 3


def run_cell(code: str) -> None:
    """Run a cell in a real kernel."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
