"""Strictly on-policy GRPO with periodic asynchrony, shown live and stepped like a debugger."""

from prl_notebook.config import GRPO, Config, Rewards, Rollout, Run, Trainer, Weights
from prl_notebook.engine import conditions
from prl_notebook.replay import LoadedRun, load_run
from prl_notebook.session import Session, SessionError, StepResult

__all__ = [
    "GRPO",
    "Config",
    "LoadedRun",
    "Rewards",
    "Rollout",
    "Run",
    "Session",
    "SessionError",
    "StepResult",
    "Trainer",
    "Weights",
    "conditions",
    "load_run",
]
