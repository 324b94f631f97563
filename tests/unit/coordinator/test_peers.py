"""Limits for unauthenticated peers: descriptors, handshakes, memory, and the name of the own node."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

import pytest

from rallypoint.base.own_process import process_token
from rallypoint.control.coordinator import connection as connection_module
from rallypoint.control.coordinator.connection import Connections, ControlConnection, Served, TlsHandshakes
from rallypoint.control.coordinator.dispatcher import Dispatcher, do_nothing
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, MAX_GREETING, frame
from rallypoint.control.protocol.handshake import ClientHandshake
from rallypoint.control.protocol.messages import Confirmed, ConfirmRequest, Heartbeat, NextStore, SessionEnded
from tests.unit.coordinator.sockets import TIMEOUT, connected, on_loop, serving
from tests.waiting import until

SETTINGS = Settings("job", 1, 2)
HELLO = ClientHandshake("job", None, b"n" * 16, SETTINGS).hello("127.0.0.1", NodeId("127.0.0.1", 7, 9))


class FakeTransport:
    """A transport whose end is reported, and whose descriptor becomes free, in the next turn."""

    own_name = ("127.0.0.1", 1)

    def __init__(self, kernel: Kernel, peer_host: str) -> None:
        self.peer_name = (peer_host, 2)
        self.socket = self
        self.unsent = b""
        self.is_closing = False
        self.receiver: ControlConnection | None = None
        self._kernel = kernel
        self._descriptor = kernel.open()

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if not self.is_closing:
            self.is_closing = True
            self._kernel.ended.append(self)

    abort = close

    def report_end(self) -> None:
        self._kernel.used.discard(self._descriptor)
        if self.receiver is not None:
            self.receiver.connection_lost(None)


class Kernel:
    """Allocates the lowest free descriptors for bursts of connections."""

    def __init__(self, others: int) -> None:
        self.used = set(range(others))
        self.ended: list[FakeTransport] = []
        served = Served(Dispatcher(SETTINGS), lambda _job: (), None, None, False)
        self.connections = Connections(served, do_nothing)

    def open(self) -> int:
        number = next(number for number in range(1 << 20) if number not in self.used)
        self.used.add(number)
        return number

    def burst(self, count: int, peer_host: str = "10.0.0.1") -> None:
        """Open connections in one turn of the loop; then free the descriptors closed in it."""
        for _ in range(count):
            transport: Any = FakeTransport(self, peer_host)
            transport.receiver = ControlConnection(self.connections, transport)
        for transport in self.ended:
            transport.report_end()
        self.ended.clear()


@on_loop
async def test_bursts_of_connections_leave_the_reserve_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "connection_limit", lambda: 200)
    kernel = Kernel(others=50)
    most = []
    for _ in range(100):
        kernel.burst(64)
        most.append(len(kernel.connections.open))
    assert max(most) == 150, "the descriptors below the limit, and no more, however many bursts"
    assert max(kernel.used) < 200 + 64
    kernel.connections.close()


@on_loop
async def test_a_flood_is_limited_by_its_own_connections() -> None:
    kernel = Kernel(others=0)
    kernel.burst(1, "10.0.0.9")
    kernel.burst(200, "10.0.0.1")
    limiter = kernel.connections.limiter
    (first,) = (each for each in limiter._waiting if each.peer_host == "10.0.0.9")
    for _ in range(100):
        assert limiter.make_room("10.0.0.1")
    assert first in limiter._waiting
    assert limiter.make_room("10.0.0.8"), "of others the oldest makes room"
    assert first not in limiter._waiting
    kernel.connections.close()


@on_loop
async def test_addresses_take_turns_with_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_TLS_THREADS", 1)
    taken: list[str] = []
    ended = asyncio.Event()
    handshakes = TlsHandshakes(asyncio.get_running_loop())

    def take(name: str) -> bytes:
        taken.append(name)
        return b""

    def done(work: asyncio.Future[bytes]) -> None:
        work.result()
        if len(taken) == 12:
            ended.set()

    for number in range(10):
        handshakes.add("10.0.0.1", partial(take, f"flood {number}"), done)
    handshakes.add("10.0.0.2", partial(take, "node"), done)
    handshakes.add("10.0.0.3", partial(take, "another"), done)
    async with asyncio.timeout(TIMEOUT):
        await ended.wait()
    handshakes.close()
    assert {"node", "another"} <= set(taken[:4])


def test_strangers_may_only_send_a_greeting() -> None:
    with serving(Dispatcher(SETTINGS)) as server, connected(server.port) as node:
        node.made.sendall(MAGIC + (MAX_GREETING + 1).to_bytes(4, "big"))
        assert node.made.recv(1000) == b""
    with serving(Dispatcher(SETTINGS)) as server, connected(server.port) as node:
        longest = HELLO._replace(job="x" * 4096, settings=SETTINGS._replace(run_id="x" * 4096))
        node.made.sendall(MAGIC + frame(codec.encode(longest)))
        assert b"belongs to job 'job', not to" in node.made.recv(10_000)


@pytest.mark.parametrize(("token", "expected"), [(b"", False), (b"0" * 16, False), (None, True)])
def test_the_own_node_is_known_by_its_token(token: bytes | None, expected: bool) -> None:
    """Containers that share a network may have processes with our pid at our address."""
    dispatcher = Dispatcher(SETTINGS)
    own = NodeId("127.0.0.1", os.getpid(), 9)
    with serving(dispatcher) as server, connected(server.port) as node:
        node.greets(HELLO._replace(node=own, process=process_token() if token is None else token))
        until(lambda: dispatcher.members == 1)
        (record,) = dispatcher._coordinator.sessions
        assert record.in_this_process is expected


def test_a_refused_message_ends_the_session_permanently() -> None:
    with serving(Dispatcher(SETTINGS)) as server, connected(server.port) as node:
        node.greets(HELLO)
        node.says(NextStore(0, 70_000))
        assert codec.decode_notification(node.next()) == SessionEnded(
            "a NextStore whose store_port is 70000 is refused; it must be from 0 to 65535", is_permanent=True
        )
        assert node.made.recv(1000) == b""


def test_heartbeats_are_not_counted_while_messages_are_unsent() -> None:
    dispatcher = Dispatcher(SETTINGS)
    with serving(dispatcher) as server, connected(server.port) as node:
        node.greets(HELLO)
        (connection,) = server.connections
        written: list[bool] = []

        def look() -> None:
            # The answer to a request is posted, and written in a later turn of the loop; a heartbeat comes in between.
            dispatcher.receive(connection._session.number, ConfirmRequest(1))
            written.append(connection.is_written)
            connection._session.heartbeat()

        server._loop.call(look)
        answers = [codec.decode_notification(node.next()) for _ in range(2)]
        assert [type(answer) for answer in answers] == [Heartbeat, Confirmed]
        assert answers[0] == Heartbeat(0)
        assert written == [False]
        until(lambda: connection.is_written)
