"""The state that all control connections of a server share."""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rallypoint.base.descriptors import connection_limit
from rallypoint.base.log import get_logger
from rallypoint.coordinator.connection_limiter import ConnectionLimiter
from rallypoint.coordinator.jobs import Shares
from rallypoint.protocol import codec
from rallypoint.protocol.messages import CollectedPart

if TYPE_CHECKING:
    import socket

    from rallypoint.base.loop import LoopThread
    from rallypoint.base.peer_user import Peer, SocketName
    from rallypoint.base.tls import ControlTls
    from rallypoint.coordinator.job_directory import ServedJobs
    from rallypoint.coordinator.peer_access import PeerAccess
    from rallypoint.protocol.handshake import Keys
    from rallypoint.protocol.messages import Notification
    from rallypoint.protocol.observation import WatcherNotification

log = get_logger(__name__)


class Connection(Protocol):
    """One control connection, as its server sees it. On the loop's thread."""

    def send(self, payload: bytes) -> None:
        """Send a frame."""
        ...

    def send_collected(self, payload: bytes) -> None:
        """Send a frame with what another node has collected."""
        ...

    def finish(self, why: str) -> None:
        """Send what is left and the reason for the end; take no more requests."""
        ...

    def abort(self) -> None:
        """Disconnect at once."""
        ...

    def evict(self) -> None:
        """End a connection that has not become a session, to make room for newer ones."""
        ...


class ConnectionContext:
    """Created and used on the loop's thread, except `post`. For the arguments see `ControlServer`."""

    def __init__(
        self,
        jobs: ServedJobs,
        connections: set[Connection],
        keys: Keys | None,
        tls: ControlTls | None,
        fallback: Callable[[socket.socket, bytes], None] | None,
        has_local_nodes: bool,
        loop: LoopThread,
    ) -> None:
        self.jobs = jobs
        self.connections = connections
        self.keys = keys
        self.tls = tls
        self.fallback = fallback
        self.has_local_nodes = has_local_nodes
        self.limiter = ConnectionLimiter()
        self.shares = Shares() if jobs.job is None else None
        self._access: PeerAccess | None = None
        self.emptied = asyncio.Event()
        """Set when the last connection is gone."""
        self._loop = loop
        self._outbox: deque[tuple[Connection, Callable[[bytes], None], bytes]] = deque()
        self._most: float = math.inf
        """The number of connections at which the descriptors for connections were last used up."""
        self._posting = False
        self._last_encoded: tuple[Notification | WatcherNotification, bytes] | None = None
        """The last notification, and its bytes: often many receive the same."""

    @staticmethod
    def nonce() -> bytes:
        """Bytes that no other handshake has had."""
        return os.urandom(16)

    @property
    def is_open(self) -> bool:
        """Whether peers prove nothing: there is neither a secret nor TLS."""
        return self.keys is None and self.tls is None

    def peer_between(self, own: SocketName, peer: SocketName) -> Peer:
        """Who is at the other end of a connection, by the names of both ends."""
        if self._access is None:
            from rallypoint.coordinator.peer_access import PeerAccess

            self._access = PeerAccess()
        return self._access.peer_between(own, peer)

    def has_room(self, descriptor: int) -> bool:
        """Whether one more connection, with this descriptor, can stay; the oldest that is no session may make room."""
        if descriptor >= connection_limit():  # those below are in use: there are as many connections as there may be
            self._most = len(self.connections)
        return len(self.connections) < self._most or self.limiter.make_room()

    def opened(self, connection: Connection) -> None:
        """A connection has been made."""
        self.connections.add(connection)
        self.emptied.clear()
        self.limiter.add(connection, connection.evict)

    def closed(self, connection: Connection) -> None:
        """A connection is gone. Idempotent."""
        self.connections.discard(connection)
        self.limiter.remove(connection)
        if not self.connections:
            self.emptied.set()

    def post(self, connection: Connection, notification: Notification | WatcherNotification) -> None:
        """Write a notification on the loop's thread, in the order of the calls; from any thread.

        The loop is woken once for all that it has not handled yet.
        """
        told = self._last_encoded
        if told is None or told[0] is not notification:
            told = self._last_encoded = (notification, codec.encode(notification))
        send = connection.send_collected if isinstance(notification, CollectedPart) else connection.send
        self._outbox.append((connection, send, told[1]))
        if not self._posting:
            self._posting = True
            self._loop.call(self._write_posted)

    def _write_posted(self) -> None:
        self._posting = False  # first: an append from now on causes another call
        while self._outbox:
            connection, send, payload = self._outbox.popleft()
            try:
                send(payload)
            except Exception:  # of this connection alone: the others' notifications follow
                log.exception("a notification could not be sent; the control connection is closed")
                connection.abort()
