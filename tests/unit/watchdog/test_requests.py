"""The file timer's protocol: valid requests, and any other bytes; and `expires`."""

from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.workers import timers
from rallypoint.workers.timers import MAX_LINE, FileTimerRequest, RequestReader, TimerClient, configure, expires, parse

REQUESTS = st.builds(
    FileTimerRequest,
    st.integers(1, (1 << 31) - 1),
    st.text(max_size=100),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, 64),
)


def line(request: FileTimerRequest) -> bytes:
    return request.to_json().encode() + b"\n"


@given(st.lists(REQUESTS), st.lists(st.integers(1, 500)))
def test_requests_are_read_however_they_are_cut(requests: list[FileTimerRequest], cuts: list[int]) -> None:
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
def test_a_request_after_other_bytes(request: FileTimerRequest, rubbish: bytes) -> None:
    assert RequestReader().feed(rubbish + line(request))[0] == [request]


@pytest.mark.parametrize("cut", range(1, 84, 4))
def test_a_request_after_half_of_another(cut: int) -> None:
    half = line(FileTimerRequest(1, "half", 1.5, 9))[:cut]
    whole = FileTimerRequest(2, 'with {"braces"}', 2.5, 9)
    assert RequestReader().feed(half + line(whole)) == ([whole], [])


def test_invalid_bytes_are_not_kept() -> None:
    reader = RequestReader()
    for _ in range(100):
        assert reader.feed(b"x" * 10_000) == ([], [])
    spare = MAX_LINE - len(line(FileTimerRequest(1, "", 1.5, 9)))
    longest = FileTimerRequest(1, "s" * spare, 1.5, 9)
    assert len(line(longest)) == MAX_LINE
    assert reader.feed(line(longest)) == ([longest], [])
    requests, (complaint,) = reader.feed(b"x" * 3000 + b"\n\n  \n")
    assert requests == []
    assert len(complaint) < 200


GOOD = {"version": 1, "pid": 7, "scope_id": "s", "expiration_time": 1.5, "signal": 9}


INVALID: dict[str, list[object]] = {
    "version": [2, None],
    "pid": [0, -1, 1 << 31, True, "7", 7.0],
    "scope_id": [5, None],
    "expiration_time": [math.nan, math.inf, -math.inf, 10**400, "1", True],
    "signal": [65, 9.0, None],
}
OTHER_JSON = [b"[" * 4000, b"[1]", b"1", b"{}", b'"x"', b"\xff\xfe", b'{"version": 1e999}', b"9" * 4096]


@pytest.mark.parametrize(
    "text",
    [
        *(json.dumps({**GOOD, name: value}).encode() for name, values in INVALID.items() for value in values),
        *OTHER_JSON,
    ],
)
def test_invalid_requests(text: bytes) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    ("change", "request_"),
    [
        ({"expiration_time": 3, "more": []}, FileTimerRequest(7, "s", 3.0, 9)),
        ({"signal": -3}, FileTimerRequest(7, "s", 1.5, 0)),
    ],
    ids=["whole seconds and unknown fields", "no signal"],
)
def test_valid_requests(change: dict[str, object], request_: FileTimerRequest) -> None:
    assert parse(json.dumps({**GOOD, **change}).encode()) == request_


class Notes(TimerClient):
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.expiration = 0.0

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.lines.append(("acquire", scope_id))
        self.expiration = expiration_time

    def release(self, scope_id: str) -> None:
        self.lines.append(("release", scope_id))


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "_configured", None)


def test_a_block_holds_its_timer() -> None:
    notes = Notes()
    configure(notes)
    before = time.time()
    with expires(after=60, scope="mine"):
        assert notes.lines == [("acquire", "mine")]
        assert before + 60 <= notes.expiration <= time.time() + 60
    assert notes.lines == [("acquire", "mine"), ("release", "mine")]
    with pytest.raises(KeyError), expires(60, "mine", notes):
        raise KeyError
    assert notes.lines == [("acquire", "mine"), ("release", "mine")] * 2


def test_a_timer_without_a_name_is_named_by_its_place() -> None:
    notes = Notes()
    with expires(60, client=notes):
        pass
    with expires(60, client=notes):
        pass
    one, other = notes.lines[0][1], notes.lines[2][1]
    assert one.startswith(f"{__file__}#")
    assert one != other


def test_without_a_client() -> None:
    with pytest.raises(RuntimeError, match="configure"), expires(60):
        pass
