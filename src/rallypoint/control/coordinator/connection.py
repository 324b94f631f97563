"""The connections of a control server, as bytes: who may come, greeting, frames, what is to be sent.

Whom a control plane without a secret serves is decided by the user at the other end of a connection. Laws:

1. On its own machine it serves its own user and root; any other user is refused before anything else happens.
2. Commands, which end or change a job, are taken from these only. A node on another machine may do so if it is the
   job's (`Coordinator.is_stranger`).
3. Where the kernel cannot be asked whose a connection is, nobody counts as this user; that is logged once.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.descriptors import connection_limit, limits
from rallypoint.base.endpoint import shorten_retransmission, unmapped_address, usable_address
from rallypoint.base.log import RateLimitedLog, get_logger
from rallypoint.base.netlink import Peer, PeerUsers, SocketName
from rallypoint.control.coordinator.session import HEARTBEAT, ServerSession
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, TLS_HANDSHAKE, FrameReader, frame
from rallypoint.control.protocol.errors import FrameError
from rallypoint.control.protocol.messages import CollectedPart

if TYPE_CHECKING:
    from rallypoint.base.loop import LoopThread
    from rallypoint.base.tls import ControlTls, TlsChannel
    from rallypoint.control.coordinator.jobs import ServedJobs, Shares
    from rallypoint.control.protocol.handshake import Hello, Keys
    from rallypoint.control.protocol.messages import Notification
    from rallypoint.control.protocol.observation import WatcherNotification

log = get_logger(__name__)


HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a connection has to become a session."""

_WRITE_BUFFER_LIMIT, _WATCHER_LIMIT = 4 * 1024 * 1024, 16 * 1024 * 1024
"""Bytes that a node, or a watcher, may leave unread before it counts as gone."""
_COLLECTED_LIMIT = 64 * 1024 * 1024
"""Bytes of what was collected from other nodes that a node may leave unread besides; what is beyond is left out."""

_HEARTBEAT_FRAME = frame(HEARTBEAT)
"""A heartbeat without signature: most of the traffic of a large job, and the same bytes each time."""

_MANY_SESSIONS = 256
"""The number of connections above which a server requests fewer heartbeats, and answers every second one of each. These
suffice to show that it is alive.
"""

_UNKNOWN = "an unknown address"

_TLS_ONLY = (
    "this control plane speaks TLS only; give this node tls_cert, tls_key and tls_ca in --rdzv-conf, as the others"
)


OTHER_USER_REFUSED = (
    "without a secret, this control plane serves only its own user and root on its machine, and this is another user; "
    "give all nodes and commands of the job the same RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)"
)


class ControlConnection(asyncio.Protocol):
    """An unauthenticated connection first, a node's session after the handshake."""

    def __init__(self, connections: Connections) -> None:
        self._all = connections
        self._reader = FrameReader()
        self._session: ServerSession
        """Set by `connection_made`."""
        self._channel: TlsChannel | None = None
        self._kind_known = False
        """Whether the first byte has arrived."""
        self._magic_sent = False
        self._takes_plain = False
        """Whether this is the session of a node, whose frames are not signed."""
        self._done = False
        self._limit = _WRITE_BUFFER_LIMIT
        self._collected = 0
        """Bytes of what was collected that may be unread: those sent since nothing was unread."""
        self._tenant = ""
        """Whose share of the server it takes (`shares`); empty before the handshake."""
        self._unread = b""
        """What has arrived and waits until its tenant may use the loop again."""
        self._is_own_user = False
        """Whether it is known that a process of our own user, or of root, is at the other end."""

    # asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection has been made."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        peer = transport.get_extra_info("peername")
        self._peer_host = unmapped_address(str(peer[0])) if isinstance(peer, tuple) else ""
        self._peer_address = f"{self._peer_host}:{peer[1]}" if self._peer_host else _UNKNOWN
        served, host = self._all.served, self._peer_host.partition("%")[0] or _UNKNOWN
        self._session = ServerSession(served.jobs, served.keys, os.urandom(16), self, host)
        shorten_retransmission(transport.get_extra_info("socket"))
        if not self._all.has_room(transport.get_extra_info("socket").fileno()):
            self._all.limiter.log_refusal(
                "control connection from %s refused: no descriptor is left for it", self._peer
            )
            self._done = True
            transport.abort()  # without a word, so that it comes again
        self._all.opened(self)
        self._timeout = self._loop.call_later(HANDSHAKE_TIMEOUT, self._on_handshake_timeout)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        shares, begun = self._all.shares, 0.0
        if shares is not None and self._tenant:
            if self._unread or (wait := shares.wait(self._tenant)):
                self._read_later(data, 0.0 if self._unread else wait)
                return
            begun = self._loop.time()
        self._receive(data)
        if shares is not None and begun:
            shares.used(self._tenant, self._loop.time() - begun)

    def _read_later(self, data: bytes, wait: float) -> None:
        """Its tenant has used more than its share of the loop's time."""
        self._unread += data
        if wait:
            self._transport.pause_reading()
            self._loop.call_later(wait, self._read_now)

    def _read_now(self) -> None:
        data, self._unread = self._unread, b""
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self.data_received(data)

    def _receive(self, data: bytes) -> None:
        if not self._kind_known and data:
            self._kind_known = True
            if not self._begin(data):
                return
        if self._channel is not None and not self._done:
            data = self._decrypted(self._channel, data)
        if self._done:
            return
        session = self._session
        try:
            if data == _HEARTBEAT_FRAME and self._takes_plain and not self._reader.has_partial_frame:
                if (why := session.heartbeat()) is not None:
                    self._close(why)
                return
            for payload in self._reader.feed(data):
                was_open = session.is_open
                if (why := session.receive(payload)) is not None:
                    self._close(why)
                    return
                if session.is_open and not was_open:  # who only asks something has until the timeout
                    self._timeout.cancel()
                    self._all.limiter.remove(self)
        except (FrameError, codec.CodecError) as error:
            self._close(str(error))
        except Exception:
            log.exception("control connection from %s: a message could not be handled; it is closed", self._peer)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """The other side, or we, have disconnected."""
        self._timeout.cancel()
        how = "its connection was closed before it left" if error is None else f"its connection broke: {error}"
        self._session.detach(how)
        if self._all.shares is not None and self._tenant:
            self._all.shares.leave(self._tenant)
        self._all.closed(self)

    # The handshake, then the session

    def _begin(self, data: bytes) -> bool:
        """Detect from the first byte what kind of connection this is; returns whether it is one of ours."""
        first, tls = data[:1], self._all.served.tls
        for_fallback = first not in {TLS_HANDSHAKE, MAGIC[:1]} and self._all.served.fallback is not None
        if self._all.served.keys is None and not for_fallback and not self._admit():
            return False
        if first == TLS_HANDSHAKE:
            if tls is not None:
                from rallypoint.base.tls import TlsChannel

                self._channel = TlsChannel(tls)
                return True
            self._refuse("it speaks TLS, and this control plane does not; give it tls_cert, tls_key and tls_ca too")
            return False
        if first != MAGIC[:1] and self._all.served.fallback is not None:
            self._hand_over(data, self._all.served.fallback)
            return False
        if tls is not None:
            self._refuse(_TLS_ONLY)
            return False
        return True

    def _admit(self) -> bool:
        """Whether this peer, which proves nothing about the job, is served at all (the laws at the top)."""
        own, name = (self._transport.get_extra_info(each) for each in ("sockname", "peername"))
        # Without these two it has gone.
        peer = self._all.peer_between(own, name) if own and name else Peer.OTHER_USER
        self._is_own_user = peer is Peer.OWN_USER
        if peer is Peer.OTHER_USER and self._all.served.is_open:
            self._refuse(OTHER_USER_REFUSED)
            return False
        return True

    def _decrypted(self, channel: TlsChannel, data: bytes) -> bytes:
        from rallypoint.base.tls import TlsError

        try:
            plain = channel.receive(data)
        except TlsError as error:
            self._transport.write(channel.to_send())  # the alert that says why
            self._close(str(error))
            return b""
        self._transport.write(channel.to_send())
        if channel.objection is not None:
            self._refuse(channel.objection)
            return b""
        return plain

    def _hand_over(self, data: bytes, fallback: Callable[[socket.socket, bytes], None]) -> None:
        self._done = True
        self._timeout.cancel()
        self._all.closed(self)  # and with that it does not count as unauthenticated any more
        try:
            own = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
            fallback(own, data)
        except OSError as error:  # no descriptors, or no threads
            self._close(f"what else is served on this port cannot take it over: {error}")
        else:
            self._transport.abort()  # which closes our descriptor, and not the connection

    def _refuse(self, sentence: str) -> None:
        self._close(self._session.refuse(sentence))

    # What its session requires of it (`SessionOutput`)

    def describe(self, hello: Hello) -> SessionRecord:
        """The handshake is done."""
        if self._all.shares is not None:
            tenant = hello.job if self._all.served.keys is not None else self._peer_host.partition("%")[0] or _UNKNOWN
            self._all.shares.enter(tenant)
            self._tenant = tenant
        self._limit = _WATCHER_LIMIT if hello.is_watcher else _WRITE_BUFFER_LIMIT
        self._takes_plain = self._session.signers is None and not (hello.is_watcher or hello.only_greets)
        own = usable_address(unmapped_address(str(self._transport.get_extra_info("sockname")[0])))
        trusted = self._is_own_user or not self._all.served.is_open
        here = hello.node.pid == os.getpid() and hello.address == own and trusted
        return SessionRecord(
            hello.node,
            hello.address,
            own,
            self._peer_host and usable_address(self._peer_host),
            hello.settings,
            in_this_process=here,
            local=here and self._all.served.has_local_nodes,
            is_own_user=self._is_own_user,
            trusted=trusted,
            resumes=bool(hello.incarnation),
        )

    @property
    def answers_all(self) -> bool:
        """Whether there are few enough connections for that."""
        return len(self._all.open) <= _MANY_SESSIONS

    def post(self, notification: Notification | WatcherNotification) -> None:
        """Send a notification on the loop's thread, in the order of the calls; from any thread."""
        everyone = self._all
        told = everyone.last_encoded
        if told is None or told[0] is not notification:
            told = everyone.last_encoded = (notification, codec.encode(notification))
        everyone.outbox.append((self, isinstance(notification, CollectedPart), told[1]))
        if not everyone.posting:
            everyone.posting = True
            everyone.loop.call(everyone.write_posted)

    def disconnect(self, why: str) -> None:
        """The coordinator has ended the session; from any thread."""
        log.warning("control connection from %s is closed: %s", self._peer, why)
        self._loop.call_soon_threadsafe(self._end_session)

    def _end_session(self) -> None:
        if not self._done:
            self._session.end(self._session.end_reason)
        self.abort()

    # Sending and ending

    @property
    def _peer(self) -> str:
        name = self._session.node_name
        return f"{self._peer_address} ({name})" if name else self._peer_address

    def send_collected(self, payload: bytes) -> None:
        """Send what another node has collected: much of it at once does not mean that this one reads nothing."""
        if not self._transport.get_write_buffer_size():
            self._collected = 0
        if self._collected + len(payload) <= _COLLECTED_LIMIT:
            self._collected += len(payload)
            self.send(payload)

    def send(self, *payloads: bytes) -> None:
        """Send each as a frame, signed if the session's are, in one write. On the loop's thread."""
        signers = self._session.signers
        signed = payloads if signers is None else map(signers.outgoing.sign, payloads)
        data = b"".join((b"" if self._magic_sent else MAGIC, *map(frame, signed)))
        self._magic_sent = True
        if self._done or self._transport.is_closing():
            return
        if self._channel is not None:
            self._channel.send(data)
            data = self._channel.to_send()
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > self._limit + 2 * self._collected:  # TLS adds a little
            log.warning("control connection from %s does not read what it is sent; it is closed", self._peer)
            self._transport.abort()

    def finish(self, why: str) -> None:
        """Send what is left and the reason for the end; take no more requests, which would not be carried out."""
        if why and not self._done:
            self._session.end(why)
        self._done = True
        if self._channel is not None and not self._transport.is_closing():
            self._channel.close_notify()
            self._transport.write(self._channel.to_send())
        if not self._session.is_open:
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        """Disconnect at once."""
        self._transport.abort()

    def _close(self, why: str) -> None:
        self._done = True
        if not self._session.is_open:
            self._all.limiter.log_refusal("control connection from %s refused: %s", self._peer, why)
        else:
            log.warning("control connection from %s is closed: %s", self._peer, why)
        self._transport.close()

    def _on_handshake_timeout(self) -> None:
        if self._session.has_answered:
            self._done = True
            self._transport.close()
            return
        self._close(f"it said nothing that opens a session within {HANDSHAKE_TIMEOUT:.0f} s")

    def evict(self) -> None:
        """End a connection that has not become a session, to make room for newer ones."""
        self._close("too many connections are open that said nothing that opens a session; newer ones take its place")
        self.abort()


class Served(NamedTuple):
    """What a server serves, and to whom; see `ControlServer`."""

    jobs: ServedJobs
    keys: Keys | None
    tls: ControlTls | None
    fallback: Callable[[socket.socket, bytes], None] | None
    has_local_nodes: bool

    @property
    def is_open(self) -> bool:
        """Whether peers prove nothing: there is neither a secret nor TLS."""
        return self.keys is None and self.tls is None


class Connections:
    """All connections of one server: who may come, and what is to be sent. On the loop's thread."""

    def __init__(self, served: Served, loop: LoopThread) -> None:
        self.served = served
        self.open: set[ControlConnection] = set()
        self.limiter = ConnectionLimiter()
        self.shares: Shares | None = None
        """The shares of the tenants, if there are several."""
        if served.jobs.job is None:
            from rallypoint.control.coordinator.jobs import Shares

            self.shares = Shares()
        self.emptied = asyncio.Event()
        """Set when the last connection is gone."""
        self._users = PeerUsers()
        self._warned = False
        self.loop = loop
        self.outbox: deque[tuple[ControlConnection, bool, bytes]] = deque()
        self._most: float = math.inf
        """The number of connections at which the descriptors for connections were last used up."""
        self.posting = False
        self.last_encoded: tuple[Notification | WatcherNotification, bytes] | None = None
        """The last notification, and its bytes: often many receive the same."""

    def new(self) -> ControlConnection:
        """One that has just been accepted."""
        return ControlConnection(self)

    def peer_between(self, own: SocketName, peer_name: SocketName) -> Peer:
        """Who is at the other end of a connection, by the names of both ends."""
        peer = self._users.peer_between(own, peer_name)
        if peer is Peer.UNKNOWN and not self._warned:
            self._warned = True
            log.warning(
                "which user a connection comes from cannot be found out here, so commands to this control plane are "
                "refused; give the job a RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)"
            )
        return peer

    def has_room(self, descriptor: int) -> bool:
        """Whether one more connection, with this descriptor, can stay; the oldest that is no session may make room."""
        if descriptor >= connection_limit():  # those below are in use: there are as many connections as there may be
            self._most = len(self.open)
        return len(self.open) < self._most or self.limiter.make_room()

    def opened(self, connection: ControlConnection) -> None:
        """A connection has been made."""
        self.open.add(connection)
        self.emptied.clear()
        self.limiter.add(connection, connection.evict)

    def closed(self, connection: ControlConnection) -> None:
        """A connection is gone. Idempotent."""
        self.open.discard(connection)
        self.limiter.remove(connection)
        if not self.open:
            self.emptied.set()

    def write_posted(self) -> None:
        """Send what was posted. The loop is woken once for all that it has not handled yet."""
        self.posting = False  # first: an append from now on causes another call
        posted: dict[ControlConnection, list[bytes]] = {}
        while self.outbox:
            connection, is_collected, payload = self.outbox.popleft()
            if is_collected:
                self._write(connection.send, connection, posted.pop(connection, ()))
                self._write(connection.send_collected, connection, (payload,))
            else:
                posted.setdefault(connection, []).append(payload)
        for connection, payloads in posted.items():
            self._write(connection.send, connection, payloads)

    def _write(self, send: Callable[..., None], connection: ControlConnection, payloads: Sequence[bytes]) -> None:
        try:
            send(*payloads)
        except Exception:  # of this connection alone: the others' notifications follow
            log.exception("a notification could not be sent; the control connection is closed")
            connection.abort()


_MAX_CONNECTIONS = 16384
"""Connections that are not sessions yet, up to which none has to make room."""
_MIN_AGE = 1.0
"""Seconds that each of them has in any case: many nodes may connect at once."""


class ConnectionLimiter:
    """All connections of a server that are not sessions yet, and the log lines about those that never will be.

    On the loop's thread.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        files = limits()[0]
        self._limit = _MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, max(8, files // 4))
        self._clock = clock
        self._waiting: dict[object, tuple[float, Callable[[], None]]] = {}
        """When each was added, the oldest first, and the function that ends it."""
        self._clearing: asyncio.TimerHandle | None = None
        self._lines = RateLimitedLog(log, "control connections refused", clock)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: object, evict: Callable[[], None]) -> None:
        """Add one, which `evict` ends. The oldest are ended if there are too many: that of a node becomes a session
        soon.
        """
        self._waiting[connection] = self._clock.monotonic(), evict
        if len(self._waiting) > self._limit and self._clearing is None:
            self._evict_oldest()

    def remove(self, connection: object) -> None:
        """It has become a session, or is gone. Idempotent."""
        self._waiting.pop(connection, None)

    def make_room(self) -> bool:
        """End the oldest one now; returns whether there was one."""
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        self._waiting.pop(oldest)[1]()
        return True

    def log_refusal(self, line: str, *args: object) -> None:
        """Log a refused connection, unless there were too many such lines just now."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RateLimitedLog.WINDOW, self._sum_up)
        self._lines.warning(line, *args)

    def close(self) -> None:
        """Log what has not been logged yet."""
        for timer in (self._timer, self._clearing):
            if timer is not None:
                timer.cancel()
        self._sum_up()

    def _evict_oldest(self) -> None:
        self._clearing = None
        while len(self._waiting) > self._limit:
            oldest, (since, evict) = next(iter(self._waiting.items()))
            left = since + _MIN_AGE - self._clock.monotonic()
            if left > 0:
                self._clearing = asyncio.get_running_loop().call_later(left, self._evict_oldest)
                return
            del self._waiting[oldest]
            evict()

    def _sum_up(self) -> None:
        self._timer = None
        self._lines.summarize()
