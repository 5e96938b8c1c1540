"""Start real trainer ranks over gloo in background processes, as the runtime does, and call them together.

Importing megatron-core takes longer than most tests, so the processes are kept and given one trainer after another.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prl_notebook.config import Config
from prl_notebook.runtime.local import LocalRuntime, Remote

WAIT = 60


class RankHost:
    """Lives in a background process and holds one rank of one trainer at a time."""

    def make(self, **kwargs: Any) -> None:
        from prl_notebook.training.megatron.rank import MegatronTrainerRank

        self.trainer = MegatronTrainerRank(**kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.trainer, method)(*args, **kwargs)

    def whole_gradient(self, micro_steps: list) -> dict[str, Any]:
        """The gradient itself by Hugging Face name (`Trainer.gradient` tells its norm only)."""
        from prl_notebook.training.megatron.patches import megatron_on

        with megatron_on(self.trainer.device):
            return {name: g.numpy() for name, g in self.trainer._gradient(micro_steps).items()}

    def fail_in_a_micro_step(self, rank: int, dies: bool, groups: list) -> None:
        """Rank `rank` ends or raises while the others wait for it."""
        import torch.distributed as dist

        if dist.get_rank() != rank:
            self.trainer.accumulate(groups)
        elif dies:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise ArithmeticError("on purpose")

    def listening(self) -> list[str]:
        """Addresses on which this process accepts connections."""
        import psutil

        found = psutil.Process().net_connections(kind="inet")
        return [connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN]


class Ranks:
    """All ranks of one trainer. `ranks.method(...)` calls every rank and answers what rank 0 answers."""

    def __init__(self, remotes: list[Remote]) -> None:
        self.remotes = remotes

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.on_all("call", method, *args, **kwargs)[0]

        return call

    def on_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        futures = [remote.submit(method, *args, **kwargs) for remote in self.remotes]
        return [future.result(WAIT) for future in futures]


class RankPool:
    """Processes that take one trainer after another; started when first needed, replaced after a failure."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runtime = LocalRuntime(directory / "logs")
        self.remotes: list[Remote] = []
        self._numbers = itertools.count()

    @contextmanager
    def trainer(self, model: Path, config: Config, **kwargs: Any) -> Iterator[Ranks]:
        """A trainer of `config.trainer.ranks` ranks."""
        number = next(self._numbers)
        for n in range(len(self.remotes), config.trainer.ranks):
            self.remotes.append(self.runtime.start(f"rank{n}-{number}", f"{__name__}:RankHost", {}))
        ranks = Ranks(self.remotes[: config.trainer.ranks])
        common = {"model_path": model, "config": config, "rendezvous": self.directory / f"rendezvous{number}", **kwargs}
        try:
            made = [remote.submit("make", **common, rank=rank) for rank, remote in enumerate(ranks.remotes)]
            for future in made:
                future.result(WAIT)
            yield ranks
            ranks.on_all("call", "close")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes; none may be left."""
        self.runtime.close()
        self.remotes = []
        assert self.runtime.pids() == []
