"""Encoding and decoding requests (contract section 9.1): any split gives the same, and any bytes at most an error."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.plain import Decoder
from tests import typed_requests as wire
from tests.processes import peak_below
from tests.unit.store.requests import REQUESTS, arriving, rest, stream, typed

GREETING = wire.encode(wire.Validate())


@given(sent=st.lists(REQUESTS, max_size=12), data=st.data())
def test_any_split_gives_the_same_requests(sent: list[wire.Request], data: st.DataObject) -> None:
    """A server without room for replies leaves requests in the decoder while more bytes arrive."""
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
    ("frame", "error"),
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
        # Just within the limits
        (b"\x03" + (8192).to_bytes(8, "little"), ""),
        (b"\x01" + KEY + (8388608).to_bytes(8, "little"), ""),
        (b"\x06" + (131072).to_bytes(8, "little"), ""),
        (b"\x0b" + (131072).to_bytes(8, "little"), ""),
    ],
)
def test_limits_are_checked_as_soon_as_a_length_is_read(frame: bytes, error: str) -> None:
    decoder = Decoder()
    with peak_below(100_000):
        decoder.feed(GREETING + frame)
        if error:
            with pytest.raises(StoreProtocolError, match=error):
                decoder.next()
        else:
            assert decoder.next() is None


def test_pairs_are_decoded_before_the_end_of_their_request() -> None:
    decoder = Decoder()
    decoder.feed(GREETING + b"\x0b" + (2).to_bytes(8, "little") + KEY + ONE + b"v" + ONE)
    assert list(rest(decoder)) == [wire.Set(b"k", b"v")]
    decoder.feed(b"l" + ONE + b"w")
    assert list(rest(decoder)) == [wire.Set(b"l", b"w")]


def test_memory_of_a_large_value_in_small_pieces() -> None:
    """In quadratic time this would take minutes."""
    value = bytes(range(256)) * 512
    whole = GREETING + wire.encode(wire.Set(b"k", value))
    decoder = Decoder()
    with peak_below(6 * len(value)):
        for start in range(0, len(whole), 2):
            decoder.feed(whole[start : start + 2])
            found = decoder.next()
        assert found == (wire.Op.SET, (b"k", value))
        del found
        assert decoder.next() is None
        assert tracemalloc.get_traced_memory()[0] < 100_000, "an idle decoder keeps no values"


def test_recorded_bytes() -> None:
    greeting = wire.encode(wire.Validate()) + wire.encode(wire.Ping(0x3916))
    assert greeting == bytes.fromhex("00 ce f7 85 3c 0d 16 39 00 00")
    assert wire.encode(wire.Set(b"/k", b"v")) == bytes.fromhex("01 0200000000000000 2f6b 0100000000000000 76")
    assert wire.encode(wire.Wait([b"/k"])) == bytes.fromhex("06 0100000000000000 0200000000000000 2f6b")
    assert wire.encode(wire.Get(b"/k")) == bytes.fromhex("03 0200000000000000 2f6b")


@pytest.mark.parametrize(
    ("fits", "too_much"),
    [
        (wire.Get(b"k" * 8192), wire.Get(b"k" * 8193)),
        (wire.Set(b"", b"v" * 8388608), wire.Set(b"", b"v" * 8388609)),
        (wire.QueuePush(b"", b"v" * 8388608), wire.QueuePush(b"", b"v" * 8388609)),
        (wire.Check([b""] * 131072), wire.Check([b""] * 131073)),
        (wire.MultiSet([(b"", b"")] * 131072), wire.MultiSet([(b"", b"")] * 131073)),
    ],
    ids=["key", "value", "pushed value", "keys", "pairs"],
)
def test_limits(fits: wire.Request, too_much: wire.Request) -> None:
    assert wire.encode(fits)
    with pytest.raises(StoreProtocolError, match="at most"):
        wire.encode(too_much)
