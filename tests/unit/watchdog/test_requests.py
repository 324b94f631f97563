"""The file timer's protocol: valid requests, and the result of any other bytes."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.workers.timers import MAX_LINE, FileTimerRequest, RequestReader, TimerRequest, parse

REQUESTS = st.builds(
    FileTimerRequest,
    st.integers(1, (1 << 31) - 1),
    st.text(max_size=100),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, 64),
)


def line(request: FileTimerRequest) -> bytes:
    return request.to_json().encode() + b"\n"


def test_what_a_request_holds() -> None:
    request = FileTimerRequest(7, "scope", 2.5, 9)
    assert (request.worker_pid, request.worker_id, request.version) == (7, 7, 1)
    assert request == FileTimerRequest(7, "scope", 2.5, 9)
    assert request != FileTimerRequest(7, "scope", 2.5)
    assert isinstance(request, TimerRequest)
    assert TimerRequest(1, "s", 2.5) == TimerRequest(1, "s", 2.5)
    with pytest.raises(TypeError):
        hash(request)


@given(st.lists(REQUESTS), st.lists(st.integers(1, 500)))
def test_requests_come_out_as_they_went_in_however_they_are_cut(
    requests: list[FileTimerRequest], cuts: list[int]
) -> None:
    data, reader, found = b"".join(map(line, requests)), RequestReader(), []
    for size in cuts:
        new, complaints = reader.feed(data[:size])
        found += new
        data = data[size:]
        assert not complaints
    new, complaints = reader.feed(data)
    assert found + new == requests
    assert not complaints


@given(REQUESTS, st.binary(max_size=3000).filter(lambda rubbish: b"\n" not in rubbish and rubbish.count(b'{"') < 10))
def test_a_request_counts_behind_a_half_line(request: FileTimerRequest, rubbish: bytes) -> None:
    assert RequestReader().feed(rubbish + line(request))[0] == [request]


@pytest.mark.parametrize("cut", range(1, 84, 4))
def test_a_request_counts_behind_half_of_another(cut: int) -> None:
    half = line(FileTimerRequest(1, "half", 1.5, 9))[:cut]
    whole = FileTimerRequest(2, 'with {"braces"}', 2.5, 9)
    assert RequestReader().feed(half + line(whole)) == ([whole], [])


def test_a_line_without_an_end_is_not_kept() -> None:
    reader, request = RequestReader(), FileTimerRequest(1, "scope", 1.5, 9)
    for _ in range(100):
        assert reader.feed(b"x" * 10_000) == ([], [])
    assert reader.feed(line(request)) == ([request], [])


def test_the_longest_request_counts_behind_invalid_bytes() -> None:
    spare = MAX_LINE - len(line(FileTimerRequest(1, "", 1.5, 9)))
    request = FileTimerRequest(1, "s" * spare, 1.5, 9)
    assert len(line(request)) == MAX_LINE
    assert RequestReader().feed(b"x" * 5000 + line(request)) == ([request], [])


def test_complaints_are_short_and_blank_lines_are_none() -> None:
    requests, complaints = RequestReader().feed(b"x" * 3000 + b"\n\n  \n")
    assert requests == []
    assert len(complaints) == 1
    assert len(complaints[0]) < 200


GOOD = {"version": 1, "pid": 7, "scope_id": "s", "expiration_time": 1.5, "signal": 9}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 31},
        {"pid": True},
        {"pid": "7"},
        {"pid": 7.0},
        {"scope_id": 5},
        {"scope_id": None},
        {"expiration_time": math.nan},
        {"expiration_time": math.inf},
        {"expiration_time": -math.inf},
        {"expiration_time": 10**400},
        {"expiration_time": "1"},
        {"expiration_time": True},
        {"signal": 65},
        {"signal": 9.0},
        {"signal": None},
    ],
)
def test_what_is_no_request(change: dict[str, object]) -> None:
    assert parse(json.dumps(GOOD).encode()) is not None
    assert parse(json.dumps({**GOOD, **change}).encode()) is None


@pytest.mark.parametrize(
    "text", [b"[" * 4000, b"[1]", b"1", b"{}", b'"x"', b"\xff\xfe", b'{"version": 1e999}', b"9" * 4096]
)
def test_no_other_json_is_one_either(text: bytes) -> None:
    assert parse(text) is None


def test_a_negative_signal_means_none() -> None:
    request = parse(json.dumps({**GOOD, "signal": -3}).encode())
    assert request is not None
    assert request.signal == 0


def test_whole_seconds_and_fields_of_later_versions_are_taken() -> None:
    assert parse(json.dumps({**GOOD, "expiration_time": 3, "more": []}).encode()) == FileTimerRequest(7, "s", 3.0, 9)
