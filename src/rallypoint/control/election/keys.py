"""A job's keys in etcd, and their values. Pure.

    PREFIX/JOB/candidates/SEAT    one for each of a few agents, while its lease lives; the oldest is the coordinator's
    PREFIX/JOB/leader             where the coordinator listens; lives with the coordinator's lease
    PREFIX/JOB/state              what the coordinator knows; outlives it
    PREFIX/JOB/state/NUMBER/PART  the same, where it is too large for one request

Everything but the state is JSON, so that people can read it with `etcdctl`.

The state is compressed to a third or a half, because etcd stores every written state until a compaction. Parts permit
jobs of any size: etcd accepts 1.5 MiB per request, and names can be random, so 65,536 nodes need 2 to 5 MB. Parts are
written first, each with the fence. The transaction that then sets the state's own key, with the number of parts, also
deletes the previous state's parts.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Annotated, NamedTuple, TypedDict
from urllib.parse import quote

import msgspec

from rallypoint.base.errors import UserError
from rallypoint.base.log import printable
from rallypoint.control.etcd.api import KeyValue
from rallypoint.control.membership.state import NodeId
from rallypoint.control.protocol.codec import MAX_STATE
from rallypoint.control.protocol.errors import RendezvousStateError

_STATE = b"rallypoint-etcd-2 "
_NAME = 32
"""Maximum characters in a coordinator's name."""
_NUMBERS = range(1 << 63)
"""The valid numbers of a stored state."""
PART_SIZE, _PARTS = 1 << 20, range(65)
"""Maximum bytes of a value, and the possible numbers of parts."""

_Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Lease = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _CandidateValue(TypedDict):
    node: _Number
    pid: _Small
    host: str


class _LeaderValue(TypedDict):
    addresses: list[str]
    port: _Port
    lease: _Lease
    secret: str


_node = msgspec.json.Decoder(_CandidateValue)
_leader = msgspec.json.Decoder(_LeaderValue)


SEATS = 8
"""Number of candidates per job. Each costs etcd one request per second; other agents cost next to nothing."""


class ElectionKeys(NamedTuple):
    """The keys of one job."""

    root: str
    seats: int = SEATS
    part_size: int = PART_SIZE

    @classmethod
    def for_job(cls, prefix: str, run_id: str) -> ElectionKeys:
        """The keys of the job `run_id` under `prefix`, with any slashes. Raises UserError if `prefix` is not text."""
        try:
            prefix.encode()
        except UnicodeEncodeError:
            raise UserError(f"rendezvous option prefix={prefix!r} is not UTF-8 text; choose another") from None
        job = quote(run_id, safe="", errors="surrogatepass")  # as with every backend, ids may be any bytes
        return cls(f"{'/' + prefix.strip('/') if prefix.strip('/') else ''}/{job}/")

    @property
    def candidates(self) -> bytes:
        """The prefix of the keys of all candidates."""
        return f"{self.root}candidates/".encode()

    def seat(self, number: int) -> bytes:
        """The key of this seat's candidate."""
        return self.candidates + f"{number}".encode()

    def free_seats(self, taken: Iterable[KeyValue]) -> list[bytes]:
        """The keys that a candidate may still create."""
        there = {kv.key for kv in taken}
        return [key for key in map(self.seat, range(self.seats)) if key not in there]

    @property
    def leader(self) -> bytes:
        """The key with the coordinator's address."""
        return f"{self.root}leader".encode()

    @property
    def state(self) -> bytes:
        """The key of the coordinator's state, and the prefix of its parts' keys."""
        return f"{self.root}state".encode()

    def parts(self, number: int) -> bytes:
        """Prefix of the parts' keys for the state with that number."""
        return self.state + f"/{number:016x}/".encode()

    def part(self, number: int, index: int) -> bytes:
        """The key of one part."""
        return self.parts(number) + f"{index:02}".encode()


class LeaderRecord(NamedTuple):
    """The coordinator's place: its machine's addresses, the likeliest first, its lease, and the job's secret."""

    addresses: tuple[str, ...]
    port: int
    lease: int
    secret: str


class StoredSnapshot(NamedTuple):
    """A coordinator's data for its successor: its name, the number of writes, and the packed state or the number of its
    `parts`.
    """

    incarnation: str
    number: int
    parts: int
    packed: bytes


def state_of(keys: ElectionKeys, snapshot: StoredSnapshot, stored: Iterable[KeyValue]) -> bytes:
    """Assemble the encoded state from the values of its key and its parts' keys.

    Raises:
        RendezvousStateError: they contain no state of a valid size.
    """
    values = {kv.key: kv.value for kv in stored}
    part_keys = [keys.part(snapshot.number, index) for index in range(snapshot.parts)]
    packed = b"".join(values.get(key, b"") for key in part_keys) if part_keys else snapshot.packed
    unpacker = zlib.decompressobj()
    try:
        state = unpacker.decompress(packed, MAX_STATE)
    except zlib.error:
        state = b""
    if not unpacker.eof:
        raise RendezvousStateError("it is damaged or too large")
    return state


def encode_node(node: NodeId) -> bytes:
    """The value of a candidate's key: its identity without the address."""
    return json.dumps({"node": node.number, "pid": node.pid, "host": node.host}).encode()


def decode_node(value: bytes) -> NodeId | None:
    """The agent in a candidate's key, without its address; None if the value is not ours."""
    try:
        fields = _node.decode(value)
    except (ValueError, RecursionError):
        return None
    return NodeId("", fields["pid"], fields["node"], printable(fields["host"]))


def encode_leader(record: LeaderRecord) -> bytes:
    """The value of the coordinator's key."""
    return json.dumps(record._asdict()).encode()


def decode_leader(value: bytes) -> LeaderRecord | None:
    """The coordinator's place; None if the value is not ours."""
    try:
        fields = _leader.decode(value)
    except (ValueError, RecursionError):
        return None
    record = LeaderRecord(tuple(map(printable, fields["addresses"])), fields["port"], fields["lease"], fields["secret"])
    return record if record.addresses else None


def encode_snapshot(keys: ElectionKeys, incarnation: str, number: int, state: bytes) -> tuple[bytes, list[bytes]]:
    """The value of the state's key for this encoded state, and its parts' values, if any."""
    packed = zlib.compress(state, level=1)  # a higher level takes twice as long and saves a tenth
    parts: list[bytes] = []
    if len(packed) > keys.part_size:
        parts = [packed[at : at + keys.part_size] for at in range(0, len(packed), keys.part_size)]
        packed = b""
    return _STATE + f"{incarnation} {number} {len(parts)} ".encode() + packed, parts


def decode_snapshot(key: bytes, value: bytes) -> StoredSnapshot:
    """Decode a coordinator's stored data.

    Raises:
        RendezvousStateError: the writer was not a coordinator of this version.
    """
    try:
        header, incarnation, number, parts, packed = value.split(b" ", 4)
        snapshot = StoredSnapshot(incarnation.decode("ascii"), int(number), int(parts), packed)
    except ValueError:
        header, snapshot = b"", StoredSnapshot("", 0, 0, b"")
    valid = 0 < len(snapshot.incarnation) <= _NAME and snapshot.number in _NUMBERS and snapshot.parts in _PARTS
    if header + b" " != _STATE or not valid:
        raise RendezvousStateError(
            f"the key {key.decode(errors='replace')!r} in etcd contains {value[:24]!r}, which this version of "
            "Rallypoint did not write; use the same version on all nodes, or another --rdzv-id or prefix (--rdzv-conf "
            "prefix=...)"
        )
    return snapshot
