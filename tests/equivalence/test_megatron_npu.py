"""The npu path of the trainer on megatron-core against torch_npu's real operator schema and documented semantics.

A test of signatures and semantics, not a run on an NPU: a CPU reference kernel answers for the operator.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_shared_prompt_npu import torch_npu_environment  # noqa: F401  (a fixture)

HERE = Path(__file__).parent


@pytest.mark.megatron
def test_a_period_through_the_npu_kernel_equals_the_torch_trainer(torch_npu_environment):  # noqa: F811
    paths = [torch_npu_environment["PYTHONPATH"], str(HERE), str(HERE.parents[1])]
    environment = torch_npu_environment | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, HERE / "npu_megatron_child.py"], env=environment, capture_output=True, text=True, timeout=250
    )
    assert child.returncode == 0, child.stderr
    answer = json.loads(child.stdout.splitlines()[-1])
    assert answer["forms"] == [["TND", 3]]
    assert answer["error"] < 5e-6
    assert answer["missing"] == [], "torch_npu lacks what the trainer calls"
    assert answer["current_device"] == "npu:0"
    assert "npu:0 is not there" in answer["message"]
