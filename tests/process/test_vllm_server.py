"""A rollout worker over HTTP, against a real vLLM server that the test starts on the loopback interface."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from small_runs import required
from transformers import PreTrainedModel
from vllm_cases import CONFIG, END_IDS, WorkerProcess, assert_same, change, make_model, request, trainer_logprobs

from prl_notebook.config import Config, Rollout, Run
from prl_notebook.rollout.guard import mismatch_guard
from prl_notebook.rollout.vllm_server import ServerError, VllmServerWorker, server_command
from prl_notebook.runtime.local import LocalRuntime, RemoteError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
START_SECONDS = 600
"""A server needs 15 s on an idle machine."""


@dataclass
class Served:
    """A worker process, the server it talks to, and the model as the trainer has it."""

    worker: WorkerProcess
    model: PreTrainedModel
    folder: Path
    config: Config
    version: int = -1

    def update(self) -> None:
        self.version += 1
        self.worker.load(self.model, self.version, self.folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"no answer from {url}:\n{log.read_text()}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    required(importlib.util.find_spec("vllm") is not None, "vLLM is not installed; see the README's install lines")
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    model = make_model(folder / "model", tied=True)
    config = replace(CONFIG, rollout=Rollout(engine="vllm-server", urls=(f"http://127.0.0.1:{port}",)))
    command, environment = server_command(str(folder / "model"), config, port)
    log, runtime = folder / "server.log", LocalRuntime(folder / "logs")
    with log.open("wb") as sink:
        server = subprocess.Popen(
            command,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_up(config.rollout.urls[0], server, log)
        target = "prl_notebook.rollout.vllm_server:VllmServerWorker"
        worker = WorkerProcess(runtime, "client", target, {}, model_path=str(folder / "model"), config=config)
        worker.remote.ready.result(60)
        yield Served(worker, model, folder, config)
    finally:
        runtime.close()
        processes = [root := psutil.Process(server.pid), *root.children(recursive=True)]
        server.terminate()
        left = psutil.wait_procs(processes, timeout=30)[1]
        for process in left:
            process.kill()
    assert not left


def test_logprobs_over_http_are_the_trainers_after_updates(served: Served) -> None:
    for _ in range(3):
        served.update()
        one = request(served.version, served.version, prompt_length=70, temperature=0.8, top_p=0.9)
        (group,) = served.worker.run([one]).values()
        assert mismatch_guard(group, trainer_logprobs(served.model, group, one.sampling)) < 1e-4
        change(served.model, 1e-2)


def test_sampling_over_http_does_not_depend_on_the_batch(served: Served) -> None:
    served.update()
    requests = [request(group, served.version) for group in range(4)]
    together = served.worker.run(requests)
    assert_same(together, served.worker.run(requests, at_once=False))
    completions = [c for group in together.values() for c in group.completions]
    assert len({tuple(c.ids_R) for c in completions}) == len(completions)
    for completion in completions:
        assert (completion.finish_reason == "stop") == (completion.ids_R[-1] in END_IDS)


def test_abort_over_http_makes_room_for_an_update(served: Served) -> None:
    served.update()
    for group in range(4):
        served.worker.remote.submit("submit", request(group, served.version, max_completion_length=240))
    served.worker.remote.call("abort", timeout=60)
    while not served.worker.events.empty():
        served.worker.next_event()
    served.update()
    one = request(7, served.version)
    (group,) = served.worker.run([one]).values()
    assert group.group == 7


def test_another_version_is_refused_over_http(served: Served) -> None:
    served.update()
    with pytest.raises(RemoteError, match=r"asks for policy version 99, but version \d+ is loaded"):
        served.worker.remote.call("submit", request(0, 99), timeout=60)


def test_a_session_trains_on_a_server(served: Served, make_session) -> None:
    """The server is there before the session and after it; its weights are the session's meanwhile."""
    session = make_session(model=served.folder / "model", rollout=served.config.rollout, run=Run(devices="cpu"))
    session.run(2).wait()
    assert [m["sampling/sampling_logp_difference/max"] < 1e-4 for m in session.metrics] == [True] * 2
    assert session.state.version == 2
    served.update()


def test_a_server_with_other_options_is_refused(served: Served) -> None:
    config = replace(served.config, rollout=replace(served.config.rollout, dtype="bfloat16"))
    with pytest.raises(ServerError, match="--dtype is 'float32', not 'bfloat16'"):
        VllmServerWorker(str(served.folder / "model"), config)


def test_a_server_that_is_not_there_is_named(served: Served) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = replace(served.config, rollout=replace(served.config.rollout, urls=(url,)))
    with pytest.raises(ServerError, match=r"127.0.0.1.*is the vLLM server running\?"):
        VllmServerWorker(str(served.folder / "model"), config)
