"""Empty stand-ins for Ascend's CANN libraries, so that the real torch_npu wheel can be imported without an NPU.

That gives the operators with their true schemas: a wrong keyword or type is rejected. No NPU kernel exists behind
them; what a test calls is what the test registers.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import torch

NAMED_BY_CPYTHON = ("Py", "_Py")
CXX_DATA = ("_ZTV", "_ZTI", "_ZTS")
"""Mangled names of virtual tables, type informations and their names: data; all else is taken for a function."""


def environment(package: Path, folder: Path) -> dict[str, str]:
    """Environment in which `import torch_npu` finds the unpacked package and the stand-ins built in `folder`."""
    _build(package, folder)
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def _build(package: Path, folder: Path) -> None:
    ours = [*package.glob("*.so"), *package.glob("lib/*.so")]
    present = [*Path(torch.__file__).parent.glob("lib/*.so*"), *_system_libraries()]
    defined = {symbol for library in [*ours, *present] for symbol in _symbols(library, "--defined-only")}
    wanted = {symbol for library in ours for symbol in _symbols(library, "--undefined-only")} - defined
    missing = sorted(symbol for symbol in wanted if not symbol.startswith(NAMED_BY_CPYTHON))
    source = folder / "stand_in.c"
    source.write_text("\n".join(_definition(n, symbol) for n, symbol in enumerate(missing)))
    library = folder / "libstand_in.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    for name in {name for each in ours for name in _needed(each)} - {path.name for path in [*ours, *present]}:
        (folder / name).symlink_to(library)


def _definition(number: int, symbol: str) -> str:
    if symbol.startswith(CXX_DATA):
        return f'char data_{number}[256] __asm__("{symbol}");'
    return f'long function_{number}(void) __asm__("{symbol}"); long function_{number}(void) {{ return 0; }}'


def _symbols(library: Path, which: str) -> set[str]:
    """Names without those that a versioned system library must provide and without weak ones."""
    lines = _output("nm", "-D", which, "--format=posix", str(library)).splitlines()
    fields = [line.split() for line in lines if line]
    if which == "--defined-only":
        return {name.split("@")[0] for name, *_ in fields}
    return {name for name, kind, *_ in fields if kind == "U" and "@" not in name}


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-d", str(library)))


def _system_libraries() -> list[Path]:
    """What the loader finds by itself, as far as a C++ extension may need it."""
    paths = re.findall(r"=> (\S+)", _output("/sbin/ldconfig", "-p"))
    return [Path(p) for p in paths if re.match(r"(ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.)", Path(p).name)]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
