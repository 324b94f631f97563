"""Reading and writing error files, damaged ones above all."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
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


def test_what_is_written_is_read(tmp_path: Path) -> None:
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
    assert [each.name for each in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("path", ["", os.devnull, "/nonexistent/error.json", "/proc/self"])
def test_no_file_is_none(path: str) -> None:
    assert read_error_file(path) is None


def test_an_empty_file_is_none(tmp_path: Path) -> None:
    assert _read(tmp_path / "e", " \n") is None


@pytest.mark.parametrize("raw", ["nojson", "[]", "{}", "3", '{"message": 3}', '{"message": {"mess', "[" * 100_000])
def test_a_damaged_file_keeps_its_text(tmp_path: Path, raw: str) -> None:
    found = _read(tmp_path / "e", raw)
    assert isinstance(found, UnreadableErrorFile)
    assert raw.startswith(found.raw)
    assert found.raw


@pytest.mark.parametrize("timestamp", ['"12.5"', "12", '"12"', "12.9"])
def test_timestamps_in_any_spelling(tmp_path: Path, timestamp: str) -> None:
    raw = f'{{"message": {{"message": "m", "extraInfo": {{"timestamp": {timestamp}}}}}}}'
    reply = _read(tmp_path / "e", raw)
    assert isinstance(reply, ErrorFile)
    assert reply.timestamp == 12


@given(data=JSON)
@_FIXTURE_IS_FINE
def test_no_json_is_an_exception(tmp_path: Path, data: object) -> None:
    found = _read(tmp_path / "e", json.dumps(data))
    assert isinstance(found, ErrorFile | UnreadableErrorFile)


@given(cut=st.integers(min_value=1, max_value=200))
@_FIXTURE_IS_FINE
def test_a_file_that_was_cut_off_is_unreadable(tmp_path: Path, cut: int) -> None:
    raw = json.dumps(error_data("ValueError: boom", "Traceback\n" * 20, 1.0))
    assert isinstance(_read(tmp_path / "e", raw[:-cut]), UnreadableErrorFile)


def test_a_file_that_cannot_be_written_is_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_error_file(str(tmp_path / "missing" / "error.json"), error_data("m", "", 1.0))
    assert "cannot be written" in caplog.text


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "named pipe"), (Path("/dev/zero"), "device")):
        reply = read_error_file(str(path))
        assert isinstance(reply, UnreadableErrorFile)
        assert kind in reply.raw


def test_a_sparse_file_of_gigabytes_is_read_as_far_as_one_may_go(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    with path.open("wb") as file:
        file.truncate(3 << 30)
    tracemalloc.start()
    try:
        reply = read_error_file(str(path))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(reply, UnreadableErrorFile)
    assert most < 8 * MAX_SIZE


@pytest.mark.parametrize("timestamp", [float("nan"), float("inf"), -5, 1_790_000_000_000_000_000, "1e30", 10**400])
def test_a_time_that_no_clock_shows_is_that_of_the_file(tmp_path: Path, timestamp: object) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "", "timestamp": timestamp}
    path.write_text(json.dumps({"message": {"message": "boom", "extraInfo": extra}}))
    failure = ProcessFailure(0, 1, 1, str(path))
    assert failure.text == "boom"
    assert abs(failure.timestamp - time.time()) < 60
    assert failure.timestamp_isoformat()


def test_a_file_from_the_far_future_can_be_reported(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(str(path), error_data("boom", "", 1000.0))
    path.write_text(path.read_text().replace("1000", "x"))
    os.utime(path, (1 << 33, 1 << 33))
    assert ProcessFailure(0, 1, 1, str(path)).timestamp_isoformat()


def test_a_link_at_the_name_that_is_written_first_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "error.json"
    victim.write_text("precious")
    (tmp_path / f"error.json.{os.getpid()}").symlink_to(victim)
    write_error_file(str(path), error_data("boom", "", 1000.0))
    assert victim.read_text() == "precious"
    assert isinstance(read_error_file(str(path)), ErrorFile)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["error.json", f"error.json.{os.getpid()}", "victim"]
