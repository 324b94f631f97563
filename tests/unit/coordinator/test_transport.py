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

TIMEOUT = 120.0
MUCH = 8 * 1024 * 1024


class Connection:
    """What its transport has told it."""

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
        for each in server.connections:
            each.transport.abort()
            each.transport.socket.close()
        server.set.close()


def test_many_that_connect_at_once_are_all_accepted_and_heard() -> None:
    async def run() -> None:
        with served() as server:
            clients = [server.client() for _ in range(3 * transport_module._AT_ONCE)]
            for number, client in enumerate(clients):
                client.send(str(number).encode())
            await until(lambda: sum(map(bool, (each.received for each in server.connections))) == len(clients))
            assert {int(each.received) for each in server.connections} == set(range(len(clients)))
            assert {each.transport.peer_name for each in server.connections} == {
                client.getsockname() for client in clients
            }
            for client in clients:
                client.close()

    asyncio.run(run())


@pytest.mark.parametrize("end", [Transport.close, Transport.write_eof], ids=["close", "end of output"])
def test_what_the_other_side_reads_slowly_arrives_whole_before_the_end(end: Callable[[Transport], None]) -> None:
    async def run() -> None:
        with served() as server, server.client() as client:
            connection = await server.accepted()
            sent = [bytes([number]) * (MUCH // 4) for number in range(4)]
            for each in sent:
                connection.transport.write(each)
            assert connection.transport.unsent
            end(connection.transport)
            assert await read_to_end(client) == b"".join(sent)
            assert not connection.transport.unsent
            client.close()
            await connection.ended.wait()
            assert connection.ends == [None]

    asyncio.run(run())


def test_the_end_is_reported_once_and_not_from_within_a_call() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_connection_that_breaks_ends_with_the_error() -> None:
    async def run() -> None:
        with served() as server:
            client = server.client()
            connection = await server.accepted()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
            client.close()
            await connection.ended.wait()
            (error,) = connection.ends
            assert error is not None
            assert error.errno == errno.ECONNRESET

    asyncio.run(run())


def test_what_comes_while_reading_is_paused_is_read_later_and_its_end_costs_nothing_meanwhile() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_defect_of_one_connection_ends_that_one_alone(caplog: pytest.LogCaptureFixture) -> None:
    def defect(_data: bytes) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        with served() as server, server.client() as bad, server.client() as good:
            await server.accepted(2)
            first, second = server.connections
            first.on_data = defect
            bad.send(b"x")
            good.send(b"y")
            await first.ended.wait()
            await until(lambda: second.received == b"y")
            assert second.ends == []

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "an internal error ended a control connection from 127.0.0.1" in caplog.text


def test_a_connection_that_is_handed_over_stays_open() -> None:
    async def run() -> None:
        with served() as server, server.client() as client:
            connection = await server.accepted()
            with connection.transport.hand_over() as kept:
                await connection.ended.wait()
                kept.send(b"from another owner")
                kept.shutdown(socket.SHUT_WR)
                assert await read_to_end(client) == b"from another owner"

    asyncio.run(run())


def test_who_cannot_be_accepted_is_accepted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_RETRY", 0.01)

    class Full(socket.socket):
        """A listener that finds no descriptor, once."""

        failures = 1

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def run() -> None:
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

    asyncio.run(run())


def test_the_events_of_many_connections_are_handled_together_and_of_few_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_module, "_MANY", 1)

    async def run() -> None:
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

    asyncio.run(run())


def test_who_reads_nothing_keeps_a_closed_connection_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_LAST_WORDS", 0.05)

    async def run() -> None:
        with served() as server, server.client():
            connection = await server.accepted()
            connection.transport.write(bytes(MUCH))
            assert connection.transport.unsent
            connection.transport.close()
            await connection.ended.wait()
            assert connection.ends == [None]

    asyncio.run(run())


def test_the_connection_is_told_when_what_had_to_wait_was_read() -> None:
    async def run() -> None:
        with served() as server, server.client() as client:
            connection = await server.accepted()
            connection.transport.write(b"at once")
            assert connection.drained == 0
            connection.transport.write(bytes(MUCH))
            assert connection.transport.unsent
            connection.transport.write_eof()
            await read_to_end(client)
            assert connection.drained == 1

    asyncio.run(run())


def test_many_connections_that_say_nothing_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_MANY", 1)
    looks: list[int] = []

    async def run() -> None:
        with served() as server, server.client() as client, server.client():
            connection = await server.accepted(2)
            client.send(b"a")
            await until(lambda: any(each.received for each in server.connections))
            await until(lambda: server.set._is_watched)
            epoll = server.set._epoll
            monkeypatch.setattr(server.set, "_epoll", Counting(epoll, looks))
            await asyncio.sleep(10 * transport_module._REST)
            assert looks == [], "in the time of ten rests"
            monkeypatch.setattr(server.set, "_epoll", epoll)
            assert epoll.poll(0) == []
            assert connection.ends == []

    asyncio.run(run())


class Counting:
    """An epoll set, and how often events were looked for."""

    def __init__(self, epoll: select.epoll, looks: list[int]) -> None:
        self.epoll = epoll
        self._looks = looks

    def poll(self, timeout: float, most: int = -1) -> list[tuple[int, int]]:
        self._looks.append(1)
        return self.epoll.poll(timeout, most)

    def fileno(self) -> int:
        return self.epoll.fileno()
