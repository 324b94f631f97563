"""Targets of etcd: answers of both its APIs, and what others have put under the keys of a job."""

from __future__ import annotations

import http.client
import io
import json
from collections.abc import Callable, Sequence
from contextlib import suppress

from rallypoint.base.endpoint import Endpoint
from rallypoint.election.keys import (
    LeaderRecord,
    Snapshot,
    decode_leader,
    decode_node,
    decode_snapshot,
    encode_leader,
    encode_node,
    encode_snapshot,
)
from rallypoint.etcd import messages, protobuf
from rallypoint.etcd.api import Delete, EtcdRefused, EtcdUnreachable, Put, Range
from rallypoint.etcd.error_classes import classify
from rallypoint.etcd.protobuf import DecodingError
from rallypoint.membership.state import NodeId
from rallypoint.protocol.errors import RendezvousStateError
from rallypoint.rendezvous.backends.etcd_v2_wire import body_of, error_for, node_of, read
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
    number, string, message = protobuf.number, protobuf.string, protobuf.message
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


_AT = Endpoint("10.0.0.1", 2379)


class _Said:
    """The socket of an HTTP connection on which all has been said."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        """As of a socket."""
        return io.BytesIO(self._data)


def answers_v2(data: bytes) -> None:
    """An answer over HTTP, of etcd's v2 API or of anybody: nodes, or one of two errors."""
    response = http.client.HTTPResponse(_Said(data), method="GET")  # type: ignore[arg-type]
    fault: Exception | None = None
    try:
        response.begin()
        answer = read(_AT, response, body_of(_AT, response))
    except (EtcdUnreachable, EtcdRefused) as error:
        fault = error
    except (OSError, http.client.HTTPException) as error:
        fault = error_for(_AT, error, False, sent=True)
    if fault is None and answer.code:
        fault = answer.refusal("read '/x'")
    if fault is None:
        assert node_of(answer.body["node"]).modified >= 0
    else:
        assert isinstance(fault, (EtcdUnreachable, EtcdRefused))
        assert str(fault).isprintable(), str(fault)


def _answer_v2_seeds() -> Sequence[bytes]:
    node = {"key": "/a", "value": "dg==", "modifiedIndex": 7, "createdIndex": 7}
    bodies = [
        {"action": "get", "node": node},
        {
            "action": "get",
            "node": {"key": "/", "dir": True, "nodes": [node, {"key": "/d", "dir": True, "nodes": [node]}]},
        },
        {"errorCode": 100, "message": "Key not found", "cause": "/a", "index": 9},
        {"errorCode": 300, "message": "Raft Internal Error", "cause": "", "index": 9},
        {"message": "Insufficient credentials"},
    ]
    made = []
    for status, body in zip((200, 200, 404, 500, 401), bodies, strict=True):
        text = json.dumps(body).encode()
        made.append(b"HTTP/1.1 %d X\r\nX-Etcd-Index: 9\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text))
    chunked = json.dumps(bodies[0]).encode()
    made.append(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(chunked), chunked))
    return [*made, b"SSH-2.0-OpenSSH_9.6\r\n"]


def values(data: bytes) -> None:
    """What others have put under a job's keys: a name, a place, a state; or nothing of ours."""
    node, record = decode_node(data), decode_leader(data)
    assert node is None or (decode_node(encode_node(node)) == node and str(node).isprintable())
    assert record is None or (
        decode_leader(encode_leader(record)) == record and all(each.isprintable() for each in record.addresses)
    )
    with suppress(RendezvousStateError):
        snapshot = decode_snapshot(b"key", data)
        assert (
            decode_snapshot(b"key", encode_snapshot(snapshot._replace(number=max(0, snapshot.number - 1)))).state
            == snapshot.state
        )


def _value_seeds() -> Sequence[bytes]:
    node, record = NodeId("10.0.0.1", 7, 0, "host"), LeaderRecord(("10.0.0.1", "::1"), 29400, 77, "secret")
    return [
        encode_node(node),
        encode_leader(record),
        encode_snapshot(Snapshot("0123456789abcdef", 3, b"rallypoint-state")),
    ]


TARGETS = {
    "etcd-answers": Target(answers, _answer_seeds, ("etcd/protobuf.py", "etcd/messages.py", "etcd/error_classes.py")),
    "etcd-v2-answers": Target(
        answers_v2,
        _answer_v2_seeds,
        (
            "rendezvous/backends/etcd_v2_wire.py",
            "rendezvous/backends/etcd_v2_http.py",
        ),
    ),
    "etcd-values": Target(values, _value_seeds, ("election/keys.py",)),
}
