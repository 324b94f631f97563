"""Heartbeats take a short way through the server, and mean there what they mean on the long one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, listening_socket
from rallypoint.control.client.dialing import DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator import connection
from rallypoint.control.coordinator import session as server_session
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.membership.state import NodeInfo, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.frames import MAGIC, FrameReader, frame
from rallypoint.control.protocol.handshake import Challenge, ClientHandshake, Welcome
from rallypoint.control.protocol.messages import Heartbeat, JoinRequest, LeaveRequest, Progress, ProgressRequest
from rallypoint.control.protocol.signing import transcript_of

TIMEOUT = 120.0
SETTINGS = Settings("job", 2, 2, lease=3600.0)
JOIN = JoinRequest(NodeInfo("default", 1, "", 7000), 600.0)
HEARTBEAT, INQUIRE = frame(codec.encode(Heartbeat())), frame(codec.encode(ProgressRequest()))


class Node:
    """A session over a plain socket."""

    def __init__(self, made: socket.socket, key: bytes | None = None) -> None:
        self.made = made
        self._frames = FrameReader()
        self._unread: list[bytes] = []
        handshake = ClientHandshake(SETTINGS.run_id, key, b"n", SETTINGS)
        hello = codec.encode(handshake.hello("10.0.0.1", 1, 0))
        made.sendall(MAGIC + frame(hello))
        challenge = self._next()
        assert isinstance(codec.decode_answer(challenge), Challenge)
        made.sendall(frame(codec.encode(handshake.prove(transcript_of(hello, challenge)))))
        answer = self._next()
        if handshake.signers is not None:
            answer = handshake.signers.incoming.verify(answer)
        welcome = codec.decode_answer(answer)
        assert isinstance(welcome, Welcome)
        self.welcome = welcome

    def says(self, data: bytes) -> None:
        self.made.sendall(data)

    def hears(self) -> type:
        return type(codec.decode_notification(self._next()))

    def heard_until_progress(self) -> int:
        """How many heartbeats came before the answer to an inquiry, which is said now."""
        self.says(INQUIRE)
        count = 0
        while self.hears() is not Progress:
            count += 1
        return count

    def _next(self) -> bytes:
        while not self._unread:
            data = self.made.recv(65536)
            assert data, "it closed the connection"
            self._unread += self._frames.feed(data)
        return self._unread.pop(0)


@contextmanager
def session(dispatcher: Dispatcher, key: bytes | None = None) -> Iterator[Node]:
    keys = None if key is None else lambda _job: (key,)
    server = ControlServer(dispatcher, listening_socket("127.0.0.1", 0), keys=keys)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as made:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Node(made, key)
    finally:
        server.close()
        assert not server.connections


def test_who_has_joined_again_before_its_connection_breaks_is_lost_and_has_not_left() -> None:
    dispatcher = Dispatcher(SETTINGS._replace(min_nodes=1, max_nodes=1))
    with session(dispatcher) as node:
        for request in (JOIN, LeaveRequest(), JOIN):
            node.says(frame(codec.encode(request)))
        while not (dispatcher.state.complete and dispatcher.state.round == 1):
            node.hears()
        node.made.close()
        until = time.monotonic() + TIMEOUT
        while sum(dispatcher.state.ledger) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert (dispatcher.state.ledger.departed, dispatcher.state.ledger.lost) == (1, 1)


def test_heartbeats_count_however_the_network_cuts_them() -> None:
    with session(Dispatcher(SETTINGS)) as node:
        node.says(INQUIRE + HEARTBEAT)
        node.says(HEARTBEAT + HEARTBEAT[:3])
        assert {node.hears() for _ in range(3)} == {Progress, Heartbeat}
        node.says(HEARTBEAT[3:])
        assert node.hears() is Heartbeat
        node.says(INQUIRE[:2])
        node.says(INQUIRE[2:])
        assert node.hears() is Progress


def test_of_a_large_job_every_second_heartbeat_is_answered_the_first_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MANY_SESSIONS", 0)
    with session(Dispatcher(SETTINGS)) as node:
        counts = []
        for _ in range(6):
            node.says(HEARTBEAT)
            counts.append(node.heard_until_progress())
    assert counts == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(("most", "interval"), [(0, SETTINGS.lease / 2.1), (256, 0.0)])
def test_a_server_of_many_wants_fewer_heartbeats(monkeypatch: pytest.MonkeyPatch, most: int, interval: float) -> None:
    monkeypatch.setattr(connection, "_MANY_SESSIONS", most)
    with session(Dispatcher(SETTINGS)) as node:
        assert node.welcome.heartbeat_interval == interval


def test_a_node_sends_heartbeats_as_often_as_the_server_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MANY_SESSIONS", 0)
    monkeypatch.setattr(server_session, "_MANY_HEARTBEATS_PER_LEASE", SETTINGS.lease / 0.05)
    dispatcher, came = Dispatcher(SETTINGS), threading.Semaphore(0)
    heartbeat = dispatcher.heartbeat

    def counted(number: int) -> bool:
        came.release()
        return heartbeat(number)

    monkeypatch.setattr(dispatcher, "heartbeat", counted)
    server = ControlServer(dispatcher, listening_socket("127.0.0.1", 0))
    place = FixedEndpoint(DialTarget(Endpoint("127.0.0.1", server.port)))
    link = TcpLink(place, SETTINGS, 0, lambda _notification: None, Deadline.after(TIMEOUT))
    try:
        assert all(came.acquire(timeout=TIMEOUT) for _ in range(3))  # by its lease there would be none for 20 minutes
    finally:
        link.close()
        server.close()
