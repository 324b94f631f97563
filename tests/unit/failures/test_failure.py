"""ProcessFailure: the computed fields of contract section 6.2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rallypoint.failures.failure import ProcessFailure, error_data, write_error_file


def _with_file(path: Path, timestamp: float, written: float | None = None) -> str:
    write_error_file(str(path), error_data("ValueError: boom", "Traceback\nValueError: boom\n", timestamp))
    if written is not None:
        os.utime(path, (written, written))
    return str(path)


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
