"""Connections without a session: their limits, and the messages to them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import pytest

from rallypoint.base.log import RateLimitedLog
from rallypoint.control.coordinator import connection
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, frame
from rallypoint.control.protocol.handshake import PROTOCOL_VERSION, ClientHandshake, HandshakeRefused
from rallypoint.control.protocol.messages import Confirmed, ConfirmRequest, Heartbeat, Notification
from rallypoint.store import wire
from tests.unit.coordinator.sockets import SocketNode, serving

TIMEOUT = 120.0
SETTINGS = Settings("job", 1, 1)


@contextmanager
def served(dispatcher: Dispatcher | None = None) -> Iterator[int]:
    with serving(dispatcher or Dispatcher(SETTINGS)) as server:
        yield server.port


@contextmanager
def unauthenticated(port: int, says: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as made:
        made.sendall(says)
        yield made


def is_disconnected(made: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return made.recv(1000) == b""
    return True


HELLO = ClientHandshake(SETTINGS.run_id, None, b"n", SETTINGS).hello("h", NodeId("h", 1, 0))
GREETING = MAGIC + frame(codec.encode(HELLO))


@pytest.mark.parametrize(
    "fields",
    [
        [98, "job", b"n", "h", 1, 0, False, list(SETTINGS), "", "h", "a new field"],
        [98, "job", b"n", "h", 1, 0, False, [*SETTINGS, "a new setting"], "", "h"],
        [2, "job", b"n", "h", 1, 0, False, list(SETTINGS)],
        [99, {"all": "new"}],
    ],
)
def test_a_node_of_another_version_is_told_so_whatever_else_it_says(fields: list[object]) -> None:
    hello = MAGIC + frame(msgspec.msgpack.encode((0, fields)))
    with served() as port, unauthenticated(port, hello) as node:
        answer = codec.decode_answer(SocketNode(node).next())
    assert isinstance(answer, HandshakeRefused)
    told = f"uses protocol version {PROTOCOL_VERSION}, but the node uses {fields[0]}; install the same version"
    assert told in answer.sentence


@pytest.mark.parametrize("payload", [b"\x92\x01\x90", b"\x92\x00\x90", b"\x92\x00\x91\xa1x", b"\x92\x00\x80"])
def test_what_has_no_version_is_no_greeting(payload: bytes) -> None:
    with pytest.raises(codec.CodecError, match="does not begin with a Hello"):
        codec.version_of(payload)


def test_a_welcome_says_whether_the_server_lives_in_an_agent() -> None:
    with served() as port, unauthenticated(port) as node:
        assert SocketNode(node).greets(HELLO).embedded


def test_many_unauthenticated_connections_cost_few_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RateLimitedLog, "WINDOW", 3600.0)
    with caplog.at_level(logging.WARNING, "rallypoint"):
        with served() as port:
            for _ in range(50):
                with unauthenticated(port, b"GET / HTTP/1.1\r\n\r\n") as made:
                    assert is_disconnected(made)
        assert len([line for line in caplog.messages if "refused: it starts with b'GET" in line]) == 10
        assert caplog.messages[-1].startswith("and 40 more control connections refused")


def test_an_agent_that_asks_whether_a_store_listens_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with served() as port, unauthenticated(port, wire.probe()) as made:
        assert is_disconnected(made)
    assert not caplog.messages


def test_idle_unauthenticated_connections_make_way_for_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT", 3600.0)
    monkeypatch.setattr(connection, "_MIN_AGE", 0.05)
    monkeypatch.setattr(connection, "_MAX_CONNECTIONS", 3)
    with served() as port, ExitStack() as stack:
        session = SocketNode(stack.enter_context(unauthenticated(port)))
        session.greets(HELLO)
        idle = [stack.enter_context(unauthenticated(port)) for _ in range(6)]
        for made in idle[:3]:
            assert is_disconnected(made)
        for made in idle[3:]:
            made.sendall(GREETING)
            assert SocketNode(made).next()
        session.says(Heartbeat())
        assert codec.decode_notification(session.next()) == Heartbeat()


def test_many_that_come_at_once_have_a_moment_to_say_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MIN_AGE", 3600.0)
    monkeypatch.setattr(connection, "_MAX_CONNECTIONS", 2)
    with served() as port, ExitStack() as stack:
        for made in [stack.enter_context(unauthenticated(port)) for _ in range(10)]:
            made.sendall(GREETING)
            assert SocketNode(made).next()


def test_a_session_that_cannot_be_told_something_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = Dispatcher(Settings("job", 1, 3))
    ended: list[str] = []
    told: list[Notification] = []

    def broken(notice: Notification) -> None:
        raise ValueError(f"cannot say {notice}")

    first = dispatcher.attach(broken, SessionRecord(NodeId("a", 1, 0), "a"), disconnect=ended.append)
    second = dispatcher.attach(
        told.append, SessionRecord(NodeId("b", 1, 0), "b"), disconnect=lambda _why: ended.append("second")
    )
    dispatcher.receive(first, ConfirmRequest(1))
    dispatcher.receive(second, ConfirmRequest(2))
    assert (ended, told) == (["it could not be notified"], [Confirmed(2, 3.0)])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "cannot say Confirmed" in caplog.text
