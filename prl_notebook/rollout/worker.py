"""The seam every rollout engine implements; it runs inside a background process.

The process calls `step()` again and again while `has_work` is true and handles new requests in between, so one
step should take milliseconds (a decode step), not seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from prl_notebook.engine.types import Group, GroupRequest, WeightsRef


@dataclass(frozen=True)
class LoadAck:
    """What a worker answers when it has loaded a policy version."""

    version: int
    checksum: str
    """Computed from the parameters as they now stand in the worker, not copied from the request."""
    seconds: float


@dataclass(frozen=True)
class RowsDone:
    """Progress of a group: how many of its K completions are finished, and tokens sampled so far."""

    period: int
    group: int
    done: int
    tokens: int


@dataclass(frozen=True)
class GroupDone:
    """A finished group (rewards not yet filled in)."""

    group: Group


WorkerEvent = RowsDone | GroupDone


class RolloutWorker(Protocol):
    """Samples groups from one policy version at a time."""

    @property
    def has_work(self) -> bool:
        """True while a submitted group is unfinished."""
        ...

    def load(self, ref: WeightsRef) -> LoadAck:
        """Load a published version, drop every cache computed under the old one, and acknowledge.

        Raises:
            RuntimeError: if groups are still in flight (the fence was broken).
        """
        ...

    def submit(self, request: GroupRequest) -> None:
        """Take a group into the batch.

        Raises:
            ValueError: if `request.version` is not the loaded version.
        """
        ...

    def step(self) -> list[WorkerEvent]:
        """Advance every group in flight by about one token; report finished rows and groups at once."""
        ...

    def abort(self) -> None:
        """Drop all groups in flight; they are not reported."""
        ...

    def close(self) -> None: ...
