"""Who gets which device, without any device and without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prl_notebook.config import Rollout, Trainer
from prl_notebook.runtime.device import Device, environment, parse_devices, plan_devices


def megatron(**sizes: int) -> Trainer:
    return Trainer(engine="megatron", **sizes)


def test_the_trainer_takes_the_last_devices_and_workers_the_first():
    plan = plan_devices("npu:0-7", Rollout(workers=3), megatron(tensor_parallel=2, pipeline_parallel=2))
    assert [[d.index for d in devices] for devices in plan.rollout] == [[0], [1], [2]]
    assert [d.index for d in plan.trainer] == [4, 5, 6, 7]
    assert [d.index for d in plan.idle] == [3]
    assert not plan.shared
    assert str(plan).splitlines() == [
        "rollout worker 0: npu:0",
        "rollout worker 1: npu:1",
        "rollout worker 2: npu:2",
        "trainer rank 0: npu:4",
        "trainer rank 1: npu:5",
        "trainer rank 2: npu:6",
        "trainer rank 3: npu:7",
        "idle: npu:3",
    ]


def test_a_worker_takes_as_many_devices_as_its_engine_is_parallel():
    rollout = Rollout(engine="vllm", workers=2, options={"tensor_parallel_size": 2})
    plan = plan_devices("cuda:0,2,4,6,1", rollout, Trainer())
    assert [[d.index for d in devices] for devices in plan.rollout] == [[0, 2], [4, 6]]
    assert [d.index for d in plan.trainer] == [1]


def test_a_single_accelerator_and_the_cpu_are_shared():
    plan = plan_devices("cuda:3", Rollout(), Trainer())
    assert plan.shared
    assert "share one accelerator" in str(plan)
    on_cpu = plan_devices("cpu", Rollout(workers=2), megatron(data_parallel=2))
    assert on_cpu.shared
    assert len(on_cpu.rollout) == len(on_cpu.trainer) == 2


def test_servers_need_no_device_here():
    rollout = Rollout(engine="vllm-server", workers=2, urls=("http://a:1", "http://b:1"))
    plan = plan_devices("npu:0-1", rollout, megatron(tensor_parallel=2))
    assert [str(d) for d in plan.trainer] == ["npu:0", "npu:1"]
    assert "rollout worker 1: its own server" in str(plan)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("npu:0-3", "names 4 devices, but the trainer has 4 ranks and 1 rollout workers need 1 more"),
        ("tpu", "is not 'auto', 'cpu', 'cuda', 'npu'"),
        ("npu:3-1", "'3-1' is no index"),
        ("npu:0,x", "'x' is no index"),
        ("npu:0,0", "names a device twice"),
        ("cpu:0", "is not 'auto', 'cpu', 'cuda', 'npu'"),
    ],
)
def test_what_does_not_fit_is_named(devices, message):
    with pytest.raises(ValueError, match=message):
        plan_devices(devices, Rollout(), megatron(tensor_parallel=4))


def test_a_kind_that_is_not_there_points_to_the_doctor(monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="prl doctor"):
        parse_devices("npu")


def test_a_child_sees_the_parents_devices_by_the_parents_numbers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert environment([Device("cuda", 1), Device("cuda", 3)])["CUDA_VISIBLE_DEVICES"] == "5,7"
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert environment([Device("npu", 2)])["ASCEND_RT_VISIBLE_DEVICES"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in environment([Device("cpu")])


def test_opening_a_device_that_is_not_there_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"needs torch_npu.*prl doctor"):
        Device("npu").open()
    assert Device("cpu").open().type == "cpu"


@pytest.mark.parametrize("module", ["prl_notebook.runtime.device", "prl_notebook.runtime.doctor"])
def test_planning_and_diagnosis_do_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
