"""A wheel of this tree works under each supported Python on this machine. `make release-check` tries more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import build_native
import pytest

from tests.packaging import contents, interpreters
from tests.packaging.__main__ import tracked, version
from tests.packaging.environments import InstallError, install
from tests.packaging.interpreters import ROOT
from tests.packaging.smoke import CHECKS, Installed, smoke

IMAGE = ROOT / "deploy" / "docker" / "Dockerfile.dockerignore"
"""Lets through what the package is built of, for the image, which is built without the rest."""
EPOCH = "1600000000"


def build(folder: Path, kind: str) -> Path:
    """A wheel, built of a copy of the tree in `folder`, without the build environment that pip would fetch."""
    passed_over = shutil.ignore_patterns("__pycache__", "*.so", "_build", "generated", "project")
    for name in [line[1:] for line in IMAGE.read_text().splitlines() if line.startswith("!")]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=passed_over)
        else:
            shutil.copy(ROOT / name, folder / name)
    environ = os.environ | {"RALLYPOINT_BUILD": kind, "SOURCE_DATE_EPOCH": EPOCH}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").iterdir()
    return wheel


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pure"), "pure")


def test_the_wheel_for_every_system_has_what_it_should(pure: Path) -> None:
    assert pure.name == f"rallypoint-{version()}-py3-none-any.whl"
    assert list(contents.faults(pure, version(), None)) == []


def test_the_source_archive_has_the_whole_tree(tmp_path: Path) -> None:
    """So its documents have what they refer to, and its tests run."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (archive,) = tmp_path.iterdir()
    assert list(contents.faults(archive, version(), tracked("--cached", "--others", "--exclude-standard"))) == []


def test_two_builds_in_two_folders_are_the_same_bytes(pure: Path, tmp_path: Path) -> None:
    assert build(tmp_path, "pure").read_bytes() == pure.read_bytes()


def test_two_builds_of_the_store_in_c_are_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    for name in ("one", "another"):
        monkeypatch.setattr(build_native, "SOURCES", shutil.copytree(build_native.SOURCES, tmp_path / name / "native"))
        try:
            built.append(build_native.build(tmp_path / name / "_native.abi3.so").read_bytes())
        except build_native.NotBuiltError as error:
            pytest.skip(str(error))
    assert built[0] == built[1]


def test_what_a_package_index_cannot_show_is_not_in_the_long_description() -> None:
    from hatch_build import long_description

    text = "# R\n\n![x](docs/a.svg)\n\n<!-- not run: a\nb -->\n[a [b]](docs/c.md#d), [e](https://f), [g](#h)\n"
    assert long_description(text) == "# R\n\na [b], [e](https://f), g\n"


@pytest.mark.parametrize("minor", interpreters.supported())
def test_it_works_under_each_python_that_is_here(minor: str, pure: Path, tmp_path: Path) -> None:
    python = interpreters.find().get(minor)
    if python is None:
        pytest.skip(f"there is no Python {minor}; {interpreters.NAMED}=/path/to/python{minor} names one")
    try:
        commands = install(pure, python, tmp_path / "env")
    except InstallError as error:
        if not error.unreachable:
            raise
        pytest.skip(f"no package index can be reached: {error}")
    found = smoke(Installed(commands, tmp_path / "scripts", version(), "Python"), CHECKS[:3])
    assert found == f"{version()}, store in Python, exit code 1, reported"
