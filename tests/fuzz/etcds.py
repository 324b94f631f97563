"""Targets for etcd: its answers, and foreign values under the keys of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from rallypoint.control.election.keys import (
    ElectionKeys,
    LeaderRecord,
    decode_leader,
    decode_node,
    decode_snapshot,
    encode_leader,
    encode_node,
    encode_snapshot,
    state_of,
)
from rallypoint.control.etcd import messages
from rallypoint.control.etcd.api import Delete, Put, Range
from rallypoint.control.etcd.messages import DecodingError, classify
from rallypoint.control.membership.state import NodeId
from rallypoint.control.protocol.errors import RendezvousStateError
from tests.fuzz.target import Target


def _decode_txn(data: bytes) -> object:
    return messages.decode_txn(data, [Range(b"k"), Delete(b"k"), Put(b"k", b"v")], [Range(b"k")])


_DECODERS: tuple[Callable[[bytes], object], ...] = (
    *(messages.decode_range, _decode_txn, messages.decode_lease),
    *(messages.decode_token, messages.decode_status, messages.decode_watch),
)


def answers(data: bytes) -> None:
    """An answer of etcd's v3 API, and what an error in its place means."""
    for decode in _DECODERS:
        with suppress(DecodingError):
            decode(data)
    classify(data[0] if data else 0, data[1:].decode(errors="replace"), named=len(data) % 2 == 0)


def _answer_seeds() -> Sequence[bytes]:
    number, string, message = messages.number, messages.string, messages.message
    pair = string(1, b"k") + number(2, 3) + number(3, 4) + number(4, 1) + string(5, b"v") + number(6, 7)
    head = message(1, number(1, 5) + number(3, 9))
    ranged = head + message(2, pair) + number(4, 1)
    return [
        ranged,
        head
        + number(2, 1)
        + message(3, message(1, ranged))
        + message(3, message(2, head))
        + message(3, message(3, head)),
        head + number(2, 2**63) + number(3, 10),
        head + string(2, b"token"),
        head
        + number(2, 1)
        + number(3, 1)
        + number(5, 8)
        + string(6, b"why")
        + message(11, number(1, 1) + message(2, pair)),
        b"\x0eetcdserver: no leader",
    ]


_KEYS = ElectionKeys.for_job("/x", "job")


def values(data: bytes) -> None:
    """What others have put under a job's keys: a name, a place, a state; or nothing of ours."""
    node, record = decode_node(data), decode_leader(data)
    assert node is None or (decode_node(encode_node(node)) == node and str(node).isprintable())
    assert record is None or (
        decode_leader(encode_leader(record)) == record and all(each.isprintable() for each in record.addresses)
    )
    with suppress(RendezvousStateError):
        snapshot = decode_snapshot(b"key", data)
        state = state_of(_KEYS, snapshot, ())
        again = decode_snapshot(b"key", encode_snapshot(_KEYS, snapshot.incarnation, snapshot.number, state)[0])
        assert again[:2] == snapshot[:2]


def _value_seeds() -> Sequence[bytes]:
    node, record = NodeId("10.0.0.1", 7, 0, "host"), LeaderRecord(("10.0.0.1", "::1"), 29400, 77, "secret")
    return [
        encode_node(node),
        encode_leader(record),
        encode_snapshot(_KEYS, "0123456789abcdef", 3, b"rallypoint-state")[0],
    ]


TARGETS = {
    "etcd-answers": Target(answers, _answer_seeds, ("control/etcd/messages.py",)),
    "etcd-values": Target(values, _value_seeds, ("control/election/keys.py",)),
}
