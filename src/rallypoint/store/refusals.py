"""Why a store refuses a connection or a request, in one table for the store in Python and the one in C. Pure."""

from __future__ import annotations

from enum import IntEnum

from rallypoint.store.errors import StoreProtocolError


class Reason(IntEnum):
    """`Reason` in native/store.h."""

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
    Reason.LONG_KEY: "a key of {number} bytes is too long for the store; at most {limit} are allowed",
    Reason.LONG_VALUE: "a value of {number} bytes is too long for the store; at most {limit} are allowed",
    Reason.MANY_KEYS: "{number} keys in one request are too many for the store; at most {limit} are allowed",
    Reason.WRONG_MAGIC: "VALIDATE has the magic number {number:#x} instead of {limit:#x}",
    Reason.NO_GREETING: "the first message is not VALIDATE, so this is not a store client (it begins with {first!r})",
    Reason.GREETED_AGAIN: "VALIDATE came a second time (it begins with {first!r})",
    Reason.UNKNOWN_OPCODE: "a request with an unknown opcode (it begins with {first!r})",
    Reason.NO_NUMBER: "the value {first!r} of key {second!r} is not a number, so nothing can be added to it",
    Reason.NO_MEMORY: "there is no memory for its request; see the limits of this process and its node",
    Reason.LONG_REQUEST: "a request of {number:.0f} bytes or more is too long; this store allows {limit:.0f}",
    Reason.GROWN_VALUE: "a value would grow to {number} bytes; this store allows {limit:.0f}",
    Reason.KEYS_OF_ONE: "it has added {number} keys and deleted too few; this store allows {limit} a connection",
    Reason.BYTES_OF_ONE: "it has added {number} bytes and deleted too few; this store allows {limit} a connection",
    Reason.SILENT: "it has not greeted within {limit:g} s, so it is not a store client",
    Reason.NOT_A_PEER: (
        "its address is not among those that may use this store ({limit}); if it is the job's, add its network to "
        "--store-peers"
    ),
    Reason.OTHER_USER: (
        "it is of another user of this machine than the agent; if it is a worker that has changed its user, give "
        "--store-peers=any"
    ),
}


def refusal(
    reason: Reason, number: float = 0, limit: float | str = 0, first: bytes = b"", second: bytes = b""
) -> StoreProtocolError:
    """The error for a reason: how many there were, how many are allowed, and the bytes that it is about."""
    sentence = _SENTENCES[reason].format(number=number, limit=limit, first=first, second=second)
    return StoreProtocolError(sentence)
