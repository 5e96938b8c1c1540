"""`prl bench learning`: does the bundled default learn, for several seeds, and how fast?"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PERIODS = 60
WINDOW = 3
"""rewards are means of this many periods"""


def learning(seeds: tuple[int, ...] = (1, 2, 3)) -> dict[str, Any]:
    """{"seeds": [{seed, reward_first, reward_last, periods_to_090, seconds_to_090, seconds}]}; means of 3 periods."""
    from prl_notebook import Session

    results = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder, Session(run_dir=Path(folder) / "run", seed=seed) as session:
            session.step()  # processes are up from here on
            began = time.perf_counter()
            start = session.state.t
            session.run(PERIODS - 1).wait()
            seconds = time.perf_counter() - began
            rewards = [m["reward"] for m in session.metrics]
            means = [sum(rewards[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(rewards) + 1)]
            reached = next((i + WINDOW for i, mean in enumerate(means) if mean >= 0.9), None)
            finished = {m: t for m, t in zip(range(1, PERIODS + 1), _ends(session), strict=True)}
        results.append(
            {
                "seed": seed,
                "reward_first": round(means[0], 3),
                "reward_last": round(means[-1], 3),
                "periods_to_090": reached,
                "seconds_to_090": round(finished[reached] - start, 1) if reached else None,
                "seconds": round(seconds, 1),
            }
        )
        print(results[-1], file=sys.stderr)
    return {"seeds": results}


def _ends(session: Any) -> list[float]:
    from prl_notebook.engine.events import PeriodFinished, read_events

    return [e.t for e in read_events(session.run_dir / "events.jsonl") if isinstance(e, PeriodFinished)]
