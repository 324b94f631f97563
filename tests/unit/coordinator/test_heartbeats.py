"""Heartbeats take a short path through the server and keep their meaning."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from rallypoint.base.clock import BOOT_CLOCK
from rallypoint.control.coordinator import connection
from rallypoint.control.coordinator import session as server_session
from rallypoint.control.coordinator.dispatcher import Dispatcher
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
from tests.unit.coordinator.sockets import TIMEOUT, SocketNode, connected, linked, serving
from tests.waiting import until

SETTINGS = Settings("job", 2, 2, lease=3600.0)
JOIN = JoinRequest(NodeInfo("default", 1, "", 7000), 600.0)
HEARTBEAT, INQUIRE = frame(codec.encode(Heartbeat())), frame(codec.encode(ProgressRequest()))


HELLO = ClientHandshake(SETTINGS.run_id, None, b"n", SETTINGS).hello("10.0.0.1", NodeId("10.0.0.1", 1, 0))


@contextmanager
def session(dispatcher: Dispatcher) -> Iterator[SocketNode]:
    with serving(dispatcher) as server, connected(server.port, HELLO) as node:
        yield node


def kind_of_next(node: SocketNode) -> type:
    return type(codec.decode_notification(node.next()))


def answers_until_progress(node: SocketNode) -> list[int]:
    """The counts in the answers to heartbeats, up to the answer to a progress request sent now."""
    node.made.sendall(INQUIRE)
    counts = []
    while isinstance(answer := codec.decode_notification(node.next()), Heartbeat):
        counts.append(answer.number)
    assert isinstance(answer, Progress)
    return counts


def test_a_node_that_left_and_joined_again_is_lost_with_its_connection() -> None:
    dispatcher = Dispatcher(SETTINGS._replace(min_nodes=1, max_nodes=1))
    with session(dispatcher) as node:
        for request in (JOIN, LeaveRequest(), JOIN):
            node.says(request)
        while not (dispatcher.state.complete and dispatcher.state.round == 1):
            kind_of_next(node)
        node.made.close()
        until(lambda: sum(dispatcher.state.ledger) >= 2)
    assert (dispatcher.state.ledger.departed, dispatcher.state.ledger.lost) == (1, 1)


def test_heartbeats_may_arrive_in_pieces() -> None:
    with session(Dispatcher(SETTINGS)) as node:
        node.made.sendall(INQUIRE + HEARTBEAT)
        node.made.sendall(HEARTBEAT + HEARTBEAT[:3])
        assert {kind_of_next(node) for _ in range(3)} == {Progress, Heartbeat}
        node.made.sendall(HEARTBEAT[3:])
        assert kind_of_next(node) is Heartbeat
        node.made.sendall(INQUIRE[:2])
        node.made.sendall(INQUIRE[2:])
        assert kind_of_next(node) is Progress


class _SlowJournal:
    """Stores nothing."""

    def append(self, number: int, state: State, awaited: int) -> None:
        pass


def test_heartbeats_do_not_count_while_messages_wait_for_the_journal() -> None:
    """One of the messages may end the node's round, which the answer would confirm."""
    dispatcher = Dispatcher(SETTINGS._replace(min_nodes=1, max_nodes=1), journal=_SlowJournal())
    with session(dispatcher) as node:
        node.says(JOIN)
        node.made.sendall(HEARTBEAT)
        assert codec.decode_notification(node.next()) == Heartbeat(0)
        dispatcher.journal_written(1_000)
        while kind_of_next(node) is not Placed:
            pass
        node.made.sendall(HEARTBEAT)
        assert codec.decode_notification(node.next()) == Heartbeat(2)


def test_a_link_knows_when_the_answered_heartbeat_was_sent() -> None:
    settings = SETTINGS._replace(lease=0.3)
    began = BOOT_CLOCK.monotonic()
    with (
        serving(Dispatcher(settings)) as server,
        linked(server.port, settings, SimpleQueue[Notification]().put) as link,
    ):
        assert link.confirmed_at == -math.inf
        until(lambda: link.confirmed_at > -math.inf)
        assert began < link.confirmed_at < BOOT_CLOCK.monotonic()


@pytest.mark.parametrize(
    ("most", "interval", "answers"),
    [(0, SETTINGS.lease / 2.1, [[1], [], [2], [], [2], []]), (256, 0.0, [[1]] * 6)],
    ids=["large", "small"],
)
def test_large_jobs_send_fewer_heartbeats_and_every_second_is_answered(
    monkeypatch: pytest.MonkeyPatch, most: int, interval: float, answers: list[list[int]]
) -> None:
    monkeypatch.setattr(connection, "_MANY_SESSIONS", most)
    with serving(Dispatcher(SETTINGS)) as server, connected(server.port) as node:
        assert node.greets(HELLO).heartbeat_interval == interval
        for numbers in answers:
            node.made.sendall(HEARTBEAT)
            assert answers_until_progress(node) == numbers


def test_nodes_send_heartbeats_as_often_as_the_server_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MANY_SESSIONS", 0)
    monkeypatch.setattr(server_session, "_MANY_HEARTBEATS_PER_LEASE", SETTINGS.lease / 0.05)
    dispatcher, came = Dispatcher(SETTINGS), threading.Semaphore(0)
    heartbeat = dispatcher.heartbeat

    def counted(number: int) -> bool:
        came.release()
        return heartbeat(number)

    monkeypatch.setattr(dispatcher, "heartbeat", counted)
    with serving(dispatcher) as server, linked(server.port, SETTINGS, SimpleQueue[Notification]().put):
        assert all(came.acquire(timeout=TIMEOUT) for _ in range(3))  # the lease alone would take 20 minutes
