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


def _cause() -> Cause:
    return Cause(
        rank=3,
        local_rank=1,
        host="node7",
        pid=42,
        exitcode=-9,
        timestamp=1_700_000_000,
        error_file="",
        message="Signal 9 (SIGKILL) received by PID 42",
        traceback="",
    )


def test_success(capsys: pytest.CaptureFixture[str], error_file: Path) -> None:
    assert exit_code_of(lambda: None) == 0
    assert capsys.readouterr() == ("", "")
    assert not error_file.exists()


def test_a_preempted_job_has_a_code_of_its_own_and_is_no_failure(
    capsys: pytest.CaptureFixture[str], error_file: Path
) -> None:
    told: list[tuple[BaseException | None, int]] = []

    def finish(error: BaseException | None, code: int) -> int:
        told.append((error, code))
        return code

    error = JobPreempted("the job was preempted, since n1 received SIGUSR2")
    assert exit_code_of(lambda: _raiser(error), finish=finish) == 143
    assert capsys.readouterr() == ("", f"rallyrun: {error}\n")
    assert not error_file.exists()
    assert told == [(error, 143)]


@pytest.mark.parametrize("error", [UserError("--nnodes='a' is no number"), RallypointError("the store has gone")])
def test_known_errors_are_one_sentence(
    error: RallypointError, capsys: pytest.CaptureFixture[str], error_file: Path
) -> None:
    assert exit_code_of(lambda: _raiser(error)) == 1
    assert capsys.readouterr() == ("", f"rallyrun: error: {error}\n")
    assert json.loads(error_file.read_text())["message"]["message"] == f"{type(error).__name__}: {error}"


def test_failed_workers_are_reported(capsys: pytest.CaptureFixture[str], error_file: Path) -> None:
    report = ChildFailedError("train.py", {}, cause=_cause())
    assert exit_code_of(lambda: _raiser(report)) == 1
    assert capsys.readouterr() == ("", f"{report}\n")
    assert json.loads(error_file.read_text())["message"]["errorCode"] == -9


def test_a_signal_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    stop = SignalException("got a signal", signal.SIGTERM)
    assert exit_code_of(lambda: _raiser(stop), "other") == 1
    assert capsys.readouterr().err == "other: stopped by SIGTERM\n"


def test_an_interrupt_ends_as_shells_expect(capsys: pytest.CaptureFixture[str], error_file: Path) -> None:
    assert exit_code_of(lambda: _raiser(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "rallyrun: interrupted\n"
    assert not error_file.exists()


def test_what_nobody_foresaw_keeps_its_traceback(capsys: pytest.CaptureFixture[str], error_file: Path) -> None:
    ours: dict[str, Any] = {"__name__": "rallypoint.anywhere"}
    exec("def work(): raise ZeroDivisionError('one by none')", ours)
    assert exit_code_of(ours["work"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ZeroDivisionError: one by none" in shown
    assert shown.splitlines()[-1].startswith("rallyrun: error: ZeroDivisionError was unexpected")
    assert error_file.exists()


def test_what_a_plug_in_raises_is_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugged_in.py").write_text("def meet():\n    raise LookupError('no such place')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert exit_code_of(importlib.import_module("plugged_in").meet) == 1
    where = tmp_path / "plugged_in.py"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"rallyrun: error: LookupError was raised by plugged_in ({where}, line 2); look there"


def test_an_error_without_words_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: _raiser(RendezvousClosedError())) == 1
    assert capsys.readouterr().err == "rallyrun: error: RendezvousClosedError\n"


def test_exits_pass_through() -> None:
    with pytest.raises(SystemExit) as caught:
        exit_code_of(lambda: sys.exit(3))
    assert caught.value.code == 3


def test_a_value_that_torchrun_would_have_taken_ends_like_a_wrong_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: _raiser(UsageError("lease=0 cannot be"))) == 2
    assert capsys.readouterr().err == "rallyrun: error: lease=0 cannot be\n"


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
def test_where_nobody_is_left_to_read_it_the_exit_code_is_the_same(
    error: BaseException, code: int, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(BrokenPipeError), open(writing, "w") as stderr:  # closing it flushes what nobody takes
        if closed:
            stderr.close()
        monkeypatch.setattr(sys, "stderr", stderr)
        assert exit_code_of(lambda: _raiser(error)) == code


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.process
def test_an_answer_that_cannot_be_written_is_a_sentence(full: bool) -> None:
    text = "import sys; from rallypoint.cli import exit as e; sys.exit(e.exit_code_of(lambda: e.print_answer('x')))"
    reading, writing = (-1, os.open("/dev/full", os.O_WRONLY)) if full else os.pipe()
    if not full:
        os.close(reading)
    done = subprocess.run([sys.executable, "-c", text], stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    why = b"No space left on device" if full else b"Broken pipe"
    assert done.returncode == 1
    assert done.stderr == b"rallyrun: error: standard output cannot be written: " + why + b"; send it elsewhere\n"


def test_a_verb_that_raises_an_order_to_leave_has_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_verbs, "secret", lambda _options: _raiser(NodeLeftInOrder("drained", signal.SIGTERM)))
    assert rallyctl.main(["secret"]) == 0
