"""The requests of torch's TCPStore protocol as typed data, and the parts of `rallypoint.store.wire` for them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from rallypoint.store import wire
from rallypoint.store.plain import Replies, Table
from rallypoint.store.wire import CANCELLED, DONE, I64, MAGIC, MAX_KEYS, MISSING, U32, U64, Op, string, strings

__all__ = ["CANCELLED", "DONE", "I64", "MAGIC", "MAX_KEYS", "MISSING", "U32", "U64", "Op", "string", "strings"]

C = TypeVar("C", bound=Hashable)


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


REQUESTS: dict[Op, type[Request]] = {
    Op.VALIDATE: Validate,
    Op.SET: Set,
    Op.COMPARE_SET: CompareSet,
    Op.GET: Get,
    Op.ADD: Add,
    Op.CHECK: Check,
    Op.WAIT: Wait,
    Op.NUM_KEYS: NumKeys,
    Op.DELETE_KEY: DeleteKey,
    Op.APPEND: Append,
    Op.MULTI_GET: MultiGet,
    Op.MULTI_SET: MultiSet,
    Op.CANCEL_WAIT: CancelWait,
    Op.PING: Ping,
    Op.QUEUE_PUSH: QueuePush,
    Op.QUEUE_POP: QueuePop,
    Op.QUEUE_LEN: QueueLen,
    Op.LIST_KEYS: ListKeys,
    Op.BARRIER: Barrier,
}
"""The request of each opcode."""

_OPCODES = {kind: op for op, kind in REQUESTS.items()}


def opcode(request: Request) -> Op:
    """The first byte of the request."""
    return _OPCODES[type(request)]


def encode(request: Request) -> bytes:
    """The request as it travels. Raises StoreProtocolError beyond the protocol's limits."""
    return wire.encode(opcode(request), *request)


def execute(table: Table[C], client: C, request: Request) -> Replies[C]:
    """Have a table execute the request. Raises StoreProtocolError where a number is needed and there is none."""
    return table.execute(client, opcode(request), *request)


def typed(op: Op, fields: tuple[Any, ...]) -> Request:
    """A request that a decoder has found. As tuples these can be equal, or false: tell them by type."""
    return REQUESTS[op](*fields)
