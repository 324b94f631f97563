from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import (
    JobPreempted,
    NodeLeftInOrder,
    RallypointError,
    SignalException,
    UsageError,
    UserError,
)
from rallypoint.cli import local_verbs, rallyctl
from rallypoint.cli.exit import exit_code_of
from rallypoint.control.protocol.errors import RendezvousClosedError
from rallypoint.failures.cause import Cause
from rallypoint.failures.report import ChildFailedError


@pytest.fixture(autouse=True)
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def _raiser(error: BaseException) -> None:
    raise error


PREEMPTED = JobPreempted("the job was preempted, since n1 received SIGUSR2")
WRONG, GONE = UserError("--nnodes='a' is no number"), RallypointError("the store has gone")
CAUSE = Cause(3, 1, "node7", 42, -9, "Signal 9 (SIGKILL) received by PID 42", "", 1_700_000_000, "")
REPORT = ChildFailedError("train.py", {}, cause=CAUSE)


@pytest.mark.parametrize(
    ("error", "code", "shown", "recorded"),
    [
        (PREEMPTED, 143, f"rallyrun: {PREEMPTED}", None),
        (WRONG, 1, f"rallyrun: error: {WRONG}", f"UserError: {WRONG}"),
        (GONE, 1, f"rallyrun: error: {GONE}", f"RallypointError: {GONE}"),
        (UsageError("lease=0"), 2, "rallyrun: error: lease=0", "UsageError: lease=0"),
        (RendezvousClosedError(), 1, "rallyrun: error: RendezvousClosedError", "RendezvousClosedError: "),
        (REPORT, 1, str(REPORT), "Signal 9 (SIGKILL) received by PID 42"),
        (SignalException("got it", signal.SIGTERM), 1, "rallyrun: stopped by SIGTERM", "SignalException: got it"),
        (KeyboardInterrupt(), 130, "rallyrun: interrupted", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors(
    error: BaseException,
    code: int,
    shown: str,
    recorded: str | None,
    capsys: pytest.CaptureFixture[str],
    error_file: Path,
) -> None:
    """`recorded` is the message in the error file, None without a file."""
    assert exit_code_of(lambda: None) == 0
    assert capsys.readouterr() == ("", "")
    finished: list[tuple[BaseException | None, int]] = []

    def finish(error: BaseException | None, code: int) -> int:
        finished.append((error, code))
        return code

    assert exit_code_of(lambda: _raiser(error), finish=finish) == code
    assert finished == [(error, code)]
    assert capsys.readouterr() == ("", f"{shown}\n")
    if recorded is None:
        assert not error_file.exists()
    else:
        message = json.loads(error_file.read_text())["message"]
        assert (message if isinstance(message, str) else message["message"]) == recorded


def test_unexpected_errors_have_a_traceback(capsys: pytest.CaptureFixture[str], error_file: Path) -> None:
    ours: dict[str, Any] = {"__name__": "rallypoint.anywhere"}
    exec("def work(): raise ZeroDivisionError('one by none')", ours)
    assert exit_code_of(ours["work"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ZeroDivisionError: one by none" in shown
    assert shown.splitlines()[-1].startswith("rallyrun: error: unexpected ZeroDivisionError")
    assert error_file.exists()


def test_errors_of_plug_ins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugged_in.py").write_text("def meet():\n    raise LookupError('no such place')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert exit_code_of(importlib.import_module("plugged_in").meet) == 1
    where = tmp_path / "plugged_in.py"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        f"rallyrun: error: plugged_in raised LookupError ({where}, line 2); see the traceback above, and report it to "
        "the package's authors"
    )


def test_exits_pass_through() -> None:
    with pytest.raises(SystemExit) as caught:
        exit_code_of(lambda: sys.exit(3))
    assert caught.value.code == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), 1),
        (UsageError("x"), 2),
        (SignalException("x", signal.SIGTERM), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError(), 1),
    ],
)
@pytest.mark.parametrize("closed", [False, True])
def test_the_exit_code_without_a_reader(
    error: BaseException, code: int, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(BrokenPipeError), open(writing, "w") as stderr:  # closing flushes to nobody
        if closed:
            stderr.close()
        monkeypatch.setattr(sys, "stderr", stderr)
        assert exit_code_of(lambda: _raiser(error)) == code


@pytest.mark.process
def test_output_that_cannot_be_written() -> None:
    text = "import sys; from rallypoint.cli import exit as e; sys.exit(e.exit_code_of(lambda: e.print_answer('x')))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", text], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    reason = "standard output cannot be written: No space left on device"
    assert (done.returncode, done.stderr) == (1, f"rallyrun: error: {reason}; redirect it elsewhere\n")


def test_a_node_that_left_in_order_has_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_verbs, "secret", lambda _options: _raiser(NodeLeftInOrder("drained", signal.SIGTERM)))
    assert rallyctl.main(["secret"]) == 0
