"""A store's connections on plain sockets, all in one epoll set.

The server's speed stands on this. For each request, a transport of asyncio or uvloop costs more than reading and
executing the request; and taking up the requests of many clients in three sweeps (read all, execute all, write all)
keeps the interpreter in the processor's caches, where going to the kernel and back for each of them does not.

Everything here runs on the store's thread. `serving` has the laws of what is served. In each sweep those who have more
to do than a slice come last, for a few milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import time
from collections.abc import Sequence

from rallypoint.base.log import get_logger
from rallypoint.store.carrying import (
    OUT_OF_MEANS,
    Surroundings,
    first_descriptors,
    more_descriptors,
    peer_of,
    say_refusal,
    set_options,
)
from rallypoint.store.guard import WHOLE, Network, networks, no_peer, packed_address, silent
from rallypoint.store.serving import Connection, ServedTable

_logger = get_logger(__name__)

_PIECE = 64 * 1024
_MOST_EVENTS = 1024
_MOST_ACCEPTED = 256
_BUSY_TIME = 0.002
"""Seconds of a sweep for those who have more to do than a slice."""
_CLEARED = 256
"""Keys in each sweep that those are taken from who wait no longer."""

IN, OUT, GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class PolledSockets:
    """A store and the connections to it; see `carrying.Carrier`."""

    def __init__(self, around: Surroundings) -> None:
        self.served = ServedTable(around.lines, around.guard)
        self.epoll = select.epoll()
        self.by_descriptor: dict[int, PolledConnection] = {}
        self.young: dict[PolledConnection, float] = {}
        """When those came who had not greeted when this was last looked at, the oldest first."""
        self._around = around
        self._peers: Sequence[str] | None = None
        self._networks: list[Network] | None = None
        self._addresses: frozenset[bytes] = frozenset()
        """Single addresses that may connect; `_networks` has the others, or is None where all may."""
        self._remember(around.guard.peers)
        self._descriptors = first_descriptors()
        self._woken = False
        self._crowded = False
        self._left_over = False  # something must be tidied up
        self._accept_again_at = math.inf
        self.epoll.register(around.wake, IN)
        if around.listener is not None:
            set_options(around.listener, around.guard)
            self.epoll.register(around.listener, IN)

    def serve(self) -> None:
        """Serve until somebody writes to the eventfd."""
        self._woken = False
        while not self._woken:
            self._sweep(self._pause())

    def turn(self) -> bool:
        """Do some of what there is to do, without waiting; whether there was anything."""
        return self._sweep(0)

    def adopt(self, client: socket.socket, data: bytes = b"") -> None:
        """Serve a socket that is connected already, and from which this has been read."""
        set_options(client, self._around.guard)
        if not self._may_connect(client):
            return
        connection = PolledConnection(client, self)
        if data:
            self._execute([(connection, data)])

    def admit(self, peers: Sequence[str] | None) -> None:
        """From now on only these may be connected; None: all may."""
        self._remember(peers)
        for connection in list(self.by_descriptor.values()):
            if not self._is_peer(connection.socket):
                connection.refuse(no_peer(peers or ()))

    def close(self) -> None:
        """End all connections."""
        self.served.close()
        self.epoll.close()

    def free(self) -> None:
        """Nothing is left to do: the interpreter gives the memory back."""

    def _sweep(self, pause: float | None) -> bool:
        """Look once at all that is ready, after so many seconds at the latest; whether there was anything to do."""
        busy = bool(self.served.busy) or self._left_over
        events = self.epoll.poll(0 if busy else pause, _MOST_EVENTS)
        arrived: list[tuple[PolledConnection, bytes]] = []
        for descriptor, event in events:
            connection = self.by_descriptor.get(descriptor)
            if connection is None:
                self._look_at_others(descriptor)
                continue
            if connection.busy:
                if event & GONE:
                    connection.abort()
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
        if busy:
            self._serve_busy()
        self._left_over = self.served.table.clear(_CLEARED)
        self._look_at_time()
        return bool(events) or busy or bool(self.served.busy) or self._left_over

    def _execute(self, arrived: list[tuple[PolledConnection, bytes]]) -> None:
        for connection, data in arrived:
            self._serve(connection, data)
        self.served.flush()

    def _serve(self, connection: Connection, data: bytes) -> None:
        try:
            connection.serve(data)
        except Exception:
            _logger.exception("a defect in the store ends the connection from %s", connection.peer())
            connection.abort()

    def _serve_busy(self) -> None:
        """Give those a turn who have more to do than one slice, one after the other, for some time."""
        busy = self.served.busy
        end = time.monotonic() + _BUSY_TIME
        while busy:
            connection = busy.popleft()
            if not connection.busy:  # it has left
                continue
            connection.busy = False
            self._serve(connection, b"")
            self.served.flush()
            if time.monotonic() >= end:
                break

    def _look_at_others(self, descriptor: int) -> None:
        """What is ready is no connection."""
        if descriptor == self._around.wake:
            os.eventfd_read(descriptor)
            self._woken = True
        elif self._around.listener is not None and descriptor == self._around.listener.fileno():
            self._accept(self._around.listener)

    # Who may connect, and how many

    def _accept(self, listener: socket.socket) -> None:
        allowed = self._around.guard.connections
        for _ in range(_MOST_ACCEPTED):
            if allowed and len(self.by_descriptor) >= allowed:
                self._rest(listener, 0)
                return
            try:
                client, _ = listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_MEANS:
                    self._rest(listener, error.errno or 0)
                return
            last = client.fileno() >= self._descriptors - 1
            if self._may_connect(client):
                client.setblocking(False)
                PolledConnection(client, self)
            if last:
                self._rest(listener, errno.EMFILE)
                return

    def _rest(self, listener: socket.socket, error: int) -> None:
        """Nobody is accepted for a while: there are no means, or with 0 as many connections as there may be."""
        before, self._descriptors = self._descriptors, more_descriptors(self._around, error, self._descriptors)
        if self._descriptors != before:
            return  # whoever waits is told of again
        self.epoll.unregister(listener)
        self._crowded = error == 0
        self._accept_again_at = time.monotonic() + self._around.retry

    def _may_connect(self, client: socket.socket) -> bool:
        if self._is_peer(client):
            return True
        say_refusal(self._around.lines, peer_of(client), no_peer(self._peers or ()))
        client.close()
        return False

    def _is_peer(self, client: socket.socket) -> bool:
        if self._networks is None or client.family not in {socket.AF_INET, socket.AF_INET6}:
            return True
        try:
            address = packed_address(client.getpeername()[0])
        except OSError:
            return True  # it has gone already, and reading will say so
        return address in self._addresses or any(address in each for each in self._networks)

    def _remember(self, peers: Sequence[str] | None) -> None:
        found = networks(peers)
        self._peers = peers
        self._networks = None if found is None else [each for each in found if each.bits < WHOLE]
        self._addresses = frozenset(each.address for each in found or () if each.bits == WHOLE)

    # Time passes

    def _pause(self) -> float | None:
        """How long nothing needs to be done that no event tells of."""
        at = self._accept_again_at
        if self.young and self._around.guard.greeting:
            at = min(at, next(iter(self.young.values())) + self._around.guard.greeting)
        return None if at == math.inf else max(0.0, at - time.monotonic())

    def _look_at_time(self) -> None:
        now = time.monotonic()
        greeting = self._around.guard.greeting
        while self.young:
            oldest, since = next(iter(self.young.items()))
            if not oldest.greeted and (not greeting or now - since < greeting):
                break
            del self.young[oldest]
            if not oldest.greeted:
                oldest.refuse(silent(greeting))
        room = self._crowded and len(self.by_descriptor) < self._around.guard.connections
        if room or now >= self._accept_again_at:
            self._listen_again(now)

    def _listen_again(self, now: float) -> None:
        self._crowded = False
        self._accept_again_at = now + self._around.retry
        with contextlib.suppress(OSError):
            os.close(next_one := os.dup(self._around.wake))
            if next_one < self._descriptors and self._around.listener is not None:
                self.epoll.register(self._around.listener, IN)
                self._accept_again_at = math.inf


class PolledConnection(Connection):
    """One client's connection, on a socket of its own."""

    __slots__ = ("_send", "_sockets", "_watched", "receive", "socket")

    def __init__(self, client: socket.socket, sockets: PolledSockets) -> None:
        super().__init__(sockets.served)
        self.socket = client
        self._sockets = sockets
        self._send = client.send
        self._watched = IN
        self.receive = client.recv
        sockets.epoll.register(client, IN)
        sockets.by_descriptor[client.fileno()] = self
        sockets.young[self] = time.monotonic()
        self._served.connections.add(self)

    def serve(self, data: bytes) -> None:
        super().serve(data)
        if (self._watched != IN or self.busy) and self.socket.fileno() >= 0:
            self._watch(OUT if self._full else 0 if self.busy else IN)

    def write(self, replies: bytes | memoryview) -> None:
        if self._full:
            self._backlog.append(replies)
            return
        try:
            sent = self._send(replies)
        except BlockingIOError:
            sent = 0
        except OSError:  # it is going, and reading will say so
            self._deaf = True
            return
        if sent < len(replies):
            self._full = True
            self._backlog.appendleft(memoryview(replies)[sent:])
            self._watch(OUT)

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
        return True

    def finish(self) -> None:
        if not self._backlog:
            self.abort()

    def abort(self) -> None:
        self.leave()
        self._backlog.clear()
        self._served.connections.discard(self)
        self._sockets.young.pop(self, None)
        if self._sockets.by_descriptor.pop(self.socket.fileno(), None) is not None:
            self._sockets.epoll.unregister(self.socket)
            self.socket.close()

    def peer(self) -> str:
        return peer_of(self.socket)

    def _watch(self, events: int) -> None:
        if events != self._watched:
            self._watched = events
            self._sockets.epoll.modify(self.socket, events)
