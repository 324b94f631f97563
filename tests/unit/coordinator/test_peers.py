"""What strangers may use of a control server: descriptors, handshakes, memory, and the name of its own node."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
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
from rallypoint.control.protocol.messages import ConfirmRequest, NextStore, SessionEnded
from tests.unit.coordinator.sockets import SocketNode, serving
from tests.unit.coordinator.test_control import TIMEOUT
from tests.waiting import until

SETTINGS = Settings("job", 1, 2)
HELLO = ClientHandshake("job", None, b"n" * 16, SETTINGS).hello("127.0.0.1", NodeId("127.0.0.1", 7, 9))


class FakeTransport:
    """A connection's socket, whose descriptor becomes free, and whose end is reported, in the turn after its end."""

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
    """Gives the lowest descriptors that are free, and a server connections that come in bursts."""

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
        """So many connect in one turn of the loop; then what was closed in it is free."""
        for _ in range(count):
            transport: Any = FakeTransport(self, peer_host)
            transport.receiver = ControlConnection(self.connections, transport)
        for each in self.ended:
            each.report_end()
        self.ended.clear()


def test_bursts_of_silent_connections_do_not_creep_into_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "connection_limit", lambda: 200)

    async def run() -> None:
        kernel = Kernel(others=50)
        most = []
        for _ in range(100):
            kernel.burst(64)
            most.append(len(kernel.connections.open))
        assert max(most) == 150, "the descriptors below the limit, and no more, however many bursts"
        assert max(kernel.used) < 200 + 64
        kernel.connections.close()

    asyncio.run(run())


def test_who_floods_makes_room_with_its_own_connections() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_the_addresses_of_peers_take_turns_with_their_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_TLS_THREADS", 1)
    taken: list[str] = []

    async def run() -> None:
        ended = asyncio.Event()
        handshakes = TlsHandshakes(asyncio.get_running_loop())

        def step(name: str) -> Callable[[], bytes]:
            def take() -> bytes:
                taken.append(name)
                return b""

            return take

        def done(work: asyncio.Future[bytes]) -> None:
            work.result()
            if len(taken) == 12:
                ended.set()

        for number in range(10):
            handshakes.add("10.0.0.1", step(f"flood {number}"), done)
        handshakes.add("10.0.0.2", step("node"), done)
        handshakes.add("10.0.0.3", step("another"), done)
        async with asyncio.timeout(TIMEOUT):
            await ended.wait()
        handshakes.close()

    asyncio.run(run())
    assert {"node", "another"} <= set(taken[:4])


def test_who_has_proved_nothing_may_send_a_greeting_and_no_more() -> None:
    with serving(Dispatcher(SETTINGS)) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(TIMEOUT)
        raw.sendall(MAGIC + (MAX_GREETING + 1).to_bytes(4, "big"))
        assert raw.recv(1000) == b""
    with serving(Dispatcher(SETTINGS)) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(TIMEOUT)
        longest = HELLO._replace(job="x" * 4096, settings=SETTINGS._replace(run_id="x" * 4096))
        raw.sendall(MAGIC + frame(codec.encode(longest)))
        assert b"belongs to job 'job', not to" in raw.recv(10_000)


@pytest.mark.parametrize(("token", "expected"), [(b"", False), (b"0" * 16, False), (None, True)])
def test_the_node_of_this_process_is_known_by_its_token(token: bytes | None, expected: bool) -> None:
    """In containers that share a network, each may have a process of our pid at our address."""
    dispatcher = Dispatcher(SETTINGS)
    node = NodeId("127.0.0.1", os.getpid(), 9)
    hello = HELLO._replace(node=node, process=process_token() if token is None else token)
    with serving(dispatcher) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(TIMEOUT)
        SocketNode(raw).greets(hello)
        until(lambda: dispatcher.members == 1)
        (record,) = dispatcher._coordinator.sessions
        assert record.in_this_process is expected


def test_a_session_that_is_refused_for_a_message_is_told_so_for_good() -> None:
    with serving(Dispatcher(SETTINGS)) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(TIMEOUT)
        node = SocketNode(raw)
        node.greets(HELLO)
        node.says(NextStore(0, 70_000))
        ended = codec.decode_notification(node.next())
        assert ended == SessionEnded(
            "a NextStore whose store_port is 70000 is refused; it must be from 0 to 65535", is_permanent=True
        )
        assert raw.recv(1000) == b""


def test_a_heartbeat_counts_only_after_what_was_posted_before() -> None:
    dispatcher = Dispatcher(SETTINGS)
    with serving(dispatcher) as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(TIMEOUT)
        node = SocketNode(raw)
        node.greets(HELLO)
        (connection,) = server.connections
        answers: list[Any] = []
        done = asyncio.Event()

        def look() -> None:
            # The answer to a request is posted, and written in a later turn of the loop; a heartbeat comes in between.
            dispatcher.receive(connection._session.number, ConfirmRequest(1))
            answers.append(connection.is_written)
            connection._session.heartbeat()
            done.set()

        server._loop.call(look)
        heard = [codec.decode_notification(node.next()) for _ in range(2)]
        assert [type(each).__name__ for each in heard] == ["Heartbeat", "Confirmed"]
        assert heard[0].number == 0  # type: ignore[union-attr]
        assert answers == [False]
        until(lambda: connection.is_written)
