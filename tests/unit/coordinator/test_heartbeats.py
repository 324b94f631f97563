"""Heartbeats take a short path through the server, with the same meaning as on the long one."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from queue import SimpleQueue

import pytest

from rallypoint.base.clock import BOOT_CLOCK, Deadline
from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client.dialing import DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator import connection
from rallypoint.control.coordinator import session as server_session
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.membership.state import NodeId, NodeInfo, Settings, State
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import frame
from rallypoint.control.protocol.handshake import ClientHandshake
from rallypoint.control.protocol.messages import (
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    Notification,
    Placed,
    Progress,
    ProgressRequest,
)
from tests.unit.coordinator.sockets import SocketNode, serving
from tests.waiting import until

TIMEOUT = 120.0
SETTINGS = Settings("job", 2, 2, lease=3600.0)
JOIN = JoinRequest(NodeInfo("default", 1, "", 7000), 600.0)
HEARTBEAT, INQUIRE = frame(codec.encode(Heartbeat())), frame(codec.encode(ProgressRequest()))


HELLO = ClientHandshake(SETTINGS.run_id, None, b"n", SETTINGS).hello("10.0.0.1", NodeId("10.0.0.1", 1, 0))


class Node(SocketNode):
    """A session over a plain socket."""

    def __init__(self, made: socket.socket) -> None:
        super().__init__(made)
        self.welcome = self.greets(HELLO)

    def sends(self, data: bytes) -> None:
        self.made.sendall(data)

    def hears(self) -> type:
        return type(codec.decode_notification(self.next()))

    def answers_until_progress(self) -> list[int]:
        """How many heartbeats each answer has counted that came before the answer to an inquiry, which is said now."""
        self.sends(INQUIRE)
        counts = []
        while isinstance(answer := codec.decode_notification(self.next()), Heartbeat):
            counts.append(answer.number)
        assert isinstance(answer, Progress)
        return counts


@contextmanager
def session(dispatcher: Dispatcher) -> Iterator[Node]:
    with (
        serving(dispatcher) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as made,
    ):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Node(made)


def linked(server: ControlServer, settings: Settings) -> closing[TcpLink]:
    place = FixedEndpoint(DialTarget(Endpoint("127.0.0.1", server.port)))
    told = SimpleQueue[Notification]()
    return closing(TcpLink(place, settings, NodeId("", 1, 0), told.put, Deadline.after(TIMEOUT)))


def test_who_has_joined_again_before_its_connection_breaks_is_lost_and_has_not_left() -> None:
    dispatcher = Dispatcher(SETTINGS._replace(min_nodes=1, max_nodes=1))
    with session(dispatcher) as node:
        for request in (JOIN, LeaveRequest(), JOIN):
            node.says(request)
        while not (dispatcher.state.complete and dispatcher.state.round == 1):
            node.hears()
        node.made.close()
        until(lambda: sum(dispatcher.state.ledger) >= 2)
    assert (dispatcher.state.ledger.departed, dispatcher.state.ledger.lost) == (1, 1)


def test_heartbeats_count_however_the_network_cuts_them() -> None:
    with session(Dispatcher(SETTINGS)) as node:
        node.sends(INQUIRE + HEARTBEAT)
        node.sends(HEARTBEAT + HEARTBEAT[:3])
        assert {node.hears() for _ in range(3)} == {Progress, Heartbeat}
        node.sends(HEARTBEAT[3:])
        assert node.hears() is Heartbeat
        node.sends(INQUIRE[:2])
        node.sends(INQUIRE[2:])
        assert node.hears() is Progress


def test_of_a_large_job_every_second_heartbeat_is_answered_the_first_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MANY_SESSIONS", 0)
    with session(Dispatcher(SETTINGS)) as node:
        counts = []
        for _ in range(6):
            node.sends(HEARTBEAT)
            counts.append(node.answers_until_progress())
    assert counts == [[1], [], [2], [], [2], []]


class _SlowJournal:
    """A journal that has stored nothing yet."""

    def append(self, number: int, state: State, awaited: int) -> None:
        pass


def test_a_heartbeat_is_not_counted_while_something_is_still_to_be_told() -> None:
    """The end of the node's round may be among it: the answer would show that the round still stands."""
    dispatcher = Dispatcher(SETTINGS._replace(min_nodes=1, max_nodes=1), journal=_SlowJournal())
    with session(dispatcher) as node:
        node.says(JOIN)
        node.sends(HEARTBEAT)
        assert codec.decode_notification(node.next()) == Heartbeat(0)
        dispatcher.journal_written(1_000)
        while node.hears() is not Placed:
            pass
        node.sends(HEARTBEAT)
        assert codec.decode_notification(node.next()) == Heartbeat(2)


def test_a_link_knows_when_the_heartbeat_was_sent_that_was_answered() -> None:
    settings = SETTINGS._replace(lease=0.3)
    began = BOOT_CLOCK.monotonic()
    with serving(Dispatcher(settings)) as server, linked(server, settings) as link:
        assert link.confirmed_at == -math.inf
        until(lambda: link.confirmed_at > -math.inf)
        assert began < link.confirmed_at < BOOT_CLOCK.monotonic()


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
    with serving(dispatcher) as server, linked(server, SETTINGS):
        assert all(came.acquire(timeout=TIMEOUT) for _ in range(3))  # by its lease there would be none for 20 minutes
