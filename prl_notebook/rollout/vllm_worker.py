"""Rollout worker on vLLM's engine, inside our own background process: CPU, CUDA and Ascend by the same class.

Every completion is a request of its own, since vLLM derives the seeds of n > 1 completions from one; what the K share
of their prompt they share through the prefix cache. Weights arrive through vLLM's weight-transfer API. The process
needs `vllm_setup.worker_environment` and serves nothing else: vLLM reseeds its random numbers and fixes its threads.
Left out on purpose: text, stop strings, penalties and everything else the trainer could not reproduce.

UNTESTED: CUDA and Ascend (vllm-ascend's plugin is found by its entry point, devices by ASCEND_RT_VISIBLE_DEVICES).
They use the same public interface of vLLM as the CPU, but no such machine was at hand.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from prl_notebook.config import Config
from prl_notebook.engine.types import Completion, GroupRequest, Sampling, WeightsRef
from prl_notebook.rollout.in_flight import GroupInFlight, check_request
from prl_notebook.rollout.vllm_arguments import end_ids, engine_arguments
from prl_notebook.rollout.vllm_setup import check_torchvision, check_versions
from prl_notebook.rollout.worker import LoadAck, WorkerEvent
from prl_notebook.runtime.device import parse_devices
from prl_notebook.weights.broadcast import receiver_infos


@dataclass
class _Row:
    """One completion being sampled."""

    group: GroupInFlight
    sample: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VllmWorker:
    """A `RolloutWorker` over vLLM's LLMEngine.

    The model starts with random weights: the policy comes through `load` alone, so nothing stale can be sampled from.

    Args:
        model_path: Folder or hub name; its generation config says which tokens end a completion.
        config: `rollout.options` go to vLLM's EngineArgs as they are, over the defaults chosen here.
        index: Number of this worker.

    Raises:
        VersionMix: before vLLM is imported, if the installed packages do not fit together.
    """

    def __init__(self, model_path: str, config: Config, index: int = 0) -> None:
        kind = parse_devices(config.run.devices)[0].kind
        check_versions(kind)
        check_torchvision()
        from vllm import EngineArgs, LLMEngine  # only now, when the packages are known to fit

        self.version: int | None = None
        """The policy version loaded, None before the first `load`."""
        self._end_ids = end_ids(model_path)
        self._rows: dict[str, _Row] = {}
        self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(model_path, config, kind)))
        self._context = self._engine.model_config.max_model_len
        self._first_rank = 1 + index * self._engine.vllm_config.parallel_config.world_size
        """of this worker's processes in the trainer's group, if weights are broadcast; the trainer is 0"""
        self._joined = False

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def load(self, ref: WeightsRef) -> LoadAck:
        """Load a published version, verify it in place, drop the prefix cache and acknowledge.

        Raises:
            RuntimeError: if groups are still in flight, or the prefix cache cannot be dropped.
            WeightsMismatch: if vLLM does not compute with the published weights.
        """
        start = time.perf_counter()
        if self._rows:
            raise RuntimeError(
                f"load(version {ref.version}): {len(self._rows)} completions are being sampled under version "
                f"{self.version}; let them finish or abort() first"
            )
        self.version = None
        init, update = receiver_infos(ref, self._first_rank) if ref.broadcast else ({}, asdict(ref))
        if not self._joined:
            self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init})
            self._joined = True
        self._engine.collective_rpc("expect_policy")
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", kwargs={"update_info": update})
        self._engine.collective_rpc("finish_weight_update")
        (checksum,) = set(self._engine.collective_rpc("settle_policy"))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(f"vLLM kept key-value blocks of the policy before version {ref.version}")
        self.version = ref.version
        return LoadAck(self.version, checksum, time.perf_counter() - start)

    def submit(self, request: GroupRequest) -> None:
        """Hand the K completions of a group to vLLM's scheduler.

        Raises:
            ValueError: if the version is not the one loaded, or vLLM could not sample the group as asked.
        """
        check_request(request, self.version, self._context)
        group = GroupInFlight(request)
        for sample, seed in enumerate(request.seeds):
            name = f"{request.period}/{request.group}/{sample}"
            self._rows[name] = _Row(group, sample)
            self._engine.add_request(
                name,
                {"type": "token", "prompt_token_ids": list(request.prompt_ids)},
                sampling_params(request.sampling, seed, self._end_ids),
            )

    def step(self) -> list[WorkerEvent]:
        """One step of vLLM: prefill what fits of the waiting prompts and sample a token for every running row."""
        events: list[WorkerEvent] = []
        for output in self._engine.step():
            row, (new,) = self._rows[output.request_id], output.outputs
            row.ids += new.token_ids
            row.logprobs += new.logprobs.logprobs
            row.group.tokens += len(new.token_ids)
            if output.finished:
                del self._rows[output.request_id]
                completion = Completion(
                    np.array(row.ids, np.int32), np.array(row.logprobs, np.float32), new.finish_reason
                )
                events += row.group.finish(row.sample, completion)
        return events

    def abort(self) -> None:
        """Drop all groups, waiting or in flight; they are not reported."""
        self._engine.abort_request(list(self._rows))
        self._rows.clear()

    def close(self) -> None:
        """Drop all groups and end the processes that vLLM started, if any; this process is to end next."""
        self.abort()
        if (
            self._engine.vllm_config.parallel_config.world_size > 1
        ):  # else vLLM's shutdown only collects garbage, slowly
            self._engine.engine_core.shutdown()


def sampling_params(sampling: Sampling, seed: int, end: list[int]) -> Any:
    """vLLM's SamplingParams for one completion: token by token, with the log-prob of the sampled token alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_completion_length,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,  # a tokenizer's EOS may not be one of the model's; stop_token_ids are complete
        stop_token_ids=end,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
