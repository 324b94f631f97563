"""ProcessFailure: the computed fields of contract section 6.2."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rallypoint.failures.error_file import error_data, write_error_file
from rallypoint.failures.failure import ProcessFailure


def _with_file(path: Path, timestamp: float, written: float | None = None) -> str:
    write_error_file(str(path), error_data("ValueError: boom", "Traceback\nValueError: boom\n", timestamp))
    if written is not None:
        os.utime(path, (written, written))
    return str(path)


def test_with_an_error_file(tmp_path: Path) -> None:
    path = _with_file(tmp_path / "e", 12.0)
    failure = ProcessFailure(1, 1234, 1, path)
    assert failure.error_file == path
    message = {"message": "ValueError: boom", "extraInfo": {"py_callstack": failure.callstack, "timestamp": "12"}}
    assert failure.error_file_data == {"message": message}
    assert failure.message == message
    assert failure.text == "ValueError: boom"
    assert failure.timestamp == 12
    assert failure.timestamp_isoformat() == time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(12))
    assert failure.signal_name() == "<N/A>"


def test_without_an_error_file() -> None:
    by_code = ProcessFailure(0, 1234, 3, "", noticed_at=1000.5)
    by_signal = ProcessFailure(0, 1234, -9, "/nonexistent/e.json", noticed_at=1000.5)
    assert by_code.error_file == by_signal.error_file == "<N/A>"
    traits = {"category": "system_terminated_error", "retryability": "False"}
    assert by_code.error_file_data == {"message": "<NONE>", "errorTraits": traits}
    assert by_signal.error_file_data == {"message": "<NONE>"}  # the traits of one do not leak into another
    assert by_code.text.startswith("To enable traceback see: ")
    assert by_signal.message == "Signal 9 (SIGKILL) received by PID 1234"
    assert by_signal.signal_name() == "SIGKILL"
    assert (by_code.timestamp, by_code.moment) == (1000, 1000.5)


def test_a_damaged_file_counts_as_absent_and_keeps_its_text(tmp_path: Path) -> None:
    (tmp_path / "e").write_text('{"message": {"mess')
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "e"))
    assert failure.error_file == "<N/A>"
    assert '{"message": {"mess' in failure.damaged


def test_the_time_of_noticing_is_now_unless_given() -> None:
    before = time.time()
    failure = ProcessFailure(0, 1, 1, "")
    assert before <= failure.noticed_at <= time.time()


@pytest.mark.parametrize(
    ("written", "noticed", "moment"),
    [
        (1000.25, 1003.0, 1000.25),  # the file's own time is exact
        (5000.0, 1000.5, 1000.5),  # else the noticing, as far as it lies within the file's second
        (5000.0, 1003.0, 1000.999999),
        (5000.0, 999.0, 1000.0),
    ],
)
def test_the_moment_is_as_exact_as_can_be(tmp_path: Path, written: float, noticed: float, moment: float) -> None:
    path = _with_file(tmp_path / "e", 1000.0, written)
    assert ProcessFailure(0, 1, 1, path, noticed_at=noticed).moment == pytest.approx(moment)
