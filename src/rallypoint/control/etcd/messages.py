"""The etcd messages (rpc.proto, kv.proto) that we use: requests to bytes, bytes to answers and errors. Pure.

Three parts: protocol buffers on the wire (numbers, byte strings, nested messages), the messages, and the meaning of
etcd's errors. Any input is accepted: invalid messages raise `DecodingError`, and unknown fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

from rallypoint.control.etcd.api import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    Range,
    RangeResult,
    TxnResult,
    WatchEvent,
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT = 10
"""Bytes of the longest varint, which carries 64 bits."""


class DecodingError(ValueError):
    """The bytes are no message."""


def number(field: int, value: int) -> bytes:
    """A field with a number: a bool, an enum or an int64."""
    return _varint(field << 3 | _VARINT) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF) if value else b""


def string(field: int, value: bytes) -> bytes:
    """A field with bytes or text."""
    return message(field, value) if value else b""


def message(field: int, value: bytes) -> bytes:
    """A field with a message, which is present even if empty."""
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield a message's fields with their numbers, in wire order. Fixed-width fields are skipped.

    Raises:
        DecodingError: the data is no message.
    """
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield tag >> 3, value
        elif kind == _BYTES:
            size, at = _read_varint(data, at)
            yield tag >> 3, _slice(data, at, size)
            at += size
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            _slice(data, at, size)
            at += size
        else:
            raise DecodingError(f"a field has the unknown type {kind}")


class Fields:
    """The fields of one message, by number."""

    def __init__(self, data: bytes) -> None:
        self._found: dict[int, list[int | bytes]] = {}
        for field, value in fields(data):
            self._found.setdefault(field, []).append(value)

    def __contains__(self, field: int) -> bool:
        return field in self._found

    def number(self, field: int) -> int:
        """An int64, 0 if missing."""
        value = self._last_value(field, 0)
        if not isinstance(value, int):
            raise DecodingError(f"field {field} should be a number")
        return value - (1 << 64) if value >> 63 else value

    def string(self, field: int) -> bytes:
        """Bytes or a message, empty if missing."""
        value = self._last_value(field, b"")
        if not isinstance(value, bytes):
            raise DecodingError(f"field {field} should be bytes")
        return value

    def text(self, field: int) -> str:
        """Text, empty if missing."""
        return self.string(field).decode(errors="replace")

    def strings(self, field: int) -> Iterator[bytes]:
        """All values of a repeated field with bytes or messages."""
        for value in self._found.get(field, ()):
            if not isinstance(value, bytes):
                raise DecodingError(f"field {field} should be bytes")
            yield value

    def _last_value(self, field: int, default: int | bytes) -> int | bytes:
        values = self._found.get(field)
        return values[-1] if values else default


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + index + 1
    raise DecodingError("a number is incomplete")


def _slice(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise DecodingError(f"a field has {size} bytes, but only {len(data) - at} are left")
    return data[at : at + size]


class Method(NamedTuple):
    """A procedure of etcd. `both_stream`: both sides may send several messages."""

    path: str
    both_stream: bool = False


RANGE = Method("/etcdserverpb.KV/Range")
TXN = Method("/etcdserverpb.KV/Txn")
GRANT = Method("/etcdserverpb.Lease/LeaseGrant")
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke")
KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", both_stream=True)
WATCH = Method("/etcdserverpb.Watch/Watch", both_stream=True)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate")
STATUS = Method("/etcdserverpb.Maintenance/Status")


def range_end(key: bytes, prefix: bool) -> tuple[bytes, bytes]:
    """Start and end of a range: a prefix ends before the first key that no longer begins with it."""
    if not prefix:
        return key, b""
    for index in range(len(key) - 1, -1, -1):
        if key[index] < 0xFF:
            return key, key[:index] + bytes([key[index] + 1])
    return key or b"\0", b"\0"  # to the very end; for an empty prefix, from the very beginning


def encode_range(key: bytes, prefix: bool, limit: int) -> bytes:
    """RangeRequest. It asks the cluster, not only the member."""
    begin, end = range_end(key, prefix)
    return string(1, begin) + string(2, end) + number(3, limit)


def encode_put(key: bytes, value: bytes, lease: int) -> bytes:
    """PutRequest."""
    return string(1, key) + string(2, value) + number(3, lease)


def encode_delete(key: bytes, prefix: bool) -> bytes:
    """DeleteRangeRequest."""
    begin, end = range_end(key, prefix)
    return string(1, begin) + string(2, end)


def encode_txn(compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation]) -> bytes:
    """TxnRequest."""
    return b"".join(
        [
            *(message(1, _encode_compare(compare)) for compare in compares),
            *(message(2, _encode_operation(operation)) for operation in then),
            *(message(3, _encode_operation(operation)) for operation in otherwise),
        ]
    )


_RELATIONS = {"==": 0, ">": 1, "<": 2, "!=": 3}
_FIELDS = {
    "version": (0, 4),
    "create_revision": (1, 5),
    "mod_revision": (2, 6),
    "value": (3, 7),
    "lease": (4, 8),
}
"""The enum of each comparison, and the field of its operand."""


def _encode_compare(compare: Compare) -> bytes:
    target, field = _FIELDS[compare.field]
    operand = compare.operand
    # The operand is in a `oneof`: it must be present even if it is zero, which `number` would omit.
    encoded = (
        message(field, operand) if isinstance(operand, bytes) else number(field, operand) or bytes([field << 3, 0])
    )
    begin, end = range_end(compare.key, compare.prefix)
    return number(1, _RELATIONS[compare.relation]) + number(2, target) + string(3, begin) + encoded + string(64, end)


def _encode_operation(operation: Operation) -> bytes:
    match operation:
        case Range(key, prefix, limit):
            return message(1, encode_range(key, prefix, limit))
        case Put(key, value, lease):
            return message(2, encode_put(key, value, lease))
        case Delete(key, prefix):
            return message(3, encode_delete(key, prefix))


def encode_grant(ttl_s: int, lease: int) -> bytes:
    """LeaseGrantRequest, with the id for the lease."""
    return number(1, ttl_s) + number(2, lease)


def encode_lease(lease: int) -> bytes:
    """LeaseRevokeRequest or LeaseKeepAliveRequest."""
    return number(1, lease)


def encode_watch(key: bytes, prefix: bool, from_revision: int) -> bytes:
    """WatchRequest that creates a watch."""
    begin, end = range_end(key, prefix)
    return message(1, string(1, begin) + string(2, end) + number(3, from_revision))


def encode_authenticate(user: str, password: str) -> bytes:
    """AuthenticateRequest."""
    return string(1, user.encode()) + string(2, password.encode())


def decode_range(data: bytes) -> RangeResult:
    """RangeResponse."""
    read = Fields(data)
    return RangeResult(_revision(read), tuple(_key_value(kv) for kv in read.strings(2)))


def decode_txn(data: bytes, then: Sequence[Operation], otherwise: Sequence[Operation]) -> TxnResult:
    """TxnResponse, which must answer each operation in `then`, or in `otherwise` if the comparisons failed."""
    read = Fields(data)
    succeeded, revision = bool(read.number(2)), _revision(read)
    responses = [Fields(response) for response in read.strings(3)]
    kinds = [next((kind for field, kind in _ANSWERS.items() if field in response), None) for response in responses]
    if kinds != [type(operation) for operation in (then if succeeded else otherwise)]:
        raise DecodingError("the answers do not match the operations of the transaction")
    ranges = (decode_range(response.string(1)) for response in responses if 1 in response)
    return TxnResult(succeeded, revision, tuple(answer._replace(revision=revision) for answer in ranges))


_ANSWERS: dict[int, type[Operation]] = {1: Range, 2: Put, 3: Delete}
"""Maps the field of each answer to its operation."""


def decode_lease(data: bytes) -> tuple[int, int]:
    """LeaseGrantResponse or LeaseKeepAliveResponse: the lease's id and its seconds (0: it is gone)."""
    read = Fields(data)
    return read.number(2), read.number(3)


def decode_token(data: bytes) -> str:
    """AuthenticateResponse."""
    return Fields(data).text(2)


class StatusResponse(NamedTuple):
    """The status of a member; `leader` is 0 if it knows none."""

    version: str
    leader: int


def decode_status(data: bytes) -> StatusResponse:
    """StatusResponse."""
    read = Fields(data)
    return StatusResponse(read.text(2), read.number(4))


class WatchResponse(NamedTuple):
    """One message of a watch. `compacted` is 0 unless the watch ended because its revision is no longer kept."""

    revision: int
    created: bool
    cancelled: bool
    compacted: int
    reason: str
    events: tuple[WatchEvent, ...]


def decode_watch(data: bytes) -> WatchResponse:
    """WatchResponse."""
    read = Fields(data)
    return WatchResponse(
        revision=_revision(read),
        created=bool(read.number(3)),
        cancelled=bool(read.number(4)),
        compacted=read.number(5),
        reason=read.text(6),
        events=tuple(_event(Fields(event)) for event in read.strings(11)),
    )


def _event(read: Fields) -> WatchEvent:
    return WatchEvent("delete" if read.number(1) else "put", _key_value(read.string(2)))


def _key_value(data: bytes) -> KeyValue:
    read = Fields(data)
    return KeyValue(
        key=read.string(1),
        value=read.string(5),
        create_revision=read.number(2),
        mod_revision=read.number(3),
        version=read.number(4),
        lease=read.number(6),
    )


def _revision(read: Fields) -> int:
    return Fields(read.string(1)).number(3)


class RequestOutcome(Enum):
    """What an error means for the request.

    etcd's status codes are coarse, so this mostly depends on the text, as in etcd's own clients.
    """

    RETRY = auto()
    """Another member might succeed, or this one later. The request might have been carried out."""
    LOGIN = auto()
    """The member wants a new token."""
    DONE = auto()
    """An earlier send, whose answer was lost, was carried out."""
    LEASE_GONE = auto()
    """The request's lease is gone."""
    NO_USERS = auto()
    """This cluster has no users, so a login is impossible."""
    REFUSED = auto()
    """Retrying cannot help."""


class Diagnosis(NamedTuple):
    """The outcome of a request, the problem, and the remedy."""

    outcome: RequestOutcome
    problem: str
    remedy: str = ""


_LOOK_AT_ETCD_LOG = "check the logs of etcd"
_GRANT = "grant the user read and write access to the prefix"
_GIVE_USER = "set a user and a password"

_BY_TEXT: tuple[tuple[str, RequestOutcome, str], ...] = (
    ("no leader", RequestOutcome.RETRY, "check that most of its members are running"),
    ("too many requests", RequestOutcome.RETRY, _LOOK_AT_ETCD_LOG),
    ("rpc not supported for learner", RequestOutcome.RETRY, "use only voting members as endpoints"),
    ("invalid auth token", RequestOutcome.LOGIN, "check user and password"),
    ("revision of auth store is old", RequestOutcome.LOGIN, "check user and password"),
    ("authentication failed, invalid user ID or password", RequestOutcome.REFUSED, "check user and password"),
    ("user name is empty", RequestOutcome.REFUSED, _GIVE_USER),
    ("authentication is not enabled", RequestOutcome.NO_USERS, "remove user and password"),
    ("permission denied", RequestOutcome.REFUSED, _GRANT),
    ("requested lease not found", RequestOutcome.LEASE_GONE, "grant a new one"),
    ("lease already exists", RequestOutcome.DONE, ""),  # we choose the ids
    ("database space exceeded", RequestOutcome.REFUSED, "compact and defragment it, then disarm its alarm"),
    ("request is too large", RequestOutcome.REFUSED, "raise its --max-request-bytes"),
)

_UNIMPLEMENTED = 12
_BROKEN_CODES = frozenset({1, 2, 4, 10, 13, 14})
"""Cancelled, unknown, deadline exceeded, aborted, internal, unavailable: something broke on the way."""


def classify(code: int, text: str, named: bool) -> Diagnosis:
    """Interpret gRPC's status `code` with `text`; `named`: whether the user set a user name."""
    for part, outcome, remedy in _BY_TEXT:
        if part in text:
            return Diagnosis(outcome, _in_quotes(text), _GIVE_USER if remedy is _GRANT and not named else remedy)
    if code == _UNIMPLEMENTED:
        return Diagnosis(RequestOutcome.REFUSED, "does not speak the v3 API of etcd", "check the endpoint")
    if code in _BROKEN_CODES:
        return Diagnosis(RequestOutcome.RETRY, _in_quotes(text), _LOOK_AT_ETCD_LOG)
    return Diagnosis(RequestOutcome.REFUSED, _in_quotes(text), _LOOK_AT_ETCD_LOG)


def _in_quotes(text: str) -> str:
    return f"answered {text!r}"
