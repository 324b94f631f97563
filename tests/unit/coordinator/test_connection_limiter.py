"""Connections without a session: their limits, and the messages to them."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress

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
from tests.unit.coordinator.sockets import SocketNode, connected, serving

SETTINGS = Settings("job", 1, 1)


def is_disconnected(node: SocketNode) -> bool:
    with suppress(ConnectionResetError):
        return node.made.recv(1000) == b""
    return True


HELLO = ClientHandshake(SETTINGS.run_id, None, b"n", SETTINGS).hello("h", NodeId("h", 1, 0))


@pytest.mark.parametrize(
    "fields",
    [
        [98, "job", b"n", "h", 1, 0, False, list(SETTINGS), "", "h", "a new field"],
        [98, "job", b"n", "h", 1, 0, False, [*SETTINGS, "a new setting"], "", "h"],
        [2, "job", b"n", "h", 1, 0, False, list(SETTINGS)],
        [99, {"all": "new"}],
    ],
)
def test_a_node_of_another_version_is_refused(fields: list[object]) -> None:
    hello = MAGIC + frame(msgspec.msgpack.encode((0, fields)))
    with serving(Dispatcher(SETTINGS)) as server, connected(server.port) as node:
        node.made.sendall(hello)
        answer = codec.decode_answer(node.next())
    assert isinstance(answer, HandshakeRefused)
    told = f"uses protocol version {PROTOCOL_VERSION}, but the node uses {fields[0]}; install the same version"
    assert told in answer.sentence


@pytest.mark.parametrize("payload", [b"\x92\x01\x90", b"\x92\x00\x90", b"\x92\x00\x91\xa1x", b"\x92\x00\x80"])
def test_greetings_without_a_version_are_refused(payload: bytes) -> None:
    with pytest.raises(codec.CodecError, match="does not begin with a Hello"):
        codec.version_of(payload)


def test_many_unauthenticated_connections_cost_few_log_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RateLimitedLog, "WINDOW", 3600.0)
    with caplog.at_level(logging.WARNING, "rallypoint"):
        with serving(Dispatcher(SETTINGS)) as server:
            for _ in range(50):
                with connected(server.port) as node:
                    node.made.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    assert is_disconnected(node)
        assert len([line for line in caplog.messages if "refused: it starts with b'GET" in line]) == 10
        assert caplog.messages[-1].startswith("and 40 more control connections refused")


def test_probing_for_a_store_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Dispatcher(SETTINGS)) as server, connected(server.port) as node:
        node.made.sendall(wire.probe())
        assert is_disconnected(node)
    assert not caplog.messages


def test_idle_connections_are_closed_for_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT", 3600.0)
    monkeypatch.setattr(connection, "_MIN_AGE", 0.05)
    monkeypatch.setattr(connection, "_MAX_CONNECTIONS", 3)
    with serving(Dispatcher(SETTINGS)) as server, ExitStack() as stack:
        session = stack.enter_context(connected(server.port))
        assert session.greets(HELLO).embedded, "the server lives in an agent"
        idle = [stack.enter_context(connected(server.port)) for _ in range(6)]
        assert all(is_disconnected(node) for node in idle[:3])
        for node in idle[3:]:
            node.greets(HELLO)
        session.says(Heartbeat())
        assert codec.decode_notification(session.next()) == Heartbeat()


def test_new_connections_have_a_moment_to_greet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MIN_AGE", 3600.0)
    monkeypatch.setattr(connection, "_MAX_CONNECTIONS", 2)
    with serving(Dispatcher(SETTINGS)) as server, ExitStack() as stack:
        for node in [stack.enter_context(connected(server.port)) for _ in range(10)]:
            node.greets(HELLO)


def test_a_session_with_a_broken_output_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = Dispatcher(Settings("job", 1, 3))
    ended: list[str] = []
    told: list[Notification] = []

    def broken(notice: Notification) -> None:
        raise ValueError(f"cannot say {notice}")

    sessions = [
        dispatcher.attach(output, SessionRecord(NodeId(name, 1, 0), name), disconnect=ended.append)
        for name, output in (("a", broken), ("b", told.append))
    ]
    for number, session in enumerate(sessions, 1):
        dispatcher.receive(session, ConfirmRequest(number))
    assert (ended, told) == (["it could not be notified"], [Confirmed(2, 3.0)])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "cannot say Confirmed" in caplog.text
