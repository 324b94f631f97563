"""The words of torch's TCPStore protocol: opcodes, limits, and each request with its bytes (contract section 9.1).

Pure. All integers are little-endian; a string is a u64 length and its bytes. There is no framing beyond the fields and
there are no request ids: replies come in the order of the requests, except that WAIT and BARRIER answer when they can.
`rallypoint.store.decoder` reads these bytes back, `rallypoint.store.table` says what the requests mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple, TypeAlias

from rallypoint.store.errors import StoreProtocolError

MAGIC = 0x3C85F7CE
MAX_KEY = 8192
"""Bytes of the longest key, the client's leading slash included (contract section 9.4)."""
MAX_PAYLOAD = 8 * 1024 * 1024
"""Bytes of the longest value in one request; APPEND can make a stored value longer."""
MAX_KEYS = 131072
"""Most keys in one CHECK, WAIT, MULTI_GET or MULTI_SET."""

U32 = Struct("<I")
U64 = Struct("<Q")
I64 = Struct("<q")

DONE = b"\x00"
"""The reply to WAIT and BARRIER, and to CHECK when all keys are there."""
MISSING = b"\x01"
"""The reply to CHECK when a key is missing."""
CANCELLED = b"\x01"
"""The reply to CANCEL_WAIT. It differs from DONE, so that a client sees which of the two came first."""


class Op(IntEnum):
    """The first byte of a request."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    NUM_KEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


class Validate(NamedTuple):
    """The first message of every connection. No reply."""

    magic: int = MAGIC


class Set(NamedTuple):
    """Store a value. No reply."""

    key: bytes
    value: bytes


class CompareSet(NamedTuple):
    """Store `desired` if the present value is `expected`. The reply is a value."""

    key: bytes
    expected: bytes
    desired: bytes


class Get(NamedTuple):
    """Ask for a value. The reply is the value, empty if there is none."""

    key: bytes


class Add(NamedTuple):
    """Add to a decimal number. The reply is an i64, the sum."""

    key: bytes
    delta: int


class Check(NamedTuple):
    """Ask whether all keys are there. The reply is DONE or MISSING."""

    keys: Sequence[bytes]


class Wait(NamedTuple):
    """Ask to be told, by DONE, when all keys are there."""

    keys: Sequence[bytes]


class NumKeys(NamedTuple):
    """Ask for the number of keys. The reply is an i64."""


class DeleteKey(NamedTuple):
    """Remove a value. The reply is an i64: 1 if it was there, 0 if not."""

    key: bytes


class Append(NamedTuple):
    """Lengthen a value, an absent one from empty. No reply."""

    key: bytes
    value: bytes


class MultiGet(NamedTuple):
    """Ask for several values. The reply is one value for each key, empty where there is none."""

    keys: Sequence[bytes]


class MultiSet(NamedTuple):
    """Store several values, one by one: a reader may see the first ones before the rest is there. No reply."""

    pairs: Sequence[tuple[bytes, bytes]]


class CancelWait(NamedTuple):
    """Give up waiting. The reply is CANCELLED, always."""


class Ping(NamedTuple):
    """Ask for a sign of life. The reply is the same u32."""

    nonce: int


class QueuePush(NamedTuple):
    """Put a value at the end of a queue. No reply."""

    key: bytes
    value: bytes


class QueuePop(NamedTuple):
    """Take the oldest value of a queue. The reply is an i64, the length before, and if that is not 0 the value."""

    key: bytes


class QueueLen(NamedTuple):
    """Ask for the length of a queue. The reply is an i64."""

    key: bytes


class ListKeys(NamedTuple):
    """Ask for all keys. The reply is an i64 count and the keys, in no order."""


class Barrier(NamedTuple):
    """Add 1 to the key's number and wait, for DONE, until it has reached `world_size`."""

    key: bytes
    world_size: int


Request: TypeAlias = (
    Validate
    | Set
    | CompareSet
    | Get
    | Add
    | Check
    | Wait
    | NumKeys
    | DeleteKey
    | Append
    | MultiGet
    | MultiSet
    | CancelWait
    | Ping
    | QueuePush
    | QueuePop
    | QueueLen
    | ListKeys
    | Barrier
)


def string(text: bytes) -> bytes:
    """A length and its bytes, as keys and values travel."""
    return U64.pack(len(text)) + text


def strings(texts: Sequence[bytes]) -> bytes:
    """A count and that many strings."""
    return U64.pack(len(texts)) + b"".join(map(string, texts))


def encode(request: Request) -> bytes:
    """The request as it travels.

    Raises:
        StoreProtocolError: a key, a value or their number is beyond the protocol's limits.
    """
    op, fields = _LAYOUT[type(request)]
    return bytes([op]) + b"".join([pack(value) for pack, value in zip(fields, request, strict=True)])


def opcode(request: Request) -> Op:
    """The first byte of the request."""
    return _LAYOUT[type(request)][0]


def check_key(size: int) -> None:
    """Raises StoreProtocolError if a key of `size` bytes is longer than the protocol allows."""
    if size > MAX_KEY:
        raise StoreProtocolError(f"a key of {size} bytes is too long for the store; at most {MAX_KEY} are allowed")


def check_payload(size: int) -> None:
    """Raises StoreProtocolError if a value of `size` bytes is longer than the protocol allows."""
    if size > MAX_PAYLOAD:
        raise StoreProtocolError(
            f"a value of {size} bytes is too long for the store; at most {MAX_PAYLOAD} are allowed"
        )


def check_count(count: int) -> None:
    """Raises StoreProtocolError if `count` keys are more than the protocol allows in one request."""
    if count > MAX_KEYS:
        raise StoreProtocolError(
            f"{count} keys in one request are too many for the store; at most {MAX_KEYS} are allowed"
        )


def check_request(size: float, limit: float) -> None:
    """Raises StoreProtocolError if a request of `size` bytes is longer than the store allows."""
    if size > limit:
        raise StoreProtocolError(f"a request of {size:.0f} bytes or more is too long; this store allows {limit:.0f}")


def _key(key: bytes) -> bytes:
    check_key(len(key))
    return string(key)


def _payload(value: bytes) -> bytes:
    check_payload(len(value))
    return string(value)


def _keys(keys: Sequence[bytes]) -> bytes:
    check_count(len(keys))
    return U64.pack(len(keys)) + b"".join(map(_key, keys))


def _pairs(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    check_count(len(pairs))
    return U64.pack(len(pairs)) + b"".join([_key(key) + _payload(value) for key, value in pairs])


_LAYOUT: dict[type[Request], tuple[Op, tuple[Callable[..., bytes], ...]]] = {
    Validate: (Op.VALIDATE, (U32.pack,)),
    Set: (Op.SET, (_key, _payload)),
    CompareSet: (Op.COMPARE_SET, (_key, _payload, _payload)),
    Get: (Op.GET, (_key,)),
    Add: (Op.ADD, (_key, I64.pack)),
    Check: (Op.CHECK, (_keys,)),
    Wait: (Op.WAIT, (_keys,)),
    NumKeys: (Op.NUM_KEYS, ()),
    DeleteKey: (Op.DELETE_KEY, (_key,)),
    Append: (Op.APPEND, (_key, _payload)),
    MultiGet: (Op.MULTI_GET, (_keys,)),
    MultiSet: (Op.MULTI_SET, (_pairs,)),
    CancelWait: (Op.CANCEL_WAIT, ()),
    Ping: (Op.PING, (U32.pack,)),
    QueuePush: (Op.QUEUE_PUSH, (_key, _payload)),
    QueuePop: (Op.QUEUE_POP, (_key,)),
    QueueLen: (Op.QUEUE_LEN, (_key,)),
    ListKeys: (Op.LIST_KEYS, ()),
    Barrier: (Op.BARRIER, (_key, I64.pack)),
}
"""The opcode of each request, and how each of its fields travels, in order."""

REQUESTS: dict[Op, type[Request]] = {op: kind for kind, (op, _) in _LAYOUT.items()}
"""The request of each opcode."""
