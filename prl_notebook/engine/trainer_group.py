"""The trainer as the engine sees it: one object, whether it is one process or many ranks.

Every rank gets every call in the same order and rank 0 answers. A rank that fails takes the others with it, since they
would wait for it in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from prl_notebook.runtime.local import Remote


class TrainerGroup:
    """Ranks of one trainer."""

    def __init__(self, ranks: Sequence[Remote]) -> None:
        self.ranks = list(ranks)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method on every rank; the future is rank 0's."""
        answers = [rank.submit(method, *args, **kwargs) for rank in self.ranks]
        return answers[0]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on every rank and wait for all of them.

        Raises:
            RemoteError, ProcessDied: of the first rank that failed; the other ranks have then been killed.
        """
        futures = [rank.submit(method, *args, **kwargs) for rank in self.ranks]
        self._join(futures)
        return futures[0].result()

    def wait_ready(self) -> None:
        """Wait until every rank has been made."""
        self._join([rank.ready for rank in self.ranks])

    def _join(self, futures: list[Future[Any]]) -> None:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((f for f in done if f.exception()), None)
        if failed:
            for rank in self.ranks:
                rank.kill()
            failed.result()
