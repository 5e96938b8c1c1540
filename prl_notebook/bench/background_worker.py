"""A rollout worker in a background process, with the interface of one that is here; for measuring it.

As in a run, what is measured includes the pipe, and the start includes that of the process and its imports.
"""

from __future__ import annotations

import queue
import tempfile
from pathlib import Path
from typing import Any

from prl_notebook.config import GRPO, Config, Rollout, Run
from prl_notebook.engine.types import GroupRequest, WeightsRef
from prl_notebook.rollout.vllm_setup import worker_environment
from prl_notebook.rollout.worker import GroupDone, LoadAck, WorkerEvent
from prl_notebook.runtime.local import LocalRuntime


class BackgroundWorker:
    """A `RolloutWorker` that passes everything on to one in a process of its own."""

    def __init__(self, target: str, environment: dict[str, str], **kwargs: Any) -> None:
        self._logs = tempfile.TemporaryDirectory()
        self._runtime = LocalRuntime(Path(self._logs.name))
        self._events: queue.SimpleQueue[WorkerEvent | Exception] = queue.SimpleQueue()
        self._open = 0
        self._remote = self._runtime.start(
            "rollout-0", target, kwargs, environment=environment, on_event=self._events.put, on_death=self._events.put
        )
        self._remote.ready.result()

    @property
    def has_work(self) -> bool:
        return self._open > 0

    def load(self, ref: WeightsRef) -> LoadAck:
        return self._remote.call("load", ref)

    def submit(self, request: GroupRequest) -> None:
        self._remote.call("submit", request)
        self._open += 1

    def step(self) -> list[WorkerEvent]:
        event = self._events.get()
        if isinstance(event, Exception):
            raise event
        self._open -= isinstance(event, GroupDone)
        return [event]

    def abort(self) -> None:
        self._remote.call("abort")
        self._open, self._events = 0, queue.SimpleQueue()

    def close(self) -> None:
        self._runtime.close()
        self._logs.cleanup()


def transformers_worker(model_path: str, reproducible: bool = False) -> BackgroundWorker:
    """TransformersWorker on the CPU with one thread."""
    target = "prl_notebook.rollout.transformers_worker:TransformersWorker"
    return BackgroundWorker(target, {}, model_path=model_path, reproducible=reproducible)


def vllm_worker(model_path: str) -> BackgroundWorker:
    """VllmWorker on the CPU with room for 16 groups of 8 completions; 512 tokens of prompt and completion at most."""
    config = Config(
        grpo=GRPO(num_generations=8, max_prompt_length=256, max_completion_length=256),
        rollout=Rollout(engine="vllm", groups_in_flight=16),
        run=Run(devices="cpu"),
    )
    target = "prl_notebook.rollout.vllm_worker:VllmWorker"
    return BackgroundWorker(target, worker_environment(config), model_path=model_path, config=config)
