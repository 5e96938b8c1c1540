"""Publish, receive and verify policy versions."""

from prl_notebook.weights.store import (
    WeightsMismatch,
    checksum,
    load_weights,
    named_weights,
    open_version,
    publish,
)

__all__ = [
    "WeightsMismatch",
    "checksum",
    "load_weights",
    "named_weights",
    "open_version",
    "publish",
]
