"""Load on a store from plain sockets and one epoll: as little work a request as C can do, or Python where it must.

Reads `Connect` and `Drive` lines from standard input in turn and answers each; ends when standard input does. Every
client sends one step, waits for its reply, checks it and sends the next, as a torch client does.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from itertools import cycle

from benchmarks.messages import WARM_UP, Connect, Connected, Drive, Driven, decode, encode, thinned
from benchmarks.programs import raw_drive
from benchmarks.programs.raw_wire import LoadError, Step, handshake, steps
from benchmarks.system import ProcessClock, load_cores, raise_file_limit

_TIMEOUT = 30.0  # seconds without any reply before the load gives up
_CHUNK = 4096  # bytes; beyond any reply of the load


_library = raw_drive.build()


class Clients:
    """Connected clients of one load, known by their file descriptors; close them after use."""

    def __init__(self, load: Connect) -> None:
        self._load = load
        self._epoll = select.epoll()
        self._sockets: list[socket.socket] = []

    def connect(self) -> list[float]:
        """Start all connects at once; seconds of each until its PING was answered.

        Raises:
            LoadError: see there.
            OSError: the connection was refused or broke.
        """
        began: dict[int, float] = {}
        for _ in range(self._load.clients):
            client = socket.socket()
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            began[client.fileno()] = time.perf_counter()
            client.connect_ex(("127.0.0.1", self._load.port))
            self._sockets.append(client)
            self._epoll.register(client, select.EPOLLOUT)
        hello = handshake(os.getpid())
        greeted: set[int] = set()
        taken: list[float] = []
        while len(taken) < len(began):
            for fd in self._ready():
                if fd in greeted:
                    if os.read(fd, _CHUNK) != hello.reply:
                        raise LoadError("the server did not answer the PING with its nonce")
                    taken.append(time.perf_counter() - began[fd])
                else:
                    os.write(fd, hello.message)
                    greeted.add(fd)
                    self._epoll.modify(fd, select.EPOLLIN)
        return taken

    def drive(self, seconds: float) -> tuple[int, float, list[float]]:
        """Let every client step through its cycle for so long, then collect the last replies.

        Returns:
            Requests answered in time, the seconds that this took, and the seconds of every round trip.

        Raises:
            LoadError: see there.
            OSError: the connection was refused or broke.
        """
        if _library is not None:
            own = [steps(number) for number in range(len(self._sockets))]
            return raw_drive.drive(_library, [client.fileno() for client in self._sockets], own, seconds)
        clock, read, write = time.perf_counter, os.read, os.write
        cycles = {client.fileno(): cycle(steps(number)) for number, client in enumerate(self._sockets)}
        current = {fd: next(upcoming) for fd, upcoming in cycles.items()}
        partial: dict[int, bytes] = {}
        latencies: list[float] = []
        requests = 0
        begin = clock()
        sent = dict.fromkeys(cycles, begin)
        for fd in cycles:
            write(fd, current[fd].message)
        now, end = begin, begin + seconds
        while now < end:
            for fd in self._ready():
                data = read(fd, _CHUNK)
                now = clock()
                step = current[fd]
                if len(data) != step.reply_length:
                    data = _whole(fd, data, step, partial)
                    if not data:
                        continue
                if step.reply is not None and data != step.reply:
                    raise LoadError(f"the server answered {data[:80]!r} to {step.message[:80]!r}")
                latencies.append(now - sent[fd])
                requests += step.requests
                current[fd] = step = next(cycles[fd])
                sent[fd] = now
                write(fd, step.message)
        self._collect(current, partial)
        return requests, now - begin, latencies

    def close(self) -> None:
        """Close every connection."""
        for client in self._sockets:
            client.close()
        self._epoll.close()

    def _collect(self, current: dict[int, Step], partial: dict[int, bytes]) -> None:
        outstanding = set(current)
        while outstanding:
            for fd in self._ready():
                if _whole(fd, os.read(fd, _CHUNK), current[fd], partial):
                    outstanding.discard(fd)

    def _ready(self) -> list[int]:
        ready = self._epoll.poll(_TIMEOUT)
        if not ready:
            raise LoadError(f"the server answered nobody for {_TIMEOUT:.0f} s")
        return [fd for fd, _ in ready]


def _whole(fd: int, data: bytes, step: Step, partial: dict[int, bytes]) -> bytes:
    """The whole reply to `step` once its last part is there; empty, and the part kept, before that."""
    if not data:
        raise LoadError(f"the server closed the connection after {step.message[:80]!r}")
    data = partial.pop(fd, b"") + data
    if len(data) > step.reply_length:
        raise LoadError(f"the server answered more than it was asked: {data[:80]!r} to {step.message[:80]!r}")
    if len(data) < step.reply_length:
        partial[fd] = data
        return b""
    return data


def connect(order: Connect) -> tuple[Clients, Connected]:
    """Storms of connects until there are latencies enough; the last storm's clients stay. Raises LoadError, OSError."""
    latencies: list[float] = []
    storms: list[float] = []
    while True:
        clients = Clients(order)
        try:
            begin = time.perf_counter()
            latencies.extend(clients.connect())
            storms.append(time.perf_counter() - begin)
        except BaseException:
            clients.close()
            raise
        if len(latencies) >= order.at_least:
            return clients, Connected(latencies, storms)
        clients.close()


def drive(clients: Clients, order: Drive) -> Driven:
    """Warm up, then measure. Raises LoadError, OSError."""
    server = ProcessClock(order.server_pid)
    clients.drive(order.seconds * WARM_UP)
    used = server.seconds()
    requests, seconds, latencies = clients.drive(order.seconds)
    return Driven(requests, seconds, thinned(latencies), server.seconds() - used)


def main() -> None:
    """Serve pairs of `Connect` and `Drive` lines until standard input ends."""
    raise_file_limit()
    os.sched_setaffinity(0, load_cores())
    print("ready", flush=True)
    for line in sys.stdin:
        clients, connected = connect(decode(line, Connect))
        print(encode(connected).decode(), flush=True)
        print(encode(drive(clients, decode(sys.stdin.readline(), Drive))).decode(), flush=True)
        clients.close()


if __name__ == "__main__":
    main()
