"""One Jupyter server and one Chromium for all browser tests; kernels may import from tests/unit and this folder."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """`with notebooks.open(cells, app) as nb:` runs cells in JupyterLab ("lab") or Notebook 7 ("notebook")."""
    from prl_notebook.bench.notebook_browser import jupyter

    python_path = [HERE.parents[1], HERE.parent / "unit", HERE]
    with jupyter(tmp_path_factory.mktemp("jupyter"), python_path) as server:
        yield server


@pytest.fixture
def shots() -> Path:
    """Where screenshots go: PRL_SCREENSHOTS, else a folder that is thrown away."""
    folder = Path(os.environ.get("PRL_SCREENSHOTS") or tempfile.mkdtemp(prefix="prl-shots-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
