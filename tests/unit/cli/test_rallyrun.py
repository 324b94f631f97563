"""The command as a process of its own: exit codes, what is printed, and what is imported on the way."""

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


def _imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip() for line in lines}


def test_help() -> None:
    done = _rallyrun("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    assert "--nproc-per-node" in done.stdout


def test_help_imports_next_to_nothing() -> None:
    modules = _imported(_rallyrun("--help", flags=("-X", "importtime")))
    assert {name for name in modules if name.startswith("rallypoint.")} == {
        "rallypoint.agent",
        "rallypoint.agent.options",
        "rallypoint.base",
        "rallypoint.base.errors",
        "rallypoint.base.flags",
        "rallypoint.base.light_typing",
        "rallypoint.cli",
        "rallypoint.cli.process_setup",
        "rallypoint.cli.flags",
        "rallypoint.cli.parse",
        "rallypoint.cli.rallyrun",
    }
    heavy = {
        "asyncio",
        "uvloop",
        "msgspec",
        "logging",
        "socket",
        "subprocess",
        "threading",
        "ctypes",
        "tempfile",
        "typing",
        "shutil",
    }
    assert not modules & (heavy | {"json", "importlib.metadata", "torch", "numpy"})


def test_usage_error() -> None:
    done = _rallyrun("--max-restarts", "abc", "s.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")
    last = done.stderr.splitlines()[-1]
    assert last.endswith("error: argument --max-restarts/--max_restarts: 'abc' is not a whole number, such as 3")


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
