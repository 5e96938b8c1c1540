"""The notebooks run from top to bottom, leave nothing behind, and read well where there are no widgets."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbmake.nb_run import NotebookRun

FOLDER = Path(__file__).parents[2] / "notebooks"
TIMELINE, CURVES = "fence: waits for the next policy version", "Does it learn?"
SUMMARIES = {
    "quickstart": [TIMELINE, CURVES, "reward by period:"],
    "dashboard": [TIMELINE, CURVES, "Rollout queue"],
    "mask_explorer": ["Shared prompts", "Separate rows", "attention pairs"],
    "equivalence": [TIMELINE, "the same gradient: largest relative error", "bit for bit the same: True"],
    "schedules": [TIMELINE, "The synchronous schedule would have taken", "idle: rollout"],
    "debugging": [CURVES, "is right!", "All rewards are equal", "dead groups:"],
}
"""What a reader of the exported page must find at least."""
QUICK = "quickstart"
SECONDS = 180
"""A notebook may take on two cores."""
THIRD_PARTY_SCRIPTS = ("mathjax_url", "require_js_url", "mermaid_js_url", "jquery_url", "jupyter_widgets_base_url")
"""What nbconvert's own template loads; what our outputs load is looked at without them."""
LOADED_FROM_THE_NET = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)\s*=\s*[\"']?(?:https?:)?//[^>]*>")


def path(name: str) -> Path:
    return FOLDER / f"{name}.ipynb"


def test_every_notebook_is_listed_here():
    assert {p.stem for p in FOLDER.glob("*.ipynb")} == set(SUMMARIES)


@pytest.mark.parametrize("name", SUMMARIES)
def test_committed_form(name):
    assert path(name).stat().st_size < 1_000_000
    notebook = nbformat.read(path(name), as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "clear the outputs before committing"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == QUICK else pytest.mark.slow) for n in SUMMARIES])
def test_runs_and_exports_to_a_page_that_needs_no_network(name, tmp_path, monkeypatch, no_orphans):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    copy = shutil.copy(path(name), tmp_path)
    start = time.monotonic()
    result = NotebookRun(Path(copy), default_timeout=SECONDS, kernel="python3").execute()
    seconds = time.monotonic() - start
    assert result.error is None, result.error.trace
    assert seconds < SECONDS
    notebook = result.nb
    notebook.metadata.pop("widgets", None)  # as it is committed: the static forms must do

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    complaints = [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert not complaints
    assert not any("Traceback" in str(o) for o in outputs)

    exporter = HTMLExporter(exclude_input=True, exclude_markdown=True, **{name: "" for name in THIRD_PARTY_SCRIPTS})
    page, _ = exporter.from_notebook_node(notebook)
    assert not LOADED_FROM_THE_NET.findall(page)
    missing = [text for text in SUMMARIES[name] if text not in page]
    assert not missing
