"""Rollout worker that talks to vLLM's OpenAI-compatible server, for workers on other machines.

Token ids go in and come out, so nothing is tokenised again. Weights go through the server's weight routes: its workers
read the file published by `weights/`, so a server elsewhere needs the directory of the published versions mounted at
the same path. The server must be started as `server_command` says; that is checked first. A server serves one session:
its weights change, and an abort ends every request it has. Left out on purpose: starting and stopping servers, progress
within a completion, and TLS options beyond those of the standard library.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any

import numpy as np

from prl_notebook.config import Config
from prl_notebook.engine.types import Completion, GroupRequest, WeightsRef
from prl_notebook.rollout.in_flight import GroupInFlight, check_request
from prl_notebook.rollout.vllm_arguments import WEIGHTS_BACKEND, end_ids, engine_arguments
from prl_notebook.rollout.vllm_setup import worker_environment
from prl_notebook.rollout.worker import LoadAck, WorkerEvent
from prl_notebook.runtime.device import parse_devices

PATIENCE_SECONDS = 0.1
"""Longest wait of one step for a completion to finish."""


class ServerError(RuntimeError):
    """The server cannot be reached, refused a request, or is not set up for exact rollouts."""


class VllmServerWorker:
    """A `RolloutWorker` whose sampling happens in a vLLM server.

    Args:
        model_path: The model the server runs, as this machine finds it; its generation config says what ends a
            completion.
        config: `rollout.urls[index]` is the server's base URL.
        index: Number of this worker.

    Raises:
        ServerError: if the server is not reachable or was started with other options than `server_command`'s.
    """

    def __init__(self, model_path: str, config: Config, index: int = 0) -> None:
        self.version: int | None = None
        """The policy version loaded, None before the first `load`."""
        self._url = config.rollout.urls[index].rstrip("/")
        self._end_ids = end_ids(model_path)
        self._check_server(config.rollout.dtype)
        (model,) = self._get("/v1/models")["data"]
        self._model, self._context = model["id"], model["max_model_len"]
        self._threads = ThreadPoolExecutor(config.rollout.groups_in_flight * config.grpo.num_generations, "completion")
        self._running: dict[Future[dict[str, Any]], tuple[GroupInFlight, int]] = {}
        self._finished: queue.SimpleQueue[Future[dict[str, Any]]] = queue.SimpleQueue()
        self._post("/init_weight_transfer_engine", {"init_info": {}})

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def load(self, ref: WeightsRef) -> LoadAck:
        """Let the server load a published version, verify it, drop its prefix cache and acknowledge.

        Raises:
            RuntimeError: if groups are still in flight, or the prefix cache cannot be dropped.
            ServerError: with the server's words, if it could not load the version.
        """
        start = time.perf_counter()
        if self._running:
            raise RuntimeError(
                f"load(version {ref.version}): {len(self._running)} completions are being sampled under version "
                f"{self.version}; let them finish or abort() first"
            )
        self.version = None
        self._post("/collective_rpc", {"method": "expect_policy"})
        self._post("/start_weight_update")
        self._post("/update_weights", {"update_info": asdict(ref)})
        self._post("/finish_weight_update", {"weight_version": str(ref.version)})
        (checksum,) = set(self._post("/collective_rpc", {"method": "settle_policy"})["results"])
        if not self._post("/reset_prefix_cache")["success"]:
            raise RuntimeError(f"{self._url} kept key-value blocks of the policy before version {ref.version}")
        self.version = int(self._get("/weight_info")["weight_version"])
        return LoadAck(self.version, checksum, time.perf_counter() - start)

    def submit(self, request: GroupRequest) -> None:
        """Send the K completions of a group to the server, one HTTP request each.

        Raises:
            ValueError: if the version is not the one loaded, or vLLM could not sample the group as asked.
        """
        check_request(request, self.version, self._context)
        group, sampling = GroupInFlight(request), request.sampling
        for sample, seed in enumerate(request.seeds):
            body = {
                "model": self._model,
                "prompt": list(request.prompt_ids),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": sampling.max_completion_length,
                "seed": seed,
                "logprobs": 0,
                "return_token_ids": True,
                "ignore_eos": True,  # a tokenizer's EOS may not be one of the model's; stop_token_ids are complete
                "stop_token_ids": self._end_ids,
                # Left open, these would come from the model's generation config.
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            }
            future = self._threads.submit(self._post, "/v1/completions", body)
            self._running[future] = (group, sample)
            future.add_done_callback(self._finished.put)

    def step(self) -> list[WorkerEvent]:
        """Wait a moment for completions to finish and report those that did.

        Raises:
            ServerError: if the server refused or dropped a request.
        """
        events: list[WorkerEvent] = []
        try:
            done = [self._finished.get(timeout=PATIENCE_SECONDS)]
        except queue.Empty:
            return events
        while not self._finished.empty():
            done.append(self._finished.get())
        for future in done:
            group, sample = self._running.pop(future)
            (choice,) = future.result()["choices"]
            ids_R = np.array(choice["token_ids"], np.int32)
            logprobs_R = np.array(choice["logprobs"]["token_logprobs"], np.float32)
            group.tokens += len(ids_R)
            events += group.finish(sample, Completion(ids_R, logprobs_R, choice["finish_reason"]))
        return events

    def abort(self) -> None:
        """Drop all groups, waiting or in flight; they are not reported."""
        if self._running:
            for future in self._running:
                future.cancel()
            self._post("/abort_requests", {})
            wait(self._running)
            self._running.clear()
            self._finished = queue.SimpleQueue()

    def close(self) -> None:
        """Drop all groups; the server keeps running."""
        self.abort()
        self._threads.shutdown()

    def _check_server(self, dtype: str) -> None:
        found = self._get("/server_info?config_format=json")["vllm_config"]
        model, transfer = found["model_config"], found["weight_transfer_config"] or {}
        wrong = [
            f"{name} is {value!r}, not {wanted!r}"
            for name, value, wanted in (
                ("--logprobs-mode", model["logprobs_mode"], "processed_logprobs"),
                ("--dtype", model["dtype"].removeprefix("torch."), dtype),
                ("--weight-transfer-config's backend", transfer.get("backend"), WEIGHTS_BACKEND),
            )
            if value != wanted
        ]
        if wrong:
            raise ServerError(f"{self._url} runs with other options than exact rollouts need: {'; '.join(wrong)}")

    def _get(self, path: str) -> Any:
        return self._send(urllib.request.Request(self._url + path))

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._send(urllib.request.Request(self._url + path, json.dumps(body or {}).encode(), headers))

    def _send(self, request: urllib.request.Request) -> Any:
        if key := os.environ.get("VLLM_API_KEY"):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            hint = "; is it started with VLLM_SERVER_DEV_MODE=1?" if error.code == 404 else ""
            raise ServerError(f"{request.full_url}: {error} {error.read().decode(errors='replace')}{hint}") from error
        except OSError as error:
            raise ServerError(f"{request.full_url}: {error}; is the vLLM server running?") from error


def server_command(
    model_path: str, config: Config, port: int, host: str = "127.0.0.1"
) -> tuple[list[str], dict[str, str]]:
    """How to start a server that VllmServerWorker can use: (arguments, environment variables).

    The weight routes let anyone who reaches the port replace the model: keep it on a private network.
    """
    kind = parse_devices(config.run.devices)[0].kind
    arguments = engine_arguments(model_path, config, kind) | {"skip_tokenizer_init": False, "host": host, "port": port}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return command, worker_environment(config) | {"VLLM_SERVER_DEV_MODE": "1"}
