"""The supported Pythons on this machine: on PATH, of pyenv, of uv, and those that a variable names."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
NAMED = "RALLYPOINT_TEST_PYTHONS"
"""A variable with more interpreters, with colons between."""
_CLASSIFIER = "Programming Language :: Python :: 3."
_ASKED = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2], sys.version.split()[0])"
_TIMEOUT = 60.0
"""Seconds for an interpreter to say which one it is."""


class Interpreter(NamedTuple):
    """One Python that can make virtual environments."""

    minor: str
    version: str
    path: Path


def supported() -> list[str]:
    """The minor versions that the package's classifiers name, such as `3.11`."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return [f"3.{name.removeprefix(_CLASSIFIER)}" for name in classifiers if name.startswith(_CLASSIFIER)]


def find() -> dict[str, Interpreter]:
    """An interpreter for each supported version that is here, by its minor version."""
    return {each: found for each in supported() if (found := _first(each)) is not None}


def _first(minor: str) -> Interpreter | None:
    for path in _candidates(minor):
        found = _ask(path)
        if found is not None and found.minor == minor:
            return found
    return None


def _candidates(minor: str) -> Iterator[Path]:
    """Where it may be; those of pyenv before PATH, where there may be stand-ins for versions that are not chosen."""
    yield from map(Path, filter(None, os.environ.get(NAMED, "").split(":")))
    home = Path.home()
    for folder in (
        Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions",
        Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python"),
    ):
        yield from sorted(folder.glob(f"*{minor}.*/bin/python{minor}"), reverse=True)
    for name in os.environ.get("PATH", "").split(":"):
        yield Path(name) / f"python{minor}"


def _ask(path: Path) -> Interpreter | None:
    try:
        done = subprocess.run(
            [str(path), "-I", "-c", _ASKED], capture_output=True, text=True, timeout=_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):  # it is not there, it is another's stand-in, it has no venv
        return None
    minor, version = done.stdout.split()
    return Interpreter(minor, version, path)
