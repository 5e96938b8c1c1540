"""What to start in which process: turns a configuration and a device plan into background processes.

Engines are named by their module, so nothing heavy is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from prl_notebook.config import Config
from prl_notebook.runtime.device import DevicePlan, environment
from prl_notebook.runtime.local import LocalRuntime, Remote

REWARD_ROLE = "prl_notebook.tasks.reward_process:RewardRole"
ROLLOUT_WORKERS = {
    "transformers": "prl_notebook.rollout.transformers_worker:TransformersWorker",
    "vllm": "prl_notebook.rollout.vllm_worker:VllmWorker",
    "vllm-server": "prl_notebook.rollout.vllm_server:VllmServerWorker",
}
TRAINERS = {
    "torch": "prl_notebook.training.torch_trainer:TorchTrainer",
    "megatron": "prl_notebook.training.megatron.rank:MegatronTrainerRank",
}


def threads_of(config: Config) -> tuple[int, int]:
    """CPU threads of (each rollout worker, each trainer rank).

    Half of the cores go to the trainer and half to the workers, one at least; the number of workers does not change
    the trainer's share. Reproducible workers use one thread, since the split of a sum over threads changes bits.

    Raises:
        ValueError: more than one thread is asked for reproducible workers.
    """
    if config.run.reproducible and (config.rollout.threads or 1) > 1:
        raise ValueError(
            f"Rollout.threads={config.rollout.threads} with reproducible=True: sums split over threads differ in their "
            "last bits; leave threads at None, or 1"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rollout = 1 if config.run.reproducible else max(1, cores // 2 // config.rollout.workers)
    trainer = max(1, cores // 2 // config.trainer.ranks)
    return config.rollout.threads or rollout, config.trainer.threads or trainer


class Launcher:
    """Starts the processes of one session."""

    def __init__(self, runtime: LocalRuntime, config: Config, plan: DevicePlan, model_path: str) -> None:
        self._runtime, self._config, self._plan, self._model_path = runtime, config, plan, model_path
        self._rollout_threads, self._trainer_threads = threads_of(config)

    def rollout_worker(
        self, index: int, on_event: Callable[[Any], None], on_death: Callable[[Exception], None]
    ) -> Remote:
        """Start rollout worker `index`."""
        config, devices = self._config, self._plan.rollout[index]
        rollout = config.rollout
        rows = rollout.groups_in_flight * config.grpo.num_generations
        variables = environment(devices)
        if rollout.engine == "transformers":
            kwargs: dict[str, Any] = {
                "model_path": self._model_path,
                "dtype": rollout.dtype,
                "device": devices[0].kind,
                "reproducible": config.run.reproducible,
                "max_rows": rows,
            }
        else:
            kwargs = {"model_path": self._model_path, "config": config, "index": index}
            if rollout.engine == "vllm":
                from prl_notebook.rollout.vllm_setup import worker_environment

                variables |= worker_environment(config)
        return self._runtime.start(
            f"rollout-{index}",
            ROLLOUT_WORKERS[rollout.engine],
            kwargs,
            threads=self._rollout_threads,
            environment=variables,
            on_event=on_event,
            on_death=on_death,
        )

    def trainer(self) -> list[Remote]:
        """Start every rank of the trainer."""
        config = self._config
        kwargs: dict[str, Any] = {"model_path": self._model_path, "config": config}
        if config.trainer.engine == "megatron":
            kwargs["rendezvous"] = str(self._runtime.session_dir / "rendezvous")  # type: ignore[operator]
        return [
            self._runtime.start(
                f"trainer-{rank}",
                TRAINERS[config.trainer.engine],
                {**kwargs, "device": device.kind}
                if config.trainer.engine == "torch"
                else {**kwargs, "rank": rank, "device": device.kind},
                threads=self._trainer_threads,
                environment=environment([device]),
            )
            for rank, device in enumerate(self._plan.trainer)
        ]

    def rewards(self, functions_pickled: bytes) -> Remote:
        """Start the reward process."""
        return self._runtime.start(
            "rewards",
            REWARD_ROLE,
            {
                "functions_pickled": functions_pickled,
                "weights": self._config.grpo.reward_weights,
                "tokenizer_path": self._model_path,
                "skip_special_tokens": self._config.rewards.skip_special_tokens,
            },
        )
