"""The bytes of the requests, against recorded ones (contract section 9.1)."""

from __future__ import annotations

import pytest

from rallypoint.store.errors import StoreProtocolError
from tests import typed_requests as wire


def test_bytes_seen_on_the_wire() -> None:
    greeting = wire.encode(wire.Validate()) + wire.encode(wire.Ping(0x3916))
    assert greeting == bytes.fromhex("00 ce f7 85 3c 0d 16 39 00 00")
    assert wire.encode(wire.Set(b"/k", b"v")) == bytes.fromhex("01 0200000000000000 2f6b 0100000000000000 76")
    assert wire.encode(wire.Wait([b"/k"])) == bytes.fromhex("06 0100000000000000 0200000000000000 2f6b")
    assert wire.encode(wire.Get(b"/k")) == bytes.fromhex("03 0200000000000000 2f6b")


def test_every_opcode_has_one_request() -> None:
    assert sorted(wire.REQUESTS) == list(range(19))
    assert wire.opcode(wire.Validate()) == 0
    assert wire.opcode(wire.Barrier(b"", 1)) == 18


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
