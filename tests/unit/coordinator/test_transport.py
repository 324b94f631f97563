"""The sockets of the control server's connections: sending, reading, and how they end."""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rallypoint.base.endpoint import listening_socket
from rallypoint.control.coordinator import transport as transport_module
from rallypoint.control.coordinator.transport import Transport, Transports
from tests.unit.coordinator.sockets import on_loop

TIMEOUT = 120.0
MUCH = 8 * 1024 * 1024


class Connection:
    """Records the calls of its transport."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.received = b""
        self.ends: list[OSError | None] = []
        self.drained = 0
        self.on_data: Callable[[bytes], None] = lambda _data: None
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.on_data(data)

    def all_sent(self) -> None:
        self.drained += 1

    def connection_lost(self, error: OSError | None) -> None:
        self.ends.append(error)
        self.ended.set()


class Served:
    """A set of transports with one listener, and the connections that it has made."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.refusals: list[str] = []
        self.set = Transports(self._made, lambda line, *arguments: self.refusals.append(line % arguments))
        self.listener = listening_socket("127.0.0.1", 0)
        self.set.listen(self.listener)
        self._address = self.listener.getsockname()

    def _made(self, transport: Transport) -> Connection:
        self.connections.append(Connection(transport))
        return self.connections[-1]

    def client(self) -> socket.socket:
        made = socket.create_connection(self._address, TIMEOUT)
        made.setblocking(False)
        return made

    async def accepted(self, number: int = 1) -> Connection:
        """The newest of that many connections."""
        await until(lambda: len(self.connections) == number)
        return self.connections[-1]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0)


async def read_to_end(client: socket.socket) -> bytes:
    read = b""
    async with asyncio.timeout(TIMEOUT):
        while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            read += data
    return read


@contextmanager
def served() -> Iterator[Served]:
    server = Served()
    try:
        yield server
    finally:
        for connection in server.connections:
            connection.transport.abort()
            connection.transport.socket.close()
        server.set.close()


@on_loop
async def test_many_connections_at_once_are_accepted_and_read() -> None:
    with served() as server:
        clients = [server.client() for _ in range(3 * transport_module._AT_ONCE)]
        for number, client in enumerate(clients):
            client.send(str(number).encode())
        made = server.connections
        await until(lambda: sum(bool(connection.received) for connection in made) == len(clients))
        assert {int(connection.received) for connection in made} == set(range(len(clients)))
        assert {connection.transport.peer_name for connection in made} == {peer.getsockname() for peer in clients}
        for client in clients:
            client.close()


@pytest.mark.parametrize("end", [Transport.close, Transport.write_eof], ids=["close", "end of output"])
@on_loop
async def test_a_slow_reader_gets_everything_before_the_end(end: Callable[[Transport], None]) -> None:
    with served() as server, server.client() as client:
        connection = await server.accepted()
        connection.transport.write(b"at once")
        assert connection.drained == 0
        sent = [bytes([number]) * (MUCH // 4) for number in range(4)]
        for data in sent:
            connection.transport.write(data)
        assert connection.transport.unsent
        end(connection.transport)
        assert await read_to_end(client) == b"at once" + b"".join(sent)
        assert not connection.transport.unsent
        assert connection.drained == (end is Transport.write_eof)
        client.close()
        await connection.ended.wait()
        assert connection.ends == [None]


@on_loop
async def test_the_end_is_reported_once_and_later() -> None:
    with served() as server, server.client() as client:
        connection = await server.accepted()
        connection.transport.abort()
        connection.transport.close()
        connection.transport.abort()
        assert connection.ends == []
        connection.transport.write(b"dropped")
        await connection.ended.wait()
        assert await read_to_end(client) == b""
        assert connection.ends == [None]


@on_loop
async def test_a_connection_that_breaks_ends_with_the_error() -> None:
    with served() as server:
        client = server.client()
        connection = await server.accepted()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        client.close()
        await connection.ended.wait()
        (error,) = connection.ends
        assert error is not None
        assert error.errno == errno.ECONNRESET


@on_loop
async def test_a_paused_connection_is_read_later_and_costs_nothing() -> None:
    with served() as server:
        client = server.client()
        connection = await server.accepted()
        connection.transport.pause()
        client.send(b"later")
        client.close()
        assert not server.set._epoll.poll(0)
        assert connection.received == b""
        connection.transport.resume()
        await connection.ended.wait()
        assert (connection.received, connection.ends) == (b"later", [None])


@on_loop
async def test_a_defect_ends_only_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    def defect(_data: bytes) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR), served() as server, server.client() as bad, server.client() as good:
        await server.accepted(2)
        first, second = server.connections
        first.on_data = defect
        bad.send(b"x")
        good.send(b"y")
        await first.ended.wait()
        await until(lambda: second.received == b"y")
        assert second.ends == []
    assert "an internal error ended a control connection from 127.0.0.1" in caplog.text


@on_loop
async def test_a_connection_that_is_handed_over_stays_open() -> None:
    with served() as server, server.client() as client:
        connection = await server.accepted()
        with connection.transport.hand_over() as kept:
            await connection.ended.wait()
            kept.send(b"from another owner")
            kept.shutdown(socket.SHUT_WR)
            assert await read_to_end(client) == b"from another owner"


@on_loop
async def test_accepting_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_RETRY", 0.01)

    class Full(socket.socket):
        """A listener that finds no descriptor, once."""

        failures = 1

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with served() as server:
        listener = Full(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server.set.listen(listener)
        with socket.create_connection(listener.getsockname(), TIMEOUT):
            await server.accepted()
        assert server.refusals == [
            "control connections will not be accepted for 0.01 s: [Errno 24] Too many open files"
        ]


@on_loop
async def test_events_of_many_connections_are_handled_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_module, "_MANY", 1)
    with served() as server, server.client() as client:
        connection = await server.accepted()
        client.send(b"a")
        await until(lambda: connection.received == b"a")
        await until(lambda: server.set._is_watched)
        with server.client():
            await server.accepted(2)
            client.send(b"b")
            await until(lambda: connection.received == b"ab")
            await until(lambda: not server.set._is_watched)
        await until(lambda: server.set._is_watched)
        client.send(b"c")
        await until(lambda: connection.received == b"abc")


@on_loop
async def test_a_reader_that_never_reads_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_LAST_WORDS", 0.05)
    with served() as server, server.client():
        connection = await server.accepted()
        connection.transport.write(bytes(MUCH))
        assert connection.transport.unsent
        connection.transport.close()
        await connection.ended.wait()
        assert connection.ends == [None]


def test_idle_connections_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_MANY", 1)
    looks: list[int] = []

    async def run() -> None:
        with served() as server, server.client() as client, server.client():
            connection = await server.accepted(2)
            client.send(b"a")
            await until(lambda: any(connection.received for connection in server.connections))
            await until(lambda: server.set._is_watched)
            epoll = server.set._epoll
            monkeypatch.setattr(server.set, "_epoll", Counting(epoll, looks))
            await asyncio.sleep(10 * transport_module._REST)
            assert looks == [], "for ten rests"
            monkeypatch.setattr(server.set, "_epoll", epoll)
            assert epoll.poll(0) == []
            assert connection.ends == []

    asyncio.run(run())


class Counting:
    """An epoll set that counts its polls."""

    def __init__(self, epoll: select.epoll, looks: list[int]) -> None:
        self.epoll = epoll
        self._looks = looks

    def poll(self, timeout: float, most: int = -1) -> list[tuple[int, int]]:
        self._looks.append(1)
        return self.epoll.poll(timeout, most)

    def fileno(self) -> int:
        return self.epoll.fileno()
