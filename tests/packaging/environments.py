"""A fresh virtual environment with one artefact in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.packaging.interpreters import Interpreter

_TIMEOUT = 300.0
"""Seconds to fetch two dependencies, or to build the source archive."""


class InstallError(Exception):
    """Nothing was installed; the text says why. `unreachable`: since no package index could be reached."""

    def __init__(self, text: str, unreachable: bool = False) -> None:
        super().__init__(text)
        self.unreachable = unreachable


def install(artefact: Path, python: Interpreter, folder: Path) -> Path:
    """Install an artefact, with its dependencies from the package index, into a new environment at `folder`.

    Returns:
        The folder of its commands.

    Raises:
        InstallError: it cannot be.
    """
    _run([str(python.path), "-I", "-m", "venv", "--without-pip", str(folder)])
    # The pip of this environment, which is there already: one for each new environment would take longer than the rest.
    pip = [sys.executable, "-m", "pip", f"--python={folder}/bin/python", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "--no-input", str(artefact)])
    return folder / "bin"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"{command[0]} did not end within {_TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "error"))] or [done.stderr]
        raise InstallError(lines[-1].strip(), unreachable="connection broken" in done.stderr)
