"""A store's connections on plain sockets, all in one epoll set that the loop watches as a single descriptor.

The server's speed stands on this. For each request, a transport of asyncio or uvloop costs more than reading and
executing the request; and taking up the requests of many clients in three sweeps (read all, execute all, write all)
keeps the interpreter in the processor's caches, where going to the kernel and back for each of them does not.

Everything here runs on the loop's thread. `serving` has the laws of what is served.
"""

from __future__ import annotations

import errno
import select
import socket

from rallypoint.base.log import get_logger
from rallypoint.store.carrying import RETRY, Later, log_starvation, peer_of, ready_to_listen
from rallypoint.store.serving import Connection, ServedTable

_logger = get_logger(__name__)

_PIECE = 64 * 1024
_MOST_EVENTS = 1024
_OUT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

IN, OUT = select.EPOLLIN, select.EPOLLOUT


class PolledSockets:
    """A listening socket and the connections made through it; see `carrying.Carrier`.

    Args:
        listener: a listening socket; it is closed in the end.
        served: what the connections use.
        later: calls a function after so many seconds.
    """

    def __init__(self, listener: socket.socket, served: ServedTable, later: Later) -> None:
        self.served = served
        self.epoll = select.epoll()
        self.by_descriptor: dict[int, PolledConnection] = {}
        self._listener = listener
        self._later = later
        ready_to_listen(listener)
        self.epoll.register(listener, IN)

    def fileno(self) -> int:
        """A descriptor that is readable while there is something to do."""
        return self.epoll.fileno()

    def ready(self) -> None:
        """Do what there is to do."""
        by_descriptor = self.by_descriptor
        arrived: list[tuple[PolledConnection, bytes]] = []
        for descriptor, event in self.epoll.poll(0, _MOST_EVENTS):
            connection = by_descriptor.get(descriptor)
            if connection is None:
                self._accept()
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
        for connection, data in arrived:
            try:
                connection.serve(data)
            except Exception:
                _logger.exception("a defect in the store ends the connection from %s", connection.peer())
                connection.abort()
        self.served.flush()

    def adopt(self, client: socket.socket) -> None:
        """Serve a socket that is connected already."""
        client.setblocking(False)
        PolledConnection(client, self)

    def close(self) -> None:
        """End all connections and stop listening."""
        self.served.close()
        self._listener.close()
        self.epoll.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_MEANS:
                    log_starvation(str(error.strerror))
                    self.epoll.unregister(self._listener)
                    self._later(RETRY, self._accept_again)
                return
            self.adopt(client)

    def _accept_again(self) -> None:
        if not self.served.closed:
            self.epoll.register(self._listener, IN)


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
