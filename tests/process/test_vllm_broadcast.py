"""Weights by broadcast to the real vLLM, with gloo standing in for NCCL (see broadcast_stand_in).

Everything else is real on both ends: announcement, vLLM's sending and receiving engines, its workers on CPU, the fence.
What these tests cannot show: that NCCL or HCCL itself works between devices, and how fast.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from small_runs import events_of, final_weights, required
from vllm_cases import CONFIG, WorkerProcess, make_model, request, trainer_logprobs

from prl_notebook import Rollout, Run, Session, Trainer, Weights, session
from prl_notebook.engine import events as ev
from prl_notebook.rollout.guard import mismatch_guard
from prl_notebook.rollout.vllm_setup import worker_environment
from prl_notebook.runtime import launch
from prl_notebook.runtime.device import environment
from prl_notebook.runtime.local import LocalRuntime, ProcessDied
from prl_notebook.weights import checksum, load_weights, publish
from prl_notebook.weights.broadcast import Broadcast, DrivenByTheRun, Source, receiver_infos

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
NCCL = Weights(transfer="nccl")
MISMATCH = "sampling/sampling_logp_difference/max"


@pytest.fixture(autouse=True)
def vllm_is_there() -> None:
    required(importlib.util.find_spec("vllm") is not None, "vLLM is not installed; see the README's install lines")


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[LocalRuntime]:
    runtime = LocalRuntime(tmp_path / "logs")
    yield runtime
    runtime.close()


@pytest.mark.parametrize("tied", [True, False])
def test_every_version_arrives_bit_for_bit_in_every_worker(runtime: LocalRuntime, tmp_path: Path, tied: bool) -> None:
    model = make_model(tmp_path / "model", tied)
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, workers=2), weights=NCCL)
    arguments, variables = {"model_path": str(tmp_path / "model"), "config": config}, environment([])
    trainer = runtime.start("trainer", "broadcast_stand_in:Sender", arguments, environment=variables)
    workers = [
        WorkerProcess(
            runtime,
            f"worker-{index}",
            "broadcast_stand_in:GlooVllmWorker",
            variables | worker_environment(config),
            **arguments,
            index=index,
        )
        for index in range(2)
    ]
    for worker in workers:
        worker.remote.ready.result(180)
    for version in range(4):
        ref = trainer.call("publish", version, tmp_path)
        loading = [worker.remote.submit("load", ref) for worker in workers]
        trainer.call("send", timeout=120)
        acknowledged = [future.result(120) for future in loading]
        weights = trainer.call("weights")
        expected = checksum(weights) if version == 0 else ""
        assert ref.checksum == expected
        assert [(a.version, a.checksum) for a in acknowledged] == [(version, expected)] * 2
        for worker in workers:
            assert worker.remote.call("differing", weights) == []
    load_weights(model, weights)
    one = request(0, version, prompt_length=70)
    for worker in workers:
        (group,) = worker.run([one]).values()
        assert mismatch_guard(group, trainer_logprobs(model, group, one.sampling)) < 1e-4


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions on CPU broadcast."""
    monkeypatch.setitem(launch.ROLLOUT_WORKERS, "vllm", "broadcast_stand_in:GlooVllmWorker")
    monkeypatch.setitem(launch.TRAINERS, "torch", "broadcast_stand_in:GlooTorchTrainer")
    monkeypatch.setitem(launch.TRAINERS, "megatron", "broadcast_megatron:GlooMegatronRank")
    monkeypatch.setattr(session, "choose_transfer", lambda transfer, plan: transfer)


@pytest.mark.strict
def test_a_run_ends_in_the_same_weights_as_with_files(make_session, tmp_path, gloo) -> None:
    make_model(tmp_path / "model", tied=True)
    exact = Run(reproducible=True, consume="prompt_order", devices="cpu")
    vllm = Rollout(engine="vllm", workers=2)

    def run(weights: Weights) -> Session:
        done = make_session(model=tmp_path / "model", run=exact, rollout=vllm, weights=weights)
        done.run(3).wait()
        assert [m[MISMATCH] < 1e-4 for m in done.metrics] == [True] * 3
        return done

    by_broadcast = run(NCCL)
    by_broadcast.rewind(0)  # which broadcasts a version once more
    by_broadcast.run(3).wait()
    acknowledged = events_of(by_broadcast, ev.WeightsAcknowledged)
    assert [e.version for e in acknowledged] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [bool(e.checksum) for e in acknowledged] == [True] * 2 + [False] * 14
    assert final_weights(by_broadcast) == final_weights(run(Weights()))


def test_ranks_of_megatron_core_broadcast_what_they_gather(make_session, tmp_path, gloo) -> None:
    required(importlib.util.find_spec("megatron") is not None, "megatron-core is not installed; see the README")
    make_model(tmp_path / "model", tied=False)
    running = make_session(
        model=tmp_path / "model",
        run=Run(devices="cpu"),
        rollout=Rollout(engine="vllm"),
        trainer=Trainer(engine="megatron", tensor_parallel=2),
        weights=NCCL,
    )
    running.run(2).wait()
    assert [m[MISMATCH] < 1e-4 for m in running.metrics] == [True] * 2
    assert [e.version for e in events_of(running, ev.WeightsAcknowledged)] == [0, 1, 2]


def test_a_worker_that_dies_ends_the_run(make_session, tmp_path, gloo) -> None:
    make_model(tmp_path / "model", tied=True)
    running = make_session(
        model=tmp_path / "model", run=Run(devices="cpu"), rollout=Rollout(engine="vllm"), weights=NCCL
    )
    running.step()
    os.kill(running.state.processes["rollout-0"].pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match=r"rollout-0 died"):
        running.run(2).wait(120)


def test_what_vllm_is_told_fits_its_classes(tmp_path: Path) -> None:
    """vLLM 0.32's; nothing is started."""
    from vllm.distributed.weight_transfer import base, nccl_engine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.v1.worker.gpu_worker import Worker

    config = replace(CONFIG, rollout=replace(CONFIG.rollout, options={"tensor_parallel_size": 2}), weights=NCCL)
    weights = {"a.weight": torch.ones(2, 3, dtype=torch.float64), "steps": torch.arange(4)}
    ref = Broadcast(config, torch.device("cpu")).publish(weights, 3, tmp_path)
    assert (ref.version, ref.broadcast, ref.nbytes) == (3, True, 6 * 4 + 4 * 8)
    init, update = receiver_infos(ref, first_rank=5)
    joined = nccl_engine.NCCLWeightTransferInitInfo(**init)
    assert (joined.rank_offset, joined.world_size, joined.packed) == (5, 3, True)
    expected = nccl_engine.NCCLWeightTransferUpdateInfo(**update)
    assert (expected.names, expected.dtype_names) == (list(weights), ["float32", "int64"])

    source = Source(torch.device("cpu"), torch.float32, weights)
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source
    ]
    meeting = {name: init[name] for name in ("master_address", "master_port", "world_size")}
    sends = nccl_engine.NCCLTrainerInitInfo(**meeting, packed=True, rank=0)
    engine = WeightTransferTrainerFactory._registry["nccl"]()
    inspect.signature(engine.trainer_init).bind(sends, client=DrivenByTheRun(), source=source)
    inspect.signature(engine.send_weights).bind(engine)
    assert isinstance(DrivenByTheRun(), base.VLLMWeightSyncClient)
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        ours, theirs = (inspect.signature(getattr(c, name)) for c in (DrivenByTheRun, base.VLLMWeightSyncClient))
        assert list(ours.parameters) == list(theirs.parameters)
    assert WeightTransferEngineFactory._registry["nccl"]() is nccl_engine.NCCLWeightTransferEngine
    inspect.signature(Worker.init_weight_transfer_engine).bind(None, init_info=init)
    inspect.signature(Worker.update_weights).bind(None, update_info=update)
    inspect.signature(Worker.start_weight_update).bind(None)
    inspect.signature(Worker.finish_weight_update).bind(None)
    assert json.loads(Path(ref.path).read_text())["update_info"] == update


def test_what_vllm_ascend_is_told_fits_the_interface_it_was_read_to_have(tmp_path: Path, monkeypatch) -> None:
    """vllm-ascend 0.23 cannot be installed beside this vLLM: its class is played, with the names of its source."""
    calls: list[tuple[dict, dict]] = []

    class HCCLWeightTransferEngine:
        @staticmethod
        def trainer_init(init_info: dict) -> str:
            assert {"master_address", "master_port", "world_size"} <= set(init_info)
            return "group"

        @staticmethod
        def trainer_send_weights(iterator: Iterator, trainer_args: dict) -> None:
            calls.append((dict(iterator), trainer_args))

    name = "vllm_ascend.distributed.weight_transfer.hccl_engine"
    for parent in ("vllm_ascend", "vllm_ascend.distributed", "vllm_ascend.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    module.HCCLWeightTransferEngine = HCCLWeightTransferEngine
    monkeypatch.setitem(sys.modules, name, module)

    sender = Broadcast(replace(CONFIG, weights=Weights(transfer="hccl")), torch.device("cpu"))
    weights = {"a.weight": torch.ones(2, 3)}
    ref = sender.publish(weights, 0, tmp_path)
    init, update = receiver_infos(ref, first_rank=1)
    assert set(init) == {"master_address", "master_port", "rank_offset", "world_size"}
    assert set(update) == {"names", "dtype_names", "shapes", "packed"}
    sender.send()
    (sent, arguments) = calls[0]
    assert checksum(sent) == ref.checksum and arguments == {"group": "group", "packed": True}


def test_files_are_read_through_the_older_interface_as_well(tmp_path: Path) -> None:
    """vllm-ascend 0.23 hands `load_weights` over, and wants a method that sends."""
    from prl_notebook.rollout.vllm_weights import PublishedVersion, SafetensorsTransfer

    ref, loaded = publish({"a.weight": torch.ones(2, 3)}, 4, tmp_path), {}
    SafetensorsTransfer.receive_weights(object(), PublishedVersion(**asdict(ref)), load_weights=loaded.update)
    assert checksum(loaded) == ref.checksum
    inspect.signature(SafetensorsTransfer.trainer_send_weights).bind(iterator=(), trainer_args={})
