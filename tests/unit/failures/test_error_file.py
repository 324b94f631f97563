"""Reading and writing error files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rallypoint.failures.failure import (
    MAX_SIZE,
    ErrorFile,
    ProcessFailure,
    UnreadableErrorFile,
    error_data,
    read_error_file,
    write_error_file,
)
from tests.processes import peak_below

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["message", "extraInfo", "timestamp", "py_callstack", "x"]), inner, max_size=4
        )
    ),
    max_leaves=10,
)
_FIXTURE_IS_FINE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def _read(path: Path, raw: str) -> ErrorFile | UnreadableErrorFile | None:
    path.write_text(raw)
    return read_error_file(str(path))


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    now = 1_700_000_000.75
    write_error_file(str(path), error_data("ValueError: boom ü", "Traceback ...\n", now))
    os.utime(path, (now + 0.1, now + 0.1))
    reply = read_error_file(str(path))
    assert isinstance(reply, ErrorFile)
    assert reply.text == "ValueError: boom ü"
    assert reply.callstack == "Traceback ...\n"
    assert reply.timestamp == 1_700_000_000
    assert reply.exact == pytest.approx(now + 0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("path", ["", os.devnull, "/nonexistent/error.json", "/proc/self"])
def test_no_file(path: str, tmp_path: Path) -> None:
    assert read_error_file(path) is None
    assert _read(tmp_path / "e", " \n") is None


@pytest.mark.parametrize("raw", ["nojson", "[]", "{}", "3", '{"message": 3}', '{"message": {"mess', "[" * 100_000])
def test_damaged_files(tmp_path: Path, raw: str) -> None:
    found = _read(tmp_path / "e", raw)
    assert isinstance(found, UnreadableErrorFile)
    assert raw.startswith(found.raw)
    assert found.raw


@pytest.mark.parametrize("timestamp", ['"12.5"', "12", '"12"', "12.9"])
def test_timestamps(tmp_path: Path, timestamp: str) -> None:
    raw = f'{{"message": {{"message": "m", "extraInfo": {{"timestamp": {timestamp}}}}}}}'
    reply = _read(tmp_path / "e", raw)
    assert isinstance(reply, ErrorFile)
    assert reply.timestamp == 12


@given(data=JSON)
@_FIXTURE_IS_FINE
def test_any_json(tmp_path: Path, data: object) -> None:
    found = _read(tmp_path / "e", json.dumps(data))
    assert isinstance(found, ErrorFile | UnreadableErrorFile)


@given(cut=st.integers(min_value=1, max_value=200))
@_FIXTURE_IS_FINE
def test_truncated_files(tmp_path: Path, cut: int) -> None:
    raw = json.dumps(error_data("ValueError: boom", "Traceback\n" * 20, 1.0))
    assert isinstance(_read(tmp_path / "e", raw[:-cut]), UnreadableErrorFile)


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_error_file(str(tmp_path / "missing" / "error.json"), error_data("m", "", 1.0))
    assert "cannot be written" in caplog.text


def test_special_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "named pipe"), (Path("/dev/zero"), "device")):
        reply = read_error_file(str(path))
        assert isinstance(reply, UnreadableErrorFile)
        assert kind in reply.raw


def test_a_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    with path.open("wb") as file:
        file.truncate(3 << 30)
    with peak_below(8 * MAX_SIZE):
        reply = read_error_file(str(path))
    assert isinstance(reply, UnreadableErrorFile)


@pytest.mark.parametrize("timestamp", [float("nan"), float("inf"), -5, 1_790_000_000_000_000_000, "1e30", 10**400])
def test_impossible_timestamps(tmp_path: Path, timestamp: object) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "", "timestamp": timestamp}
    path.write_text(json.dumps({"message": {"message": "boom", "extraInfo": extra}}))
    failure = ProcessFailure(0, 1, 1, str(path))
    assert failure.text == "boom"
    assert abs(failure.timestamp - time.time()) < 60
    assert failure.timestamp_isoformat()
    os.utime(path, (1 << 33, 1 << 33))
    assert ProcessFailure(0, 1, 1, str(path)).timestamp_isoformat()


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "error.json"
    victim.write_text("precious")
    (tmp_path / f"error.json.{os.getpid()}").symlink_to(victim)
    write_error_file(str(path), error_data("boom", "", 1000.0))
    assert victim.read_text() == "precious"
    assert isinstance(read_error_file(str(path)), ErrorFile)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error.json", f"error.json.{os.getpid()}", "victim"]


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
    assert by_signal.error_file_data == {"message": "<NONE>"}  # traits are not shared
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
def test_moment(tmp_path: Path, written: float, noticed: float, moment: float) -> None:
    path = _with_file(tmp_path / "e", 1000.0, written)
    assert ProcessFailure(0, 1, 1, path, noticed_at=noticed).moment == pytest.approx(moment)
