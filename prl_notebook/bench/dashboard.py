"""What watching costs: tokens per second with and without a dashboard in a real browser, and what updates weigh."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prl_notebook.bench.notebook_browser import NotebookPage

SETUP = """
import json, time
from IPython.display import display
from prl_notebook import Session
from prl_notebook.widgets import CompletionExplorer, Dashboard

session = Session(run_dir={run_dir!r})
session.step()
"""

MEASURE = """
def measure(periods, watched):
    board = Dashboard(session) if watched else None
    if board:
        display(board)
    first, start = len(session.metrics), time.perf_counter()
    session.run(periods).wait()
    end = time.perf_counter()
    tokens = sum(g.tokens for p in session.state.periods if p.period >= first for g in p.groups)
    updates = list(board.update_seconds) if board else []
    if board:
        board.close()
    return {{"tokens_per_s": tokens / (end - start), "start": start, "end": end, "updates": updates}}

runs = []
for i in range({rounds}):
    order = (False, True) if i % 2 == 0 else (True, False)  # so that a drift falls on both alike
    runs.append({{watched: measure({periods}, watched) for watched in order}})
print("RUNS", json.dumps([[pair[False], pair[True]] for pair in runs]), "END")
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


def dashboard(periods: int = 4, rounds: int = 4) -> dict[str, Any]:
    """Run the bundled task in JupyterLab, `rounds` times with and without a dashboard, `periods` (at most 12) each.

    Returns:
        relative_throughput: tokens per second with over without, median of the rounds (1 = watching is free)
        update_ms: median kernel time of one update; update_ms_p95 beside it
        messages_per_s: messages the page received while a dashboard was open
        bytes_per_view: the largest growth of the saved notebook by one view; bytes_by_view says which
    """
    from prl_notebook.bench.notebook_browser import jupyter  # needs playwright

    with tempfile.TemporaryDirectory(prefix="prl-bench-") as folder:
        root = Path(folder)
        cells = [
            SETUP.format(run_dir=str(root / "run")),
            MEASURE.format(periods=periods, rounds=rounds),
            *VIEWS.values(),
            "session.close(); print('session closed')",
        ]
        with jupyter(root) as server, server.open(cells) as notebook:
            notebook.run_all()
            notebook.wait_text("session closed", seconds=600)
            saved = json.loads(notebook.save().read_text())
            result = _summary(notebook, saved["cells"])
    for name, value in result.items():
        print(f"{name:20} {value}", file=sys.stderr)
    return result


def _summary(notebook: NotebookPage, cells: list[dict[str, Any]]) -> dict[str, Any]:
    printed = "".join("".join(output["text"]) for output in cells[1]["outputs"] if output["output_type"] == "stream")
    pairs = json.loads(printed.partition("RUNS")[2].partition("END")[0])
    watched = [pair[1] for pair in pairs]
    updates = sorted(1000 * seconds for run in watched for seconds in run["updates"])
    seconds = sum(run["end"] - run["start"] for run in watched)
    received = [t for t, _ in notebook.messages if any(run["start"] <= t <= run["end"] for run in watched)]
    sizes = {name: len(json.dumps(cells[i + 2]["outputs"])) for i, name in enumerate(VIEWS)}
    return {
        "relative_throughput": median(pair[1]["tokens_per_s"] / pair[0]["tokens_per_s"] for pair in pairs),
        "tokens_per_s": [[pair[0]["tokens_per_s"], pair[1]["tokens_per_s"]] for pair in pairs],
        "update_ms": median(updates),
        "update_ms_p95": updates[int(0.95 * (len(updates) - 1))],
        "messages_per_s": len(received) / seconds,
        "bytes_per_view": max(sizes.values()),
        "bytes_by_view": sizes,
    }
