"""environment.yml gives what pyproject.toml gives, and the README's commands are the ones that CI runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_installs_the_project_with_its_test_extra():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    python = next(d for d in environment["dependencies"] if isinstance(d, str) and d.startswith("python"))
    assert python == f"python{PROJECT['requires-python']}"
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    extras = re.fullmatch(r"-e \.\[(.*)\]", pip[0])
    assert extras is not None and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    assert "test" in extras[1].split(",")


def test_ci_runs_the_readme_s_commands():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "pip install -e . && prl demo" in readme
    assert "pip install -e '.[test]' && pytest" in readme
    assert "pip install -q -e '.[test]'" in ci and "\npytest -q\n" in ci


def test_the_top_level_holds_only_what_the_design_names():
    files = {"pyproject.toml", "README.md", "LICENSE", "environment.yml"}
    allowed = files | {"prl_notebook", "notebooks", "tutorials", "tests"}
    visible = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    generated = {"runs", "build", "dist"}
    assert {n for n in visible if not n.endswith(".egg-info")} <= allowed | generated
