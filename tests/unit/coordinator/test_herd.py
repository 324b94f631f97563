"""A coordinator that is busy with many nodes but not gone: no node dials it a second time, or leaves it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import _TCP_THIN_LINEAR_TIMEOUTS, Endpoint
from rallypoint.control.client import dialing
from rallypoint.control.client.dialing import DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator import connection
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, frame
from rallypoint.control.protocol.handshake import ClientHandshake, Hello, Welcome
from rallypoint.control.protocol.messages import LinkDown, LinkOpened, Notification
from tests.unit.coordinator.sockets import SocketNode, serving

TIMEOUT = 120.0
JOB = Settings("job", 2, 2, join_timeout=TIMEOUT)
LEASE = 0.4


class Coordinator:
    """A port where connections are accepted and answered when the test wants it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(TIMEOUT)
        self.told: list[Notification] = []

    @contextmanager
    def linked(self) -> Iterator[None]:
        """A node that dials it."""
        place = DialTarget(Endpoint(*self.listener.getsockname()))
        deadline = Deadline.after(TIMEOUT)
        link = TcpLink(FixedEndpoint(place), JOB, NodeId("", 1, 7), self.told.append, deadline)
        with self.listener, closing(link):
            yield

    def accept(self) -> socket.socket:
        """The next connection."""
        made, _ = self.listener.accept()
        made.settimeout(TIMEOUT)
        return made


def welcome(node: socket.socket) -> SocketNode:
    """Open a session with a node that has greeted."""
    session = SocketNode(node)
    codec.decode(session.next(), Hello)
    node.sendall(MAGIC + frame(codec.encode(Welcome(LEASE, "server-0"))))
    return session


def test_who_has_greeted_waits_for_a_coordinator_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "_SILENT_AFTER", 0.05)
    busy = Coordinator()
    with busy.linked(), busy.accept() as node:
        with busy.accept() as probe:  # it asks once whether this is a torch store
            assert probe.recv(1)
        session = welcome(node)
        session.next()  # a heartbeat: the session that was slow to open is used
        assert [type(each) for each in busy.told] == [LinkOpened]


def test_a_session_is_not_left_while_the_other_side_receives_what_is_said() -> None:
    busy = Coordinator()
    with busy.linked(), busy.accept() as node:
        welcome(node)
        with busy.accept():  # only now it dials again
            (down,) = [each for each in busy.told if isinstance(each, LinkDown)]
            (seconds,) = re.findall(r"the server was silent for ([0-9.]+) s", down.detail)
            assert float(seconds) >= round(3 * LEASE, 1)


def test_a_connection_that_says_nothing_has_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT", 0.05)
    with serving(Dispatcher(JOB)) as server:
        for _ in range(2):  # the timer is one for all
            with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as made:
                assert made.recv(1) == b""


def test_accepted_connections_have_the_options_of_the_listener() -> None:
    with serving(Dispatcher(JOB)) as server, socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as made:
        SocketNode(made).greets(ClientHandshake("job", None, b"n", JOB).hello("h", NodeId("h", 1, 7)))
        (accepted,) = server.connections
        own = accepted._transport.socket
        options = (socket.TCP_NODELAY, _TCP_THIN_LINEAR_TIMEOUTS)
        assert [own.getsockopt(socket.IPPROTO_TCP, each) for each in options] == [1, 1]
