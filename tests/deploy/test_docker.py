"""`deploy/docker`: a linter's findings, and that the files agree with the manifests and the build."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import completed

FOLDER = Path(__file__).parents[2] / "deploy" / "docker"
FILES = sorted(FOLDER.glob("*Dockerfile"))


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    hadolint = Path(sys.executable).with_name("hadolint")
    return completed([str(hadolint), str(path)])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_linter_has_nothing_to_say(path: Path) -> None:
    found = lint(path)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_user_is_the_one_that_the_manifests_name(path: Path) -> None:
    assert re.findall(r"^USER (.*)$", path.read_text(), re.MULTILINE)[-1] == "1000:1000"


def test_what_is_built_of_is_there() -> None:
    """Each path that is not ignored exists, and holds what the package is built of."""
    root = FOLDER.parents[1]
    kept = re.findall(r"^!(.*)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert all((root / name).exists() for name in kept)
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert json.loads(entrypoint) == ["rallyrun"]
