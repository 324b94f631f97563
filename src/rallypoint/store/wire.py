"""torch's TCPStore protocol: opcodes, limits, refusals, and the encoding of requests (contract section 9.1). Pure.

All integers are little-endian; a string is a u64 length and its bytes. There is no other framing and there are no
request ids: replies follow the order of the requests, except that WAIT and BARRIER answer when they can. `plain` parses
these bytes, and defines the meaning of requests and their replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from struct import Struct
from typing import Any

from rallypoint.store.errors import StoreProtocolError

MAGIC = 0x3C85F7CE
LAUNCHER_MAGIC = b"RALLYPT\n"
"""First bytes of a control connection, which agents and `rallyctl` also send to a store at their endpoint."""
PROBE_NONCE = 0x52414C4C
MAX_KEY = 8192
"""Maximum bytes of a key, including the client's leading slash (contract section 9.4)."""
MAX_PAYLOAD = 8 * 1024 * 1024
"""Maximum bytes of a value in one request; APPEND can make a stored value longer."""
MAX_KEYS = 131072
"""Maximum number of keys in one CHECK, WAIT, MULTI_GET or MULTI_SET."""

U32 = Struct("<I")
U64 = Struct("<Q")
I64 = Struct("<q")

DONE = b"\x00"
"""The reply to WAIT and BARRIER, and to CHECK if all keys exist."""
MISSING = b"\x01"
"""The reply to CHECK if a key is missing."""
CANCELLED = b"\x01"
"""The reply to CANCEL_WAIT. It differs from DONE, so that a client can tell which of them came first."""


class Op(IntEnum):
    """The first byte of a request; its `FIELDS` follow."""

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


FIELDS: dict[Op, tuple[str, ...]] = {
    Op.VALIDATE: ("u32",),
    Op.SET: ("key", "value"),
    Op.COMPARE_SET: ("key", "value", "value"),
    Op.GET: ("key",),
    Op.ADD: ("key", "i64"),
    Op.CHECK: ("keys",),
    Op.WAIT: ("keys",),
    Op.NUM_KEYS: (),
    Op.DELETE_KEY: ("key",),
    Op.APPEND: ("key", "value"),
    Op.MULTI_GET: ("keys",),
    Op.MULTI_SET: ("pairs",),
    Op.CANCEL_WAIT: (),
    Op.PING: ("u32",),
    Op.QUEUE_PUSH: ("key", "value"),
    Op.QUEUE_POP: ("key",),
    Op.QUEUE_LEN: ("key",),
    Op.LIST_KEYS: (),
    Op.BARRIER: ("key", "i64"),
}
"""The fields of each request, in order; `_PACK` encodes each kind."""


class RefusalReason(IntEnum):
    """Why a store refuses a connection or a request: `Reason` in native/store.h."""

    LONG_KEY = 1
    LONG_VALUE = 2
    MANY_KEYS = 3
    WRONG_MAGIC = 4
    NO_GREETING = 5
    GREETED_AGAIN = 6
    UNKNOWN_OPCODE = 7
    NO_NUMBER = 8
    NO_MEMORY = 9
    LONG_REQUEST = 10
    GROWN_VALUE = 11
    KEYS_OF_ONE = 12
    BYTES_OF_ONE = 13
    SILENT = 14
    NOT_A_PEER = 15
    OTHER_USER = 16


_SENTENCES = {
    RefusalReason.LONG_KEY: "a key of {number} bytes is too long for the store; at most {limit} are allowed",
    RefusalReason.LONG_VALUE: "a value of {number} bytes is too long for the store; at most {limit} are allowed",
    RefusalReason.MANY_KEYS: "{number} keys in one request are too many for the store; at most {limit} are allowed",
    RefusalReason.WRONG_MAGIC: "VALIDATE has the magic number {number:#x} instead of {limit:#x}",
    RefusalReason.NO_GREETING: (
        "the first message is not VALIDATE, so this is not a store client (it begins with {first!r})"
    ),
    RefusalReason.GREETED_AGAIN: "VALIDATE was sent twice (it begins with {first!r})",
    RefusalReason.UNKNOWN_OPCODE: "a request with an unknown opcode (it begins with {first!r})",
    RefusalReason.NO_NUMBER: "the value {first!r} of key {second!r} is not a number, so nothing can be added to it",
    RefusalReason.NO_MEMORY: "there is not enough memory for its request; see the limits of this process and its node",
    RefusalReason.LONG_REQUEST: "a request of {number:.0f} bytes or more is too long; this store allows {limit:.0f}",
    RefusalReason.GROWN_VALUE: "a value would grow to {number} bytes; this store allows {limit:.0f}",
    RefusalReason.KEYS_OF_ONE: (
        "it has added {number} keys and deleted too few; this store allows {limit} per connection"
    ),
    RefusalReason.BYTES_OF_ONE: (
        "it has added {number} bytes and deleted too few; this store allows {limit} per connection"
    ),
    RefusalReason.SILENT: "it did not send a greeting within {limit:g} s, so it is not a store client",
    RefusalReason.NOT_A_PEER: (
        "its address is not one of those that may use this store ({limit}); if it belongs to the job, add its network "
        "to --store-peers"
    ),
    RefusalReason.OTHER_USER: (
        "it belongs to another user of this machine than the agent; if it is a worker that changed its user, set "
        "--store-peers=any"
    ),
}


def refusal(
    reason: RefusalReason, number: float = 0, limit: float | str = 0, first: bytes = b"", second: bytes = b""
) -> StoreProtocolError:
    """Create the error for a reason, with the number, its limit, and the bytes concerned."""
    sentence = _SENTENCES[reason].format(number=number, limit=limit, first=first, second=second)
    return StoreProtocolError(sentence, is_launcher=first.startswith(LAUNCHER_MAGIC))


def string(text: bytes) -> bytes:
    """Encode a key or value: its length and bytes."""
    return U64.pack(len(text)) + text


def strings(texts: Sequence[bytes]) -> bytes:
    return U64.pack(len(texts)) + b"".join(map(string, texts))


def encode(op: Op, *fields: Any) -> bytes:
    """Encode a request with the fields in `FIELDS`. Raises StoreProtocolError if a key, a value or their number exceeds
    the protocol's limits."""
    return bytes([op]) + b"".join([_PACK[kind](value) for kind, value in zip(FIELDS[op], fields, strict=True)])


def greeting() -> bytes:
    return encode(Op.VALIDATE, MAGIC)


def probe() -> bytes:
    """Encode the probe by which an agent finds out whether a store is listening; a store answers with `PROBE_NONCE`."""
    return greeting() + encode(Op.PING, PROBE_NONCE)


def check(size: int, limit: float, reason: RefusalReason) -> None:
    """Raise StoreProtocolError with this reason if `size` exceeds the limit."""
    if size > limit:
        raise refusal(reason, size, limit)


def _key(key: bytes) -> bytes:
    check(len(key), MAX_KEY, RefusalReason.LONG_KEY)
    return string(key)


def _value(value: bytes) -> bytes:
    check(len(value), MAX_PAYLOAD, RefusalReason.LONG_VALUE)
    return string(value)


def _keys(keys: Sequence[bytes]) -> bytes:
    check(len(keys), MAX_KEYS, RefusalReason.MANY_KEYS)
    return U64.pack(len(keys)) + b"".join(map(_key, keys))


def _pairs(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    check(len(pairs), MAX_KEYS, RefusalReason.MANY_KEYS)
    return U64.pack(len(pairs)) + b"".join([_key(key) + _value(value) for key, value in pairs])


_PACK: dict[str, Callable[[Any], bytes]] = {
    "u32": U32.pack,
    "i64": I64.pack,
    "key": _key,
    "value": _value,
    "keys": _keys,
    "pairs": _pairs,
}
