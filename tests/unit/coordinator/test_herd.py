"""A busy coordinator: no node dials it a second time or leaves it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rallypoint.base.endpoint import _TCP_THIN_LINEAR_TIMEOUTS
from rallypoint.control.client import dialing
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, frame
from rallypoint.control.protocol.handshake import ClientHandshake, Hello, Welcome
from rallypoint.control.protocol.messages import LinkDown, LinkOpened, Notification
from tests.unit.coordinator.sockets import TIMEOUT, SocketNode, connected, linked, serving

JOB = Settings("job", 2, 2, join_timeout=TIMEOUT)
LEASE = 0.4


class Busy:
    """A node that dials a port where the test accepts and answers connections."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.told: list[Notification] = []

    def accept(self) -> socket.socket:
        made, _ = self.listener.accept()
        made.settimeout(TIMEOUT)
        return made


@contextmanager
def dialed() -> Iterator[Busy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT)
        busy = Busy(listener)
        with linked(listener.getsockname()[1], JOB, busy.told.append, number=7):
            yield busy


def welcome(node: socket.socket) -> SocketNode:
    session = SocketNode(node)
    codec.decode(session.next(), Hello)
    node.sendall(MAGIC + frame(codec.encode(Welcome(LEASE, "server-0"))))
    return session


def test_a_node_that_greeted_waits_for_a_busy_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "_SILENT_AFTER", 0.05)
    with dialed() as busy, busy.accept() as node:
        with busy.accept() as probe:  # it asks once whether this is a torch store
            assert probe.recv(1)
        session = welcome(node)
        session.next()  # a heartbeat: the session that was slow to open is used
        assert [type(notice) for notice in busy.told] == [LinkOpened]


def test_a_session_outlasts_a_silent_peer_that_receives() -> None:
    with dialed() as busy, busy.accept() as node:
        welcome(node)
        with busy.accept():  # only now it dials again
            (down,) = [notice for notice in busy.told if isinstance(notice, LinkDown)]
            (seconds,) = re.findall(r"the server was silent for ([0-9.]+) s", down.detail)
            assert float(seconds) >= round(3 * LEASE, 1)


def test_accepted_connections_have_the_options_of_the_listener() -> None:
    hello = ClientHandshake("job", None, b"n", JOB).hello("h", NodeId("h", 1, 7))
    with serving(Dispatcher(JOB)) as server, connected(server.port, hello):
        (accepted,) = server.connections
        options = (socket.TCP_NODELAY, _TCP_THIN_LINEAR_TIMEOUTS)
        assert [accepted._transport.socket.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [1, 1]
