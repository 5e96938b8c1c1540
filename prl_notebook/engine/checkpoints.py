"""Checkpoints of a run: run_dir/checkpoints/v000010 holds what the trainer saved and engine.json.

The trainer saves policy, optimizer, learning-rate position and random states. The engine adds the period; data order
and every completion's seed derive from it, so there is nothing else to keep. A folder without engine.json is the
remains of a save that was cut short and does not count.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from prl_notebook.engine.trainer_group import TrainerGroup


@dataclass(frozen=True)
class Checkpoint:
    period: int
    """the next period to run"""
    version: int
    path: Path


class Checkpoints:
    """Saves and finds the checkpoints of a run directory."""

    def __init__(self, run_dir: Path, keep: int = 0) -> None:
        self._directory, self._keep = run_dir.resolve() / "checkpoints", keep

    def all(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        found = []
        for file in sorted(self._directory.glob("v*/engine.json")):
            known = json.loads(file.read_text())
            found.append(Checkpoint(known["period"], known["version"], file.parent))
        return found

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def at(self, period: int) -> Checkpoint:
        """The checkpoint from which `period` starts.

        Raises:
            ValueError: there is none; the message lists those there are.
        """
        found = self.all()
        for checkpoint in found:
            if checkpoint.period == period:
                return checkpoint
        listed = ", ".join(str(c.period) for c in found) or "none"
        raise ValueError(
            f"no checkpoint at period {period}; there are checkpoints at periods {listed}. "
            "Run(checkpoint_every=1, keep_checkpoints=0) keeps one for every period"
        )

    def save(self, trainer: TrainerGroup, period: int, version: int) -> Checkpoint:
        """Have the trainer save; drop the oldest beyond `keep`."""
        path = self._directory / f"v{version:06d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        trainer.call("save", path)
        part = path / "engine.part"
        part.write_text(json.dumps({"period": period, "version": version}))
        part.rename(path / "engine.json")
        if self._keep:
            for old in self.all()[: -self._keep]:
                shutil.rmtree(old.path)
        return Checkpoint(period, version, path)

    def drop_after(self, period: int) -> None:
        """Delete the checkpoints of a future that was given up."""
        for checkpoint in self.all():
            if checkpoint.period > period:
                shutil.rmtree(checkpoint.path)
