"""Publish, receive and verify policy versions."""

from prl_notebook.weights.store import (
    WeightsMismatch,
    checksum,
    load_weights,
    named_weights,
    open_version,
    publish,
)
from prl_notebook.weights.transfer import transfer_of

__all__ = [
    "WeightsMismatch",
    "checksum",
    "load_weights",
    "named_weights",
    "open_version",
    "publish",
    "transfer_of",
]
