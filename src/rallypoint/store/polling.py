"""A store's connections on plain sockets, all in one poller.

The server's speed stands on this. For each request, a transport of asyncio or uvloop costs more than reading and
executing the request; and handling the requests of many clients in three sweeps (read all, execute all, write all)
keeps the interpreter in the processor's caches, where going to the kernel and back for each of them does not.

Everything here runs on the store's thread. `serving` has the laws of what is served. In each poll those who have more
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

from rallypoint.base.descriptors import connection_limit
from rallypoint.base.log import get_logger
from rallypoint.base.peer_user import Peer, PeerUsers
from rallypoint.store.guard import SINGLE_ADDRESS_BITS, Network, networks, packed_address, shown_peers
from rallypoint.store.refusals import Reason, refusal
from rallypoint.store.serving import IN, OUT, ServedTable, StoreConnection
from rallypoint.store.transport_context import (
    NO_RESOURCES,
    TransportContext,
    log_refusal,
    peer_of,
    raise_descriptor_limit,
    set_options,
)

_logger = get_logger(__name__)

_READ_SIZE = 64 * 1024
_MAX_EVENTS = 1024
_MAX_ACCEPTED = 256
_BUSY_TIME = 0.002
"""Seconds of a sweep for those who have more to do than a slice."""
_CLEAR_STEPS = 256
"""Keys in each sweep that those are taken from who wait no longer."""

_GONE = select.POLLHUP | select.POLLERR


class PollingTransport:
    """A store and the connections to it; see `transport.StoreTransport`."""

    def __init__(self, context: TransportContext) -> None:
        self.served = ServedTable(context.log_lines, context.guard)
        self._context = context
        self._peers: Sequence[str] | None = None
        self._users = PeerUsers()
        self._networks: list[Network] | None = None
        self._addresses: frozenset[bytes] = frozenset()
        """Single addresses that may connect; `_networks` has the others, or is None where all may."""
        self._note_address(context.guard.peers)
        self._descriptors = connection_limit()
        self._wakeup_seen = False
        self._at_connection_limit = False
        self._cleanup_pending = False  # something must be tidied up
        self._accept_again_at = math.inf
        self.served.poller.register(context.wakeup_fd, IN)
        if context.listener is not None:
            set_options(context.listener, context.guard)
            self.served.poller.register(context.listener, IN)

    def serve(self) -> None:
        self._wakeup_seen = False
        while not self._wakeup_seen:
            self._poll_once(self._pause())

    def run_once(self) -> bool:
        return self._poll_once(0)

    def add_connection(self, client: socket.socket, data: bytes = b"") -> None:
        set_options(client, self._context.guard)
        if not self._may_connect(client):
            return
        connection = StoreConnection(client, self.served)
        if data:
            self._execute([(connection, data)])

    def set_peers(self, peers: Sequence[str] | None) -> None:
        self._note_address(peers)
        for connection in list(self.served.connections.values()):
            if not self._is_peer(connection.socket):
                connection.refuse(refusal(Reason.NOT_A_PEER, limit=shown_peers(peers)))

    def close(self) -> None:
        self.served.close()

    def release_memory(self) -> None:
        """Nothing is left to do: the interpreter gives the memory back."""

    def _poll_once(self, pause: float | None) -> bool:
        """Look once at all that is ready, after so many seconds at the latest; whether there was anything to do."""
        busy = bool(self.served.busy) or self._cleanup_pending
        events = self.served.poller.poll(0 if busy else pause, _MAX_EVENTS)
        arrived: list[tuple[StoreConnection, bytes]] = []
        for descriptor, event in events:
            connection = self.served.connections.get(descriptor)
            if connection is None:
                self._on_other_descriptor(descriptor)
                continue
            if connection.busy:
                if event & _GONE:
                    connection.abort()
                continue
            if event & OUT and connection.resume():
                arrived.append((connection, b""))  # requests of which the replies had no room may be waiting
            if event == OUT:
                continue
            try:
                data = connection.receive(_READ_SIZE)
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
            self._serve_backlogged()
        self._cleanup_pending = self.served.table.clear(_CLEAR_STEPS)
        self._run_timers()
        return bool(events) or busy or bool(self.served.busy) or self._cleanup_pending

    def _execute(self, arrived: list[tuple[StoreConnection, bytes]]) -> None:
        for connection, data in arrived:
            self._serve(connection, data)
        self.served.flush()

    def _serve(self, connection: StoreConnection, data: bytes) -> None:
        try:
            connection.serve(data)
        except Exception:
            _logger.exception("a defect in the store ends the connection from %s", peer_of(connection.socket))
            connection.abort()

    def _serve_backlogged(self) -> None:
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

    def _on_other_descriptor(self, descriptor: int) -> None:
        """What is ready is no connection."""
        if descriptor == self._context.wakeup_fd:
            os.read(descriptor, 4096)
            self._wakeup_seen = True
        elif self._context.listener is not None and descriptor == self._context.listener.fileno():
            self._accept(self._context.listener)

    # Who may connect, and how many

    def _accept(self, listener: socket.socket) -> None:
        allowed = self._context.guard.connections
        for _ in range(_MAX_ACCEPTED):
            if allowed and len(self.served.connections) >= allowed:
                self._pause_accepting(listener, 0)
                return
            try:
                client, _ = listener.accept()
            except OSError as error:
                if error.errno in NO_RESOURCES:
                    self._pause_accepting(listener, error.errno or 0)
                return
            last = client.fileno() >= self._descriptors - 1
            if self._may_connect(client):
                client.setblocking(False)
                StoreConnection(client, self.served)
            if last:
                self._pause_accepting(listener, errno.EMFILE)
                return

    def _pause_accepting(self, listener: socket.socket, error: int) -> None:
        """Nobody is accepted for a while: there are no means, or with 0 as many connections as there may be."""
        before, self._descriptors = self._descriptors, raise_descriptor_limit(self._context, error, self._descriptors)
        if self._descriptors != before:
            return  # those who wait are reported again
        self.served.poller.unregister(listener)
        self._at_connection_limit = error == 0
        self._accept_again_at = time.monotonic() + self._context.retry

    def _may_connect(self, client: socket.socket) -> bool:
        if not self._is_peer(client):
            error = refusal(Reason.NOT_A_PEER, limit=shown_peers(self._peers))
        elif self._context.guard.own_user and self._users.peer_of(client) is Peer.OTHER_USER:
            error = refusal(Reason.OTHER_USER)
        else:
            return True
        log_refusal(self._context.log_lines, peer_of(client), error)
        client.close()
        return False

    def _is_peer(self, client: socket.socket) -> bool:
        if self._networks is None or client.family not in {socket.AF_INET, socket.AF_INET6}:
            return True
        try:
            address = packed_address(client.getpeername()[0])
        except OSError:
            return True  # it has left already, and reading will show it
        return address in self._addresses or any(address in each for each in self._networks)

    def _note_address(self, peers: Sequence[str] | None) -> None:
        found = networks(peers)
        self._peers = peers
        self._networks = None if found is None else [each for each in found if each.bits < SINGLE_ADDRESS_BITS]
        self._addresses = frozenset(each.address for each in found or () if each.bits == SINGLE_ADDRESS_BITS)

    # Time passes

    def _pause(self) -> float | None:
        """Seconds until something must be done that no event reports."""
        at = self._accept_again_at
        if self.served.unvalidated and self._context.guard.validate_timeout:
            at = min(at, next(iter(self.served.unvalidated.values())) + self._context.guard.validate_timeout)
        return None if at == math.inf else max(0.0, at - time.monotonic())

    def _run_timers(self) -> None:
        now = time.monotonic()
        greeting = self._context.guard.validate_timeout
        while self.served.unvalidated:
            oldest, since = next(iter(self.served.unvalidated.items()))
            if not oldest.validated and (not greeting or now - since < greeting):
                break
            del self.served.unvalidated[oldest]
            if not oldest.validated:
                oldest.refuse(refusal(Reason.SILENT, limit=greeting))
        room = self._at_connection_limit and len(self.served.connections) < self._context.guard.connections
        if room or now >= self._accept_again_at:
            self._resume_accepting(now)

    def _resume_accepting(self, now: float) -> None:
        self._at_connection_limit = False
        self._accept_again_at = now + self._context.retry
        with contextlib.suppress(OSError):
            os.close(next_one := os.dup(self._context.wakeup_fd))
            if next_one < self._descriptors and self._context.listener is not None:
                self.served.poller.register(self._context.listener, IN)
                self._accept_again_at = math.inf
