"""The command line: help, bad input in one line, runs, resume, replay."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys

import pytest
from small_runs import ROWS

from prl_notebook.cli import BENCHMARKS, main


def prl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prl_notebook.cli", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", ["demo", "run", "replay", "bench", "doctor"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: prl {command}" in capsys.readouterr().out


@pytest.fixture
def config(tmp_path, small_model):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "my_rewards.py").write_text(
        "def digits(completion_ids, **_):\n    return [float(sum(i < 40 for i in ids)) for ids in completion_ids]\n"
    )
    text = (
        f'model = "{small_model}"\ndataset = "rows.jsonl"\nreward_funcs = "my_rewards.py:digits"\nperiods = 2\n'
        "[grpo]\nprompts_per_period = 4\nnum_generations = 4\nmax_completion_length = 8\nlearning_rate = 1e-3\n"
    )
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('model = "', 'model = "/nowhere'), "does not exist"),
        (("rows.jsonl", "none.jsonl"), "dataset file .*none.jsonl.* does not exist"),
        (("my_rewards.py:digits", "my_rewards.py"), "must read 'file.py:function'"),
        (("my_rewards.py:digits", "my_rewards.py:letters"), "has no function 'letters'"),
        (("num_generations = 4", "num_generations = 1"), "a group needs at least 2 completions"),
        (("num_generations = 4", "generations = 4"), r"\[grpo\] has no field 'generations'"),
        (("prompts_per_period = 4", "prompts_per_period = 400"), "64 rows, fewer than prompts_per_period=400"),
        (("periods = 2", "epochs = 2"), "unknown key 'epochs'"),
        (("periods = 2", "periods ="), "run.toml: "),
    ],
)
def test_bad_input_ends_with_one_clear_line(config, capsys, change, message):
    config.write_text(config.read_text().replace(*change))
    assert main(["run", str(config), "--run-dir", str(config.parent / "run")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("prl run: ")
    assert re.search(message, line), line


def test_other_bad_input(capsys, tmp_path):
    assert main(["run"]) == 2
    assert main(["replay", str(tmp_path)]) == 2
    assert main(["run", "--resume", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3 and all(line.startswith(("prl replay: ", "prl run: ")) for line in lines)


def test_run_resume_and_replay(config, no_orphans):
    run_dir = str(config.parent / "run")
    done = prl("run", str(config), "--run-dir", run_dir, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert {"periods", "reward_first", "reward_last", "seconds", "policy_version", "run_dir"} == set(summary)
    assert summary["periods"] == summary["policy_version"] == 2

    again = prl("run", "--resume", run_dir, "--periods", "1", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["policy_version"] == 3

    shown = prl("replay", run_dir)
    assert shown.returncode == 0 and "period 2" in shown.stdout and "idle" in shown.stdout
    lines = prl("replay", run_dir, "--json").stdout.splitlines()
    assert [json.loads(line)["period"] for line in lines] == [0, 1, 2]
    assert (config.parent / "run" / "report.html").exists()


def test_a_failing_run_exits_with_1_and_its_traceback(config, no_orphans):
    (config.parent / "my_rewards.py").write_text("def digits(completions):\n    return 1 / 0\n")
    done = prl("run", str(config), "--run-dir", str(config.parent / "run"), "--json")
    assert done.returncode == 1
    assert "reward function 'digits' raised ZeroDivisionError" in done.stderr and "Traceback" in done.stderr


def test_every_benchmark_is_there():
    for name in BENCHMARKS:
        module = importlib.import_module(f"prl_notebook.bench.{name.replace('-', '_')}")
        assert callable(getattr(module, name.replace("-", "_")))
