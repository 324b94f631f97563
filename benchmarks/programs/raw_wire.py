"""The few messages of the store's wire protocol that the load is made of (contract sections 9.1 and 9.2).

Written out here rather than taken from `rallypoint.store`, so that both servers are judged by the contract alone.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_VALUE = bytes(range(64))
COUNTER = b"/bench/counter"


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


class LoadError(Exception):
    """The server closed a connection, fell silent or answered wrongly."""


class Step(NamedTuple):
    """One round trip: what is sent in one segment, how many requests that is, and what must come back."""

    message: bytes
    requests: int
    reply_length: int
    reply: bytes | None
    """None where it differs from time to time (a counter)."""


def handshake(nonce: int) -> Step:
    """VALIDATE and PING in one segment, as torch's client may send them."""
    reply = struct.pack("<I", nonce)
    return Step(struct.pack("<BIB", 0, 0x3C85F7CE, 13) + reply, 2, 4, reply)


def steps(client: int) -> list[Step]:
    """What `set`, `get`, `add` and `check` of torch's client put on the wire: 5 requests in 4 round trips.

    `set` has no reply, so it travels with the WAIT that `get` begins with.
    """
    key = _text(b"/bench/%d" % client)
    one_key = struct.pack("<Q", 1) + key
    return [
        Step(b"\x01" + key + _text(_VALUE) + b"\x06" + one_key, 2, 1, b"\0"),
        Step(b"\x03" + key, 1, 8 + len(_VALUE), _text(_VALUE)),
        Step(b"\x04" + _text(COUNTER) + struct.pack("<q", 1), 1, 8, None),
        Step(b"\x05" + one_key, 1, 1, b"\0"),
    ]
