"""A server for one test, a link's deliveries, nodes that are only sockets, and tests on a loop."""

from __future__ import annotations

import asyncio
import functools
import queue
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from typing import Any, ParamSpec

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, listening_socket
from rallypoint.base.tls import ControlTls
from rallypoint.control.client.dialing import DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator.jobs import ServedJobs
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, FrameReader, frame
from rallypoint.control.protocol.handshake import Hello, Keys, Welcome
from rallypoint.control.protocol.messages import Deliver, LinkOpened, Notification

P = ParamSpec("P")
TIMEOUT = 120.0


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@contextmanager
def serving(
    jobs: ServedJobs,
    keys: Keys | None = None,
    tls: ControlTls | None = None,
    fallback: Callable[[socket.socket, bytes], None] | None = None,
) -> Iterator[ControlServer]:
    """A server on loopback. No connection outlives it."""
    server = ControlServer(jobs, listening_socket("127.0.0.1", 0), keys=keys, tls=tls, fallback=fallback)
    try:
        yield server
    finally:
        server.close()
        assert not server.connections


@contextmanager
def linked(
    port: int,
    settings: Settings,
    deliver: Deliver,
    *,
    key: bytes | None = None,
    tls: ControlTls | None = None,
    number: int = 0,
) -> Iterator[TcpLink]:
    """A node's link to a port of loopback."""
    place = FixedEndpoint(DialTarget(Endpoint("127.0.0.1", port), key, tls))
    with closing(TcpLink(place, settings, NodeId("", 1, number), deliver, Deadline.after(TIMEOUT))) as link:
        yield link


class Heard(queue.SimpleQueue[Notification]):
    """The deliveries of a link, in order, without `LinkOpened`."""

    def take(self, notice: Notification) -> None:
        """Deliver a notification."""
        if not isinstance(notice, LinkOpened):
            self.put(notice)


class SocketNode:
    """A node on a plain socket, for messages that no link would send."""

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
            assert data, "the server closed the connection"
            self._unread += self._frames.feed(data)
        return self._unread.pop(0)


@contextmanager
def connected(port: int, hello: Hello | None = None, buffer: int = 0) -> Iterator[SocketNode]:
    """A node on a socket with a receive buffer of this size. It greets with `hello`, if any."""
    with socket.socket() as made:
        if buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.settimeout(TIMEOUT)
        made.connect(("127.0.0.1", port))
        node = SocketNode(made)
        if hello is not None:
            node.greets(hello)
        yield node
