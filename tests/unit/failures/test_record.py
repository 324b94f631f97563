"""`record` (contract sections 7.2 to 7.4)."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rallypoint.failures.cause import Cause
from rallypoint.failures.failure import ProcessFailure, error_data, write_error_file
from rallypoint.failures.record import ErrorHandler, record
from rallypoint.failures.report import ChildFailedError
from tests.processes import completed


@pytest.fixture(autouse=True)
def _no_crash_dumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep pytest's faulthandler."""
    monkeypatch.setattr("faulthandler.enable", lambda **_: None)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def _failing(error: BaseException) -> None:
    @record
    def main() -> None:
        raise error

    main()


def test_record_passes_arguments_and_results() -> None:
    @record
    def main(one: int, *, two: str) -> str:
        """Told."""
        return two * one

    @record()
    def other() -> int:
        return 3

    assert main(2, two="x") == "xx"
    assert other() == 3
    assert main.__doc__ == "Told."
    assert record(lambda: 4, ErrorHandler())() == 4


@pytest.mark.parametrize("value", [None, ""])
def test_without_an_error_file(value: str | None, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    else:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", value)
    with pytest.raises(ValueError, match="boom"):
        _failing(ValueError("boom"))
    assert not own.exists()


def test_an_exception_without_a_text(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    with pytest.raises(Mute):
        _failing(Mute())
    assert "could not be recorded" in caplog.text
    assert not own.exists()


class _Calls(ErrorHandler):
    def __init__(self, refuses_success: bool = False) -> None:
        self.calls: list[str] = []
        self._refuses_success = refuses_success

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        self.calls.append(f"named {fn_name}")

    def initialize(self) -> None:
        self.calls.append("initialize")

    def record_exception(self, e: BaseException) -> None:
        self.calls.append(f"exception {e!r}")

    def record_success(self) -> None:
        self.calls.append("success")
        if self._refuses_success:
            raise ValueError("not recorded")


def _leave(how: object) -> object:
    if isinstance(how, BaseException):
        raise how
    return how


@pytest.mark.parametrize(
    ("how", "more"),
    [(7, ["success"]), (ValueError("x"), ["exception ValueError('x')"]), (SystemExit(0), []), (SystemExit(3), [])],
)
def test_calls_of_a_handler(how: object, more: list[str]) -> None:
    for function, name in ((_leave, "_leave"), (partial(_leave), "None")):
        handler = _Calls()
        with contextlib.suppress(ValueError, SystemExit):
            record(function, handler)(how)
        assert handler.calls == [f"named {name}", "initialize", *more]
    handler = _Calls(refuses_success=True)
    with pytest.raises(ValueError, match="not recorded"):
        record(_leave, handler)(7)
    assert handler.calls[2:] == ["success"]


def test_the_cause_is_written_without_a_child_s_file(own: Path) -> None:
    failure = ProcessFailure(0, 1, -9, "", last_lines=b"words\n", noticed_at=12.5)
    with pytest.raises(ChildFailedError):
        _failing(ChildFailedError("x", {0: failure}))
    signalled = "Signal 9 (SIGKILL) received by PID 1"
    extra = {"py_callstack": f"{signalled}; the last lines of standard error:\nwords", "timestamp": "12"}
    message = {"message": signalled, "extraInfo": extra, "errorCode": -9}
    assert json.loads(own.read_text()) == {"message": message}


def test_the_path_of_another_node_s_cause_is_not_read(own: Path, tmp_path: Path) -> None:
    here = str(tmp_path / "same_name.json")
    write_error_file(here, error_data("of another worker", "", 12.0))
    cause = Cause(9, 1, "node7", 4242, 1, "ValueError: there", "Traceback\n", 12.0, here)
    with pytest.raises(ChildFailedError):
        _failing(ChildFailedError("x", {0: ProcessFailure(0, 1, -6, here)}, cause))
    assert json.loads(own.read_text())["message"]["message"] == "ValueError: there"


def test_an_existing_file_is_replaced(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    own.write_text("old")
    with pytest.raises(ChildFailedError):
        _failing(ChildFailedError("x", {0: ProcessFailure(0, 1, 1, "")}))
    assert "is being replaced" in caplog.text
    assert json.loads(own.read_text())["message"]["errorCode"] == 1


def test_a_child_s_file_that_cannot_be_passed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    child = str(tmp_path / "child.json")
    write_error_file(child, error_data("m", "", 12.0))
    with pytest.raises(ChildFailedError):
        _failing(ChildFailedError("x", {0: ProcessFailure(0, 1, 7, child)}))
    assert [entry.levelno for entry in caplog.records] == [logging.ERROR]


def test_the_plain_form_is_passed_on(own: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.json"
    child.write_text('{"message": "plain", "timestamp": 12}')
    ErrorHandler().dump_error_file(str(child), 3)
    assert json.loads(own.read_text()) == {"message": "plain", "timestamp": 12}


CRASH = """
import os, signal
from rallypoint import record

@record
def main():
    os.kill(os.getpid(), signal.SIGSEGV)

main()
"""


@pytest.mark.process
def test_a_crash_shows_the_python_stack() -> None:
    done = subprocess.run([sys.executable, "-c", CRASH], stderr=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert b"Fatal Python error: Segmentation fault" in done.stderr
    assert b"in main" in done.stderr


@pytest.mark.parametrize("module", ["record", "cause", "report"])
@pytest.mark.process
def test_no_heavy_imports(module: str) -> None:
    code = f"import sys, rallypoint.failures.{module}; print(*sys.modules)"
    done = completed([sys.executable, "-c", code], check=True)
    heavy = {"asyncio", "ctypes", "importlib.metadata", "json", "msgspec", "socket", "subprocess", "tempfile", "torch"}
    assert heavy & set(done.stdout.split()) == set()
