"""A session's private directory in shared memory, through which policy versions travel. No torch here."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from prl_notebook.engine.types import WeightsRef

SHARED_MEMORY = Path("/dev/shm")


def session_directory(session_id: str, nbytes: int = 0) -> Path:
    """Make the directory: in shared memory, or among temporary files where that is missing or has no room.

    Args:
        nbytes: room needed; containers often have 64 MiB of shared memory, too little for most models.
    """
    fits = (
        SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= nbytes
    )
    parent = SHARED_MEMORY if fits else Path(tempfile.gettempdir())
    directory = parent / f"prl-{session_id}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def release(ref: WeightsRef) -> None:
    """Delete a published version; one already gone is no error. Tensors mapped from it stay valid."""
    Path(ref.path).unlink(missing_ok=True)
