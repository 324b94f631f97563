"""The exit code of a command whose output nobody reads any more: the same as if it were read.

Python flushes standard output and error when it exits, and would replace the exit code with 120 if that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

pytestmark = pytest.mark.process

RALLYRUN = [sys.executable, "-m", "rallypoint.run"]
RALLYCTL = [sys.executable, "-m", "rallypoint.cli.rallyctl"]
JOB = [*RALLYRUN, "--standalone", "--no-python"]


def _ran(command: Sequence[str], closed: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a command; the streams named in `closed` are a pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        stdout, stderr = (writing if name in closed else subprocess.PIPE for name in ("stdout", "stderr"))
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, timeout=60, check=False)
    finally:
        os.close(writing)


COMMANDS = [
    pytest.param([*RALLYRUN, "--help"], 0, id="rallyrun-help"),
    pytest.param([*RALLYRUN, "--max-restarts=abc", "s.py"], 2, id="rallyrun-usage"),
    pytest.param([*RALLYRUN, "--nnodes=x", "s.py"], 1, id="rallyrun-error"),
    pytest.param([*JOB, "true"], 0, id="rallyrun-success"),
    pytest.param([*JOB, "false"], 1, id="rallyrun-failure"),
    pytest.param([*RALLYCTL, "--help"], 0, id="rallyctl-help"),
    pytest.param([*RALLYCTL, "no-verb"], 2, id="rallyctl-usage"),
    pytest.param([*RALLYCTL, "report", "no-file"], 1, id="rallyctl-error"),
]


@pytest.mark.parametrize(("command", "code"), COMMANDS)
@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr")], ids="+".join)
def test_the_exit_code_is_that_of_the_command(command: list[str], code: int, closed: tuple[str, ...]) -> None:
    done = _ran(command, closed)
    assert done.returncode == code, done.stderr
    assert b"BrokenPipeError" not in (done.stderr or b"")


@pytest.mark.parametrize("closed", [("stdout",), ("stdout", "stderr")], ids="+".join)
def test_an_answer_that_nobody_reads_is_a_failure(closed: tuple[str, ...]) -> None:
    done = _ran([*RALLYCTL, "secret"], closed)
    assert done.returncode == 1
    if "stderr" not in closed:
        expected = b"rallyctl: error: standard output cannot be written: Broken pipe; send it elsewhere\n"
        assert done.stderr == expected
