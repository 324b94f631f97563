"""A server for one test, the deliveries of a link to it, and a node that is only a socket."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rallypoint.base.endpoint import listening_socket
from rallypoint.base.tls import ControlTls
from rallypoint.control.coordinator.jobs import ServedJobs
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, FrameReader, frame
from rallypoint.control.protocol.handshake import Hello, Keys, Welcome
from rallypoint.control.protocol.messages import LinkOpened, Notification


@contextmanager
def serving(
    jobs: ServedJobs,
    keys: Keys | None = None,
    tls: ControlTls | None = None,
    fallback: Callable[[socket.socket, bytes], None] | None = None,
) -> Iterator[ControlServer]:
    """A server on loopback, which leaves no connection behind."""
    server = ControlServer(jobs, listening_socket("127.0.0.1", 0), keys=keys, tls=tls, fallback=fallback)
    try:
        yield server
    finally:
        server.close()
        assert not server.connections


class Heard(queue.SimpleQueue[Notification]):
    """What a link has delivered, in order, but for the news that it has reached the control plane."""

    def take(self, notice: Notification) -> None:
        """The `Deliver` of a link."""
        if not isinstance(notice, LinkOpened):
            self.put(notice)


class SocketNode:
    """What a node says on one connection, and what the server answers, message by message: for what no link does."""

    def __init__(self, made: socket.socket) -> None:
        self.made = made
        self._frames = FrameReader()
        self._unread: list[bytes] = []

    def greets(self, hello: Hello) -> Welcome:
        """Open a session at a server without a secret."""
        self.made.sendall(MAGIC + frame(codec.encode(hello)))
        welcome = codec.decode_answer(self.next())
        assert isinstance(welcome, Welcome)
        return welcome

    def says(self, message: object) -> None:
        """Send a message."""
        self.made.sendall(frame(codec.encode(message)))

    def next(self) -> bytes:
        """The next message of the server."""
        while not self._unread:
            data = self.made.recv(65536)
            assert data, "it closed the connection"
            self._unread += self._frames.feed(data)
        return self._unread.pop(0)
