"""The decoder: any split gives the same requests, and no bytes cause more than an error."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.plain import Decoder
from tests import typed_requests as wire
from tests.unit.store.requests import REQUESTS, arriving, decode, rest, stream, typed

GREETING = wire.encode(wire.Validate())


@given(sent=st.lists(REQUESTS, max_size=12), data=st.data())
def test_any_split_gives_the_same_requests(sent: list[wire.Request], data: st.DataObject) -> None:
    whole = stream(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=30)))
    pieces = [whole[a:b] for a, b in pairwise([0, *cuts, len(whole)])]
    assert typed(decode(pieces)) == typed(arriving(sent))


@given(sent=st.lists(REQUESTS, max_size=12), data=st.data())
def test_requests_taken_out_late_are_the_same(sent: list[wire.Request], data: st.DataObject) -> None:
    """A server that has no space for replies leaves requests where they are while more bytes arrive."""
    whole = stream(sent)
    decoder = Decoder()
    found: list[wire.Request] = []
    while whole:
        size = data.draw(st.integers(1, len(whole)))
        decoder.feed(whole[:size])
        whole = whole[size:]
        for _ in range(data.draw(st.integers(0, 2))):
            request = decoder.next()
            if request is not None:
                found.append(wire.typed(*request))
    assert typed([*found, *rest(decoder)]) == typed(arriving(sent))


HUGE = (1 << 60).to_bytes(8, "little")
ONE = (1).to_bytes(8, "little")
KEY = ONE + b"k"


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        (b"\x03" + HUGE, "a key of 1152921504606846976 bytes"),
        (b"\x03" + (8193).to_bytes(8, "little"), "a key of 8193 bytes"),
        (b"\x01" + KEY + HUGE, "a value of 1152921504606846976 bytes"),
        (b"\x01" + KEY + (8388609).to_bytes(8, "little"), "a value of 8388609 bytes"),
        (b"\x02" + KEY + ONE + b"e" + HUGE, "a value of"),
        (b"\x06" + HUGE, "1152921504606846976 keys"),
        (b"\x05" + (131073).to_bytes(8, "little"), "131073 keys"),
        (b"\x06" + ONE + HUGE, "a key of"),
        (b"\x0b" + (-1).to_bytes(8, "little", signed=True), "18446744073709551615 keys"),
        (b"\x0b" + ONE + KEY + HUGE, "a value of"),
        (b"\x13", "unknown opcode"),
        (b"\xff", "unknown opcode"),
        (GREETING, "sent twice"),
    ],
)
def test_what_is_beyond_the_limits_is_refused_as_soon_as_it_is_read(frame: bytes, what: str) -> None:
    decoder = Decoder()
    tracemalloc.start()
    try:
        decoder.feed(GREETING + frame)
        with pytest.raises(StoreProtocolError, match=what):
            decoder.next()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    "frame",
    [
        b"\x03" + (8192).to_bytes(8, "little"),
        b"\x01" + KEY + (8388608).to_bytes(8, "little"),
        b"\x06" + (131072).to_bytes(8, "little"),
        b"\x0b" + (131072).to_bytes(8, "little"),
    ],
)
def test_what_is_just_within_the_limits_waits_for_more_without_taking_memory(frame: bytes) -> None:
    decoder = Decoder()
    tracemalloc.start()
    try:
        decoder.feed(GREETING + frame)
        assert decoder.next() is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_pair_is_there_before_the_rest_of_its_frame() -> None:
    decoder = Decoder()
    decoder.feed(GREETING + b"\x0b" + (2).to_bytes(8, "little") + KEY + ONE + b"v" + ONE)
    assert list(rest(decoder)) == [wire.Set(b"k", b"v")]
    decoder.feed(b"l" + ONE + b"w")
    assert list(rest(decoder)) == [wire.Set(b"l", b"w")]


def test_a_large_value_in_tiny_pieces_costs_no_more_than_its_bytes() -> None:
    """Quadratic work would take minutes here, and a list of the pieces a hundred times their size."""
    value = bytes(range(256)) * 512
    whole = GREETING + wire.encode(wire.Set(b"k", value))
    tracemalloc.start()
    try:
        found = decode(whole[i : i + 2] for i in range(0, len(whole), 2))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [wire.Set(b"k", value)]
    assert peak < 6 * len(value)


def test_an_idle_decoder_lets_go_of_what_it_has_read() -> None:
    decoder = Decoder()
    tracemalloc.start()
    try:
        decoder.feed(GREETING + wire.encode(wire.Set(b"k", bytes(1 << 20))))
        assert decoder.next() is not None
        assert decoder.next() is None
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 100_000
