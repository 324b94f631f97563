"""The command as a process of its own: bad values of variables, and who is told of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def _rallyrun(
    *arguments: str, environ: Mapping[str, str] | None = None, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the command in an environment without settings of torchrun's."""
    ours = ("PET_", "TORCH", "LOGLEVEL", "PYTHON_EXEC")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, *flags, "-m", "rallypoint.run", *arguments],
        env=clean | dict(environ or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "named"),
    [
        ([], {"PET_STANDALONE": "abc"}, "PET_STANDALONE='abc'"),
        ([], {"LOGLEVEL": "loud"}, "LOGLEVEL='LOUD'"),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT='soon'"),
    ],
)
def test_a_bad_value_is_one_sentence(arguments: list[str], environ: dict[str, str], named: str) -> None:
    done = _rallyrun(*arguments, "s.py", environ=environ)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("rallyrun: error: ")
    assert named in line


def test_a_bad_value_reaches_the_error_file_of_whoever_started_us(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert _rallyrun("s.py", environ={"PET_STANDALONE": "x", "TORCHELASTIC_ERROR_FILE": str(path)}).returncode == 1
    assert "PET_STANDALONE='x'" in path.read_text()
