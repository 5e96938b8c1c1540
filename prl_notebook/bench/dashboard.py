"""What watching costs: tokens per second with and without a dashboard in a real browser, and what updates weigh."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prl_notebook.bench.notebook_browser import NotebookPage

SETUP = """
import json, time
import psutil
from IPython.display import display
from prl_notebook import Session
from prl_notebook.widgets import CompletionExplorer, Dashboard

session = Session(run_dir={run_dir!r})
session.step()

def cpu_seconds():
    \"\"\"Of the kernel, of the Jupyter server between them, and of the browser with all its processes.\"\"\"
    browser = [p for p in psutil.Process({pid}).children(recursive=True) if "chrom" in p.name()]
    return [sum(sum(p.cpu_times()[:2]) for p in those) for those in ([kernel], [kernel.parent()], browser)]

kernel = psutil.Process()
"""

MEASURE = """
def measure(periods, watched):
    board = Dashboard(session) if watched else None
    if board:
        display(board)
        time.sleep(1)  # the page is drawn
    first, before, start = len(session.metrics), cpu_seconds(), time.perf_counter()
    session.run(periods).wait()
    end, after = time.perf_counter(), cpu_seconds()
    tokens = sum(g.tokens for p in session.state.periods if p.period >= first for g in p.groups)
    updates = list(board.update_seconds) if board else []
    if board:
        board.close()
    cpu = [(b - a) / (end - start) for a, b in zip(before, after)]
    return {{"tokens_per_s": tokens / (end - start), "start": start, "end": end, "updates": updates, "cpu": cpu}}

runs = []
for i in range({rounds}):
    order = (False, True) if i % 2 == 0 else (True, False)  # so that a drift falls on both alike
    runs.append({{watched: measure({periods}, watched) for watched in order}})
print("RUNS", json.dumps([[pair[False], pair[True]] for pair in runs]), "END")
"""

IDLE = """
board = Dashboard(session)
display(board)
time.sleep(2)
before = cpu_seconds()
time.sleep({seconds})
print("IDLE", json.dumps([(b - a) / {seconds} for a, b in zip(before, cpu_seconds())]), "END")
"""

LONG = """
from dataclasses import replace
from prl_notebook.widgets.dashboard import run_views

def update_ms(periods):
    metrics = session.metrics[-1]
    state = replace(session.state, history=tuple((i, dict(metrics)) for i in range(periods)))
    times = []
    for _ in range(20):
        start = time.thread_time()
        run_views(state)
        times.append(1000 * (time.thread_time() - start))
    return min(times)

print("LONG", json.dumps([update_ms(10), update_ms(1000)]), "END")
"""

VIEWS = {
    "dashboard": "Dashboard(session)",
    "completions": "CompletionExplorer(session.groups)",
    "mask": "session.mask(group=0)",
    "queue": "session.queue",
    "progress": "session.progress()",
    "timeline": "session.timeline()",
    "curves": "session.curves()",
}
"""Each is displayed in a cell of its own and weighed in the saved notebook."""


def dashboard(periods: int = 6, rounds: int = 12) -> dict[str, Any]:
    """Run the bundled task in JupyterLab, `rounds` times with and without a dashboard, `periods` (at most 12) each.

    Returns:
        relative_throughput: tokens per second with over without, median of the rounds (1 = watching is free)
        update_ms: median kernel time of one update; update_ms_p95 beside it
        update_ms_1000_periods: kernel time of an update that draws every view, curves included, of a run of 1,000
            periods; update_ms_10_periods: the same of 10
        messages_per_s: messages the page received while a dashboard was open
        bytes_per_view: the largest growth of the saved notebook by one view; bytes_by_view says which
        cpu: cores in use by kernel, server and browser: without a dashboard, with one, and with one when nothing
            happens
    """
    from prl_notebook.bench.notebook_browser import jupyter  # needs playwright

    with tempfile.TemporaryDirectory(prefix="prl-bench-") as folder:
        root = Path(folder)
        cells = [
            SETUP.format(run_dir=str(root / "run"), pid=os.getpid()),
            MEASURE.format(periods=periods, rounds=rounds),
            IDLE.format(seconds=5),
            LONG,
            *VIEWS.values(),
            "session.close()",
        ]
        with jupyter(root) as server, server.open(cells) as notebook:
            # The dashboard, and not the code above it, is what can be seen; what is out of sight costs less.
            notebook.page.add_style_tag(content=".jp-Cell-inputWrapper { display: none }")
            notebook.run_all()
            notebook.wait_done(seconds=300)
            saved = json.loads(notebook.save().read_text())
            result = _summary(notebook, saved["cells"])
    for name, value in result.items():
        print(f"{name:24} {value}", file=sys.stderr)
    return result


def _summary(notebook: NotebookPage, cells: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = _printed(cells[1], "RUNS")
    ten, thousand = _printed(cells[3], "LONG")
    watched = [pair[1] for pair in pairs]
    updates = sorted(1000 * seconds for run in watched for seconds in run["updates"])
    seconds = sum(run["end"] - run["start"] for run in watched)
    received = [t for t, _ in notebook.messages if any(run["start"] <= t <= run["end"] for run in watched)]
    sizes = {name: len(json.dumps(cell["outputs"])) for name, cell in zip(VIEWS, cells[4:], strict=False)}
    without, watching = (
        [median(cores) for cores in zip(*(pair[i]["cpu"] for pair in pairs), strict=True)] for i in (0, 1)
    )
    cpu = {"without": without, "with": watching, "idle": _printed(cells[2], "IDLE")}
    return {
        "relative_throughput": median(pair[1]["tokens_per_s"] / pair[0]["tokens_per_s"] for pair in pairs),
        "tokens_per_s": [[pair[0]["tokens_per_s"], pair[1]["tokens_per_s"]] for pair in pairs],
        "update_ms": median(updates),
        "update_ms_p95": updates[int(0.95 * (len(updates) - 1))],
        "update_ms_10_periods": ten,
        "update_ms_1000_periods": thousand,
        "messages_per_s": len(received) / seconds,
        "bytes_per_view": max(sizes.values()),
        "bytes_by_view": sizes,
        "cpu": {name: dict(zip(("kernel", "server", "browser"), cores, strict=True)) for name, cores in cpu.items()},
    }


def _printed(cell: dict[str, Any], name: str) -> Any:
    text = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
    return json.loads(text.partition(name)[2].partition("END")[0])
