"""The final report."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from rallypoint.failures.cause import Cause, Restarts
from rallypoint.failures.failure import ProcessFailure, error_data, write_error_file
from rallypoint.failures.record import ErrorHandler
from rallypoint.failures.report import ChildFailedError

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: boom'
ELSEWHERE = Cause(9, 1, "node7", 4242, 1, "ValueError: boom", TRACE, 1000.5, "")


def _failure(local_rank: int, exitcode: int, noticed: float, last_lines: bytes = b"") -> ProcessFailure:
    return ProcessFailure(local_rank, 100 + local_rank, exitcode, "", last_lines=last_lines, noticed_at=noticed)


def _time(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(timestamp))


def test_the_whole_report() -> None:
    failures = {0: _failure(0, 3, 1000.9, f"noise\n{TRACE}\n".encode()), 1: _failure(1, -11, 1000.95, b"bad\nluck\n")}
    stopped = _failure(2, -15, 1000.1)
    error = ChildFailedError("exit.py", {2: stopped, **failures}, stopped={2, 3, 5})
    bar = "=" * 60, "-" * 60
    assert (
        str(error)
        == f"""
{bar[0]}
exit.py FAILED
{bar[1]}
Failures:
[2]:
  time      : {_time(1000)}
  host      : {socket.gethostname()}
  rank      : 1 (local_rank: 1)
  exitcode  : -11 (pid: 101)  (SIGSEGV)
  error_file: <N/A>
  traceback : Signal 11 (SIGSEGV) received by PID 101; the last lines of standard error:
  bad
  luck
{bar[1]}
Stopped by rallyrun: ranks 2-3, 5
{bar[1]}
Root Cause (first observed failure):
[1]:
  time      : {_time(1000)}
  host      : {socket.gethostname()}
  rank      : 0 (local_rank: 0)
  exitcode  : 3 (pid: 100)\x20
  error_file: <N/A>
  traceback : Traceback (most recent call last):
    File "x.py", line 1, in <module>
  ValueError: boom
{bar[0]}"""
    )


def test_error_handlers_can_add_to_signals(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Adding(ErrorHandler):
        def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
            return f"{message}\n{error_file} fault of the device"

    class Raising(ErrorHandler):
        def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
            raise RuntimeError("no such log")

    error = ChildFailedError("x.py", {0: _failure(0, 3, 1000.0), 1: _failure(1, -11, 1001.0)})
    before = str(error)
    with monkeypatch.context() as patch:
        patch.setattr("rallypoint.failures.record.get_error_handler", Adding)
        assert str(error).count("<N/A> fault of the device") == 1
        assert error.failures[1].message == "Signal 11 (SIGSEGV) received by PID 101"
        patch.setattr("rallypoint.failures.record.get_error_handler", Raising)
        assert str(error) == before
    assert "failed to extend the report" in caplog.text


def test_a_root_cause_on_another_node() -> None:
    text = str(ChildFailedError("x.py", {0: _failure(0, -6, 1.0)}, ELSEWHERE))
    others, root = text.split("Root Cause (first observed failure):")
    assert "exitcode  : -6 (pid: 100)  (SIGABRT)" in others
    assert "host      : node7 (another node)" in root
    assert "rank      : 9 (local_rank: 1)" in root
    assert "  ValueError: boom" in root


def test_no_failures_on_this_node() -> None:
    error = ChildFailedError("x.py", {}, ELSEWHERE, stopped=[4])
    text = str(error)
    assert "Failures:\n  <NO_OTHER_FAILURES>\n" in text
    assert "Stopped by rallyrun: rank 4\n" in text
    assert "[0]:\n" in text
    assert error.root_cause() == ELSEWHERE
    assert error.root_error_file() == ""
    with pytest.raises(ValueError, match="empty"):
        error.get_first_failure()
    assert "Restarts" not in text
    text = str(ChildFailedError("x.py", {}, ELSEWHERE, stopped=[4], restarts=Restarts(3, 3)))
    asides = text.partition("Failures:")[2].partition("Root Cause")[0].split("\n")
    assert (asides[3], asides[5]) == ("Stopped by rallyrun: rank 4", "Restarts used: 3 of 3")


def test_a_report_on_another_node() -> None:
    error = ChildFailedError("x.py", {}, ELSEWHERE, stopped=[4], reported_elsewhere=True)
    assert (
        str(error) == "x.py FAILED: rank 9 failed on node7 (exit code 1): ValueError: boom; the full report is on node7"
    )
    assert error.root_cause() == ELSEWHERE
    assert error.format_msg() == str(ChildFailedError("x.py", {}, ELSEWHERE, stopped=[4]))
    after = ChildFailedError("x.py", {2: _failure(0, -6, 1.0)}, ELSEWHERE, reported_elsewhere=True)
    assert "boom; here rank 2 failed after it; the full report" in str(after)


def test_a_root_cause_on_this_node_is_shown_once() -> None:
    first, second = _failure(0, 3, 2.0), _failure(1, 1, 1.0)
    cause = Cause.from_failure(first, 4, "here")
    error = ChildFailedError("x.py", {4: first, 5: second}, cause)
    assert error.get_first_failure() == (4, first)
    others, root = str(error).split("Root Cause (first observed failure):")
    assert "rank      : 5" in others
    assert "rank      : 4" not in others
    assert "host      : here\n" in root
    assert "host      : here\n" in others


def test_the_first_failure_is_the_earliest(tmp_path: Path) -> None:
    """The recorder raised at 1000.2 and ended late; its victim raised at 1000.6 and was noticed first."""
    for name, moment in (("recorder", 1000.2), ("victim", 1000.6)):
        write_error_file(str(tmp_path / name), error_data(name, "", moment))
        os.utime(tmp_path / name, (moment, moment))
    recorder = ProcessFailure(0, 1, 1, str(tmp_path / "recorder"), noticed_at=1003.0)
    victim = ProcessFailure(1, 2, 1, str(tmp_path / "victim"), noticed_at=1001.0)
    assert ChildFailedError("x", {1: victim, 0: recorder}).get_first_failure()[1].text == "recorder"


def test_stopped_workers_are_the_last_root_cause() -> None:
    stopped, failed = _failure(0, -15, 1.0), _failure(1, 1, 2.0)
    assert ChildFailedError("x", {0: stopped, 1: failed}, stopped=[0]).get_first_failure()[0] == 1
    assert ChildFailedError("x", {0: stopped}, stopped=[0]).get_first_failure()[0] == 0


def test_failures_without_output() -> None:
    text = str(ChildFailedError("x", {0: _failure(0, -9, 1.0)}))
    assert "  exitcode  : -9 (pid: 100)  (SIGKILL)\n" in text
    assert "  traceback : Signal 9 (SIGKILL) received by PID 100\n" in text
    silent = str(ChildFailedError("x", {0: _failure(0, 3, 1.0)}))
    assert "  traceback : it exited with code 3 and wrote nothing\n" in silent


def test_a_reason_comes_before_the_output() -> None:
    failure = _failure(0, 0, 1.0, f"{TRACE}\n".encode())
    failure.set_reason("it ended before its time")
    text = str(ChildFailedError("x", {0: failure}))
    assert "  traceback : it ended before its time; the last lines of standard error:\n  Traceback (most" in text


class Unprintable:
    """An object without any field of a failure."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "value", [None, "", "words", b"", -1, 1e300, float("nan"), {}, {"message": None}, Unprintable()]
)
@pytest.mark.parametrize("name", [*vars(_failure(0, 1, 1.0)), "all of it"])
def test_failures_with_invalid_fields(name: str, value: object) -> None:
    """Programs written for torch can set these fields."""
    odd: Any = _failure(0, 1, 1.0)
    if name == "all of it":
        odd = value
    else:
        setattr(odd, name, value)
    text = str(ChildFailedError("job", {3: odd, 7: _failure(1, 5, 2.0, b"last words\n")}))
    assert "job FAILED" in text
    assert "last words" in text
    assert "3" in text
    assert str(ChildFailedError("job", {3: odd}, reported_elsewhere=True)).startswith("job FAILED")
    cause: Any = Unprintable()
    assert "last words" in str(ChildFailedError("job", {7: _failure(1, 5, 2.0, b"last words\n")}, cause))
