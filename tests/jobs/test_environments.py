"""Which Python runs the workers: the launcher has an environment of its own, and another one is active."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import rallypoint
from tests.environment import undisturbed
from tests.processes import completed

pytestmark = pytest.mark.process

SOURCE = Path(rallypoint.__file__).parents[1]
BASE = os.path.realpath(sys.executable)
PACKAGES = f"lib/python3.{sys.version_info.minor}/site-packages"
SHOW = "import os, sys\nprint('prefix', os.environ.get('RAN_BY', sys.prefix))\n"


class Environment(NamedTuple):
    """A folder like that of an environment."""

    prefix: Path

    @property
    def python(self) -> str:
        return str(self.prefix / "bin" / "python")

    def with_torch(self) -> Environment:
        (self.prefix / PACKAGES / "torch").mkdir()
        (self.prefix / PACKAGES / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
        return self


def virtual(prefix: Path, more: str = "") -> Environment:
    """As `python -m venv` makes it."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "python").symlink_to(BASE)
    (prefix / PACKAGES).mkdir(parents=True)
    (prefix / "pyvenv.cfg").write_text(f"home = {os.path.dirname(BASE)}\n{more}")
    return Environment(prefix)


def unmarked(prefix: Path) -> Environment:
    """As conda makes it, or a system has it: nothing but an interpreter and its folders."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / PACKAGES).mkdir(parents=True)
    python = prefix / "bin" / "python"
    python.write_text(f'#!/bin/sh\nRAN_BY={prefix} exec {BASE} "$@"\n')
    python.chmod(0o755)
    return Environment(prefix)


@pytest.fixture
def launcher(tmp_path: Path) -> Environment:
    """An environment with Rallypoint and what it needs, and without torch."""
    made = virtual(tmp_path / "launcher")
    packages = made.prefix / PACKAGES
    (packages / "source.pth").write_text(f"{SOURCE}\n")
    for folder in filter(os.path.isdir, sys.path):
        if folder.endswith("-packages"):
            for name in os.listdir(folder):
                if not name.startswith(("torch", "_editable", "__pycache__")) and not (packages / name).exists():
                    (packages / name).symlink_to(os.path.join(folder, name))
    return made


class Ran(NamedTuple):
    prefixes: list[str]
    said: str


def run(launcher: Environment, folder: Path, *arguments: str, **environ: object) -> Ran:
    (folder / "show.py").write_text(SHOW)
    env = undisturbed("PYTHONPATH") | {name: str(value) for name, value in environ.items()}
    command = [launcher.python, "-m", "rallypoint.run", "--standalone", *(arguments or ("show.py",))]
    ran = completed(command, env=env, cwd=folder)
    lines = [line.removeprefix("prefix ") for line in ran.stdout.splitlines() if line.startswith("prefix ")]
    assert ran.returncode == 0, ran.stderr
    return Ran(lines, ran.stderr)


@pytest.mark.parametrize("make", [virtual, unmarked])
@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT"])
def test_the_active_environment_has_the_torch_that_the_launcher_lacks(
    launcher: Environment, tmp_path: Path, variable: str, make: object
) -> None:
    assert callable(make)
    project: Environment = make(tmp_path / "project").with_torch()
    ran = run(launcher, tmp_path, **{variable: project.prefix})
    assert ran.prefixes == [str(project.prefix)]
    assert ran.said.count("workers run") == 1
    assert f"workers run {project.python}, the Python of {variable}={project.prefix}" in ran.said


def test_the_environment_of_a_uv_project_is_named_from_its_folder(launcher: Environment, tmp_path: Path) -> None:
    project = virtual(tmp_path / "work" / "envs" / "gpu").with_torch()
    (tmp_path / "work" / "pyproject.toml").touch()
    inner = tmp_path / "work" / "package"
    inner.mkdir()
    assert run(launcher, inner, UV_PROJECT_ENVIRONMENT="envs/gpu").prefixes == [str(project.prefix)]


def test_a_module_runs_in_the_environment_too(launcher: Environment, tmp_path: Path) -> None:
    project = virtual(tmp_path / "project").with_torch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SHOW)
    ran = run(launcher, tmp_path, "-m", "package.train", VIRTUAL_ENV=project.prefix)
    assert ran.prefixes == [str(project.prefix)]


@pytest.mark.parametrize("receipt", ["uv-receipt.toml", "pipx_metadata.json"])
def test_a_launcher_that_is_a_tool_needs_no_torch_there(launcher: Environment, tmp_path: Path, receipt: str) -> None:
    project = virtual(tmp_path / "project")
    assert run(launcher, tmp_path, VIRTUAL_ENV=project.prefix) == ([str(launcher.prefix)], "")
    (launcher.prefix / receipt).touch()
    assert run(launcher, tmp_path, VIRTUAL_ENV=project.prefix).prefixes == [str(project.prefix)]


def test_an_environment_that_sees_the_systems_torch(launcher: Environment, tmp_path: Path) -> None:
    system = unmarked(tmp_path / "usr").with_torch()
    more = "include-system-site-packages = true\n"
    project = unmarked(tmp_path / "project")
    (project.prefix / "pyvenv.cfg").write_text(f"home = {system.prefix}/bin\n{more}")
    assert run(launcher, tmp_path, VIRTUAL_ENV=project.prefix).prefixes == [str(project.prefix)]
    (project.prefix / "pyvenv.cfg").write_text(f"home = {system.prefix}/bin\n")
    assert run(launcher, tmp_path, VIRTUAL_ENV=project.prefix).prefixes == [str(launcher.prefix)]


def test_a_torch_that_was_installed_from_a_checkout(launcher: Environment, tmp_path: Path) -> None:
    project = virtual(tmp_path / "project")
    (project.prefix / PACKAGES / "torch-2.15.0a0.dist-info").mkdir()
    assert run(launcher, tmp_path, VIRTUAL_ENV=project.prefix).prefixes == [str(project.prefix)]


def test_where_both_have_torch_one_line_says_how_to_choose(launcher: Environment, tmp_path: Path) -> None:
    launcher.with_torch()
    project = virtual(tmp_path / "project").with_torch()
    ran = run(launcher, tmp_path, VIRTUAL_ENV=project.prefix)
    assert ran.prefixes == [str(launcher.prefix)]
    assert f"set PYTHON_EXEC={project.python} to use that" in ran.said
    chosen = run(launcher, tmp_path, VIRTUAL_ENV=project.prefix, PYTHON_EXEC=project.python)
    assert chosen == ([str(project.prefix)], "")


def test_nothing_is_said_where_there_is_nothing_to_choose(launcher: Environment, tmp_path: Path) -> None:
    launcher.with_torch()
    without = virtual(tmp_path / "without")
    gone = tmp_path / "gone"
    for environ in (
        {},
        {"VIRTUAL_ENV": launcher.prefix},
        {"VIRTUAL_ENV": without.prefix},
        {"CONDA_PREFIX": gone, "VIRTUAL_ENV": gone},
        {"VIRTUAL_ENV": launcher.prefix, "CONDA_PREFIX": virtual(tmp_path / "base").with_torch().prefix},
        {"VIRTUAL_ENV": ""},
    ):
        assert run(launcher, tmp_path, **environ) == ([str(launcher.prefix)], ""), environ


def test_a_torch_on_the_path_of_both_belongs_to_neither(launcher: Environment, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "torch").mkdir(parents=True)
    (shared / "torch" / "__init__.py").touch()
    project = virtual(tmp_path / "project")
    ran = run(launcher, tmp_path, VIRTUAL_ENV=project.prefix, PYTHONPATH=shared)
    assert ran == ([str(launcher.prefix)], "")
    project.with_torch()
    ran = run(launcher, tmp_path, VIRTUAL_ENV=project.prefix, PYTHONPATH=shared)
    assert ran.prefixes == [str(project.prefix)]


def test_a_program_is_nobodys_python(launcher: Environment, tmp_path: Path) -> None:
    project = virtual(tmp_path / "project").with_torch()
    command = ("--no-python", "sh", "-c", "echo prefix none")
    assert run(launcher, tmp_path, *command, VIRTUAL_ENV=project.prefix) == (["none"], "")


def test_preloaded_workers_are_forked_from_the_environments_python(launcher: Environment, tmp_path: Path) -> None:
    project = virtual(tmp_path / "project").with_torch()
    ran = run(launcher, tmp_path, "--preload=json", "show.py", VIRTUAL_ENV=project.prefix)
    assert ran.prefixes == [str(project.prefix)]
