"""The npu kernel against torch_npu's real operator schema and documented semantics.

A test of signatures and semantics, not a run on an NPU: a CPU reference kernel answers for the operator.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import ascend_stand_in
import pytest
import torch
from small_runs import required

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def torch_npu_environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch_npu")
    for tool in ("gcc", "nm", "readelf"):
        required(shutil.which(tool) is not None, f"{tool} is needed to build the stand-ins")
    requirement = f"torch-npu=={torch.__version__.split('+')[0]}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    downloaded = subprocess.run([*pip, "--dest", str(folder), requirement]).returncode == 0
    required(downloaded, f"{requirement} could not be downloaded")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    stand_ins = folder / "stand_ins"
    stand_ins.mkdir()
    return ascend_stand_in.environment(folder / "unpacked" / "torch_npu", stand_ins)


@pytest.mark.slow
def test_both_npu_forms_equal_single_rows_behind_the_real_schema(torch_npu_environment):
    environment = torch_npu_environment | {
        "PYTHONPATH": os.pathsep.join([torch_npu_environment["PYTHONPATH"], str(HERE), str(HERE.parents[1])])
    }
    child = subprocess.run(
        [sys.executable, HERE / "npu_attention_child.py"], env=environment, capture_output=True, text=True, timeout=250
    )
    assert child.returncode == 0, child.stderr
    answer = json.loads(child.stdout.splitlines()[-1])
    assert answer["forms"] == [["SBH", 1], ["TND", 3]]
    assert answer["rejects"], "the real schema must reject a keyword it does not have"
    assert set(answer["errors"]) == {"TND, one row", "TND, padded rows", "SBH, one row", "SBH, padded rows"}
    for name, (logprob_error, gradient_error) in answer["errors"].items():
        assert logprob_error <= 1e-10, name
        assert gradient_error <= 1e-10, name
