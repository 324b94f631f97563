"""A store's connections on plain sockets, all in one epoll set.

The server's speed stands on this. For each request, a transport of asyncio or uvloop costs more than reading and
executing the request; and taking up the requests of many clients in three sweeps (read all, execute all, write all)
keeps the interpreter in the processor's caches, where going to the kernel and back for each of them does not.

Everything here runs on the store's thread. `serving` has the laws of what is served.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import time

from rallypoint.base.log import get_logger
from rallypoint.store.carrying import Surroundings, peer_of, ready_to_listen, say_starvation
from rallypoint.store.serving import Connection, ServedTable

_logger = get_logger(__name__)

_PIECE = 64 * 1024
_MOST_EVENTS = 1024
_OUT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

IN, OUT = select.EPOLLIN, select.EPOLLOUT


class PolledSockets:
    """A store and the connections to it; see `carrying.Carrier`."""

    def __init__(self, around: Surroundings) -> None:
        self.served = ServedTable(around.lines)
        self.epoll = select.epoll()
        self.by_descriptor: dict[int, PolledConnection] = {}
        self._around = around
        self._woken = False
        self._accept_again_at = math.inf
        self.epoll.register(around.wake, IN)
        if around.listener is not None:
            ready_to_listen(around.listener)
            self.epoll.register(around.listener, IN)

    def serve(self) -> None:
        """Serve until somebody writes to the eventfd."""
        self._woken = False
        while not self._woken:
            pause = self._accept_again_at - time.monotonic()
            self._sweep(None if pause == math.inf else max(0.0, pause))

    def turn(self) -> bool:
        """Do some of what there is to do, without waiting; whether there was anything."""
        return self._sweep(0)

    def adopt(self, client: socket.socket, data: bytes = b"") -> None:
        """Serve a socket that is connected already, and from which this has been read."""
        client.setblocking(False)
        connection = PolledConnection(client, self)
        if data:
            self._execute([(connection, data)])

    def close(self) -> None:
        """End all connections."""
        self.served.close()
        self.epoll.close()

    def free(self) -> None:
        """Nothing is left to do: the interpreter gives the memory back."""

    def _sweep(self, pause: float | None) -> bool:
        """Look once at all that is ready, after so many seconds at the latest."""
        events = self.epoll.poll(pause, _MOST_EVENTS)
        arrived: list[tuple[PolledConnection, bytes]] = []
        for descriptor, event in events:
            connection = self.by_descriptor.get(descriptor)
            if connection is None:
                self._look_at_others(descriptor)
                continue
            if event & OUT and connection.resume():
                arrived.append((connection, b""))  # requests of which the replies had no room may be waiting
            if event == OUT:
                continue
            try:
                data = connection.receive(_PIECE)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if data:
                arrived.append((connection, data))
            else:
                connection.abort()
        self._execute(arrived)
        if time.monotonic() >= self._accept_again_at:
            self._accept_again()
        return bool(events)

    def _execute(self, arrived: list[tuple[PolledConnection, bytes]]) -> None:
        for connection, data in arrived:
            try:
                connection.serve(data)
            except Exception:
                _logger.exception("a defect in the store ends the connection from %s", connection.peer())
                connection.abort()
        self.served.flush()

    def _look_at_others(self, descriptor: int) -> None:
        """What is ready is no connection."""
        if descriptor == self._around.wake:
            os.eventfd_read(descriptor)
            self._woken = True
        elif self._around.listener is not None and descriptor == self._around.listener.fileno():
            self._accept(self._around.listener)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_MEANS:
                    say_starvation(self._around, str(error.strerror))
                    self.epoll.unregister(listener)
                    self._accept_again_at = time.monotonic() + self._around.retry
                return
            self.adopt(client)

    def _accept_again(self) -> None:
        self._accept_again_at = math.inf
        if self._around.listener is not None:
            self.epoll.register(self._around.listener, IN)


class PolledConnection(Connection):
    """One client's connection, on a socket of its own."""

    __slots__ = ("_send", "_sockets", "receive", "socket")

    def __init__(self, client: socket.socket, sockets: PolledSockets) -> None:
        super().__init__(sockets.served)
        self.socket = client
        self._sockets = sockets
        self._send = client.send
        self.receive = client.recv
        sockets.epoll.register(client, IN)
        sockets.by_descriptor[client.fileno()] = self
        self._served.connections.add(self)

    def write(self, replies: bytes | memoryview) -> None:
        if self._full:
            self._backlog.append(replies)
            return
        try:
            sent = self._send(replies)
        except BlockingIOError:
            sent = 0
        except OSError:  # it is going, and reading will say so
            return
        if sent < len(replies):
            self._full = True
            self._backlog.appendleft(memoryview(replies)[sent:])
            self._sockets.epoll.modify(self.socket, OUT)

    def resume(self) -> bool:
        """There is room again; whether it was enough for all that waited, so that requests can be served again."""
        self._full = False
        while self._backlog and not self._full:
            self.write(self._backlog.popleft())
        if self._full:
            return False
        if self._over:
            self.abort()
            return False
        self._sockets.epoll.modify(self.socket, IN)
        return True

    def finish(self) -> None:
        if not self._backlog:
            self.abort()

    def abort(self) -> None:
        self.leave()
        self._backlog.clear()
        self._served.connections.discard(self)
        if self._sockets.by_descriptor.pop(self.socket.fileno(), None) is not None:
            self._sockets.epoll.unregister(self.socket)
            self.socket.close()

    def peer(self) -> str:
        return peer_of(self.socket)
