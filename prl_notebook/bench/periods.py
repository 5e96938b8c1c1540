"""Whole periods of a real Session, as several benchmarks measure them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def measured(periods: int, *arguments: Any, **sections: Any) -> list[dict[str, float]]:
    """Metrics of `periods` periods of `Session(*arguments, **sections)`, after one that warms up."""
    from prl_notebook import Session

    with tempfile.TemporaryDirectory() as folder, Session(*arguments, run_dir=Path(folder) / "run", **sections) as one:
        one.run(1 + periods).wait()
        return one.metrics[1:]
