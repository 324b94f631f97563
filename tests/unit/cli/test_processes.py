"""The commands as processes: bad variables, interrupts, unread output, other systems."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rallypoint.base.errors import NEEDS_LINUX
from tests.environment import undisturbed
from tests.jobs.launching import RALLYCTL, RALLYRUN

pytestmark = pytest.mark.process

JOB = [*RALLYRUN, "--standalone", "--no-python"]


def _ran(
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment without torchrun's variables."""
    return subprocess.run(
        command,
        env=undisturbed() | dict(environ or {}),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"PET_STANDALONE": "abc"}, "PET_STANDALONE='abc'"),
        ({"LOGLEVEL": "loud"}, "LOGLEVEL='LOUD'"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT='soon'"),
    ],
)
def test_invalid_variables(environ: dict[str, str], named: str) -> None:
    done = _ran([*RALLYRUN, "s.py"], environ=environ)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("rallyrun: error: ")
    assert named in line


def test_errors_reach_the_parent_s_error_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environ = {"PET_STANDALONE": "x", "TORCHELASTIC_ERROR_FILE": str(path)}
    assert _ran([*RALLYRUN, "s.py"], environ=environ).returncode == 1
    assert "PET_STANDALONE='x'" in path.read_text()


# Interrupts while a command starts, runs and ends

SET_UP = "import os, signal, sys\n"
SET_UP += "from rallypoint.cli.process_setup import set_up_process, restore_keyboard_interrupt\nset_up_process()\n"


def _set_up(text: str, before: str = "") -> subprocess.CompletedProcess[str]:
    return _ran([sys.executable, "-c", before + SET_UP + text])


def test_ignored_interrupts_stay_ignored() -> None:
    before = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = _set_up("restore_keyboard_interrupt(); os.kill(os.getpid(), signal.SIGINT); print('still here')", before)
    assert (done.returncode, done.stdout) == (0, "still here\n")


def test_interrupts_raise_an_exception_during_the_run() -> None:
    interrupted = "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: print('received')"
    done = _set_up("restore_keyboard_interrupt()\n" + interrupted)
    assert (done.returncode, done.stdout) == (0, "received\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_ignored_at_exit(number: signal.Signals) -> None:
    before = f"import atexit, os; atexit.register(lambda: os.kill(os.getpid(), {int(number)}))\n"
    done = _set_up("restore_keyboard_interrupt()", before)  # atexit calls it last
    assert (done.returncode, done.stderr) == (0, "")


# Unread output must not change the exit code: Python flushes standard output and error at exit, and exits with 120 if
# that fails.


def _unread(command: Sequence[str], closed: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; the streams named in `closed` are a pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return _ran(
            command,
            stdout=writing if "stdout" in closed else subprocess.PIPE,
            stderr=writing if "stderr" in closed else subprocess.PIPE,
        )
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
def test_exit_codes_with_unread_output(command: list[str], code: int, closed: tuple[str, ...]) -> None:
    done = _unread(command, closed)
    assert done.returncode == code, done.stderr
    assert "BrokenPipeError" not in (done.stderr or "")


@pytest.mark.parametrize("closed", [("stdout",), ("stdout", "stderr")], ids="+".join)
def test_unread_answers_are_a_failure(closed: tuple[str, ...]) -> None:
    done = _unread([*RALLYCTL, "secret"], closed)
    assert done.returncode == 1
    if "stderr" not in closed:
        expected = "rallyctl: error: standard output cannot be written: Broken pipe; redirect it elsewhere\n"
        assert done.stderr == expected


# Other systems than Linux


def _elsewhere(system: str, text: str) -> subprocess.CompletedProcess[str]:
    before = f"import runpy, sys; sys.platform = {system!r}; sys.argv[1:] = ['--standalone', 'train.py']; "
    return _ran([sys.executable, "-c", before + text])


@pytest.mark.parametrize("system", ["win32", "darwin"])
@pytest.mark.parametrize("module", ["rallypoint.run", "rallypoint.cli.rallyrun", "rallypoint.cli.rallyctl"])
def test_commands_on_other_systems(module: str, system: str) -> None:
    done = _elsewhere(system, f"runpy.run_module({module!r}, run_name='__main__')")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {NEEDS_LINUX}\n")


def test_imports_on_other_systems() -> None:
    done = _elsewhere("darwin", "from rallypoint import elastic_launch")
    assert done.stderr.splitlines()[-1] == f"ImportError: {NEEDS_LINUX}"
