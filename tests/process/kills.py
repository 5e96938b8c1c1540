"""Kills background processes of a running session at random moments."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

from prl_notebook import Session


class Killer(threading.Thread):
    """Sends SIGKILL to a random process of `names` again and again, `kills` times, while the session runs."""

    def __init__(self, session: Session, names: tuple[str, ...], kills: int, seed: int, pause: float) -> None:
        super().__init__(daemon=True)
        self._session, self._names, self._left = session, names, kills
        self._chance, self._pause = random.Random(seed), pause
        self.killed: list[str] = []

    def run(self) -> None:
        while self._left:
            time.sleep(self._chance.uniform(0.2, 1.0) * self._pause)
            processes = self._session.state.processes
            alive = [p for name, p in processes.items() if name in self._names and p.alive]
            if self._session.state.status in ("closed", "failed"):
                return
            if alive:
                victim = self._chance.choice(alive)
                try:
                    os.kill(victim.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                self.killed.append(victim.name)
                self._left -= 1
