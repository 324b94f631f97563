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
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.descriptors import connection_limit
from rallypoint.base.endpoint import unmapped_address, usable_address
from rallypoint.base.log import RateLimitedLog, get_logger
from rallypoint.base.netlink import Peer, PeerUsers, SocketName
from rallypoint.control.coordinator.session import HEARTBEAT, ServerSession
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.coordinator.transport import Transport, Transports
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, TLS_HANDSHAKE, FrameReader, frame
from rallypoint.control.protocol.errors import FrameError
from rallypoint.control.protocol.messages import CollectedPart

if TYPE_CHECKING:
    from concurrent.futures import Executor

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

_TLS_THREADS = min(8, len(os.sched_getaffinity(0)) + 1)
"""Threads for TLS handshakes: one that is held up leaves another."""

_TLS_ONLY = (
    "this control plane speaks TLS only; give this node tls_cert, tls_key and tls_ca in --rdzv-conf, as the others"
)


OTHER_USER_REFUSED = (
    "without a secret, this control plane serves only its own user and root on its machine, and this is another user; "
    "give all nodes and commands of the job the same RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)"
)


class ControlConnection:
    """An unauthenticated connection first, a node's session after the handshake."""

    def __init__(self, connections: Connections, transport: Transport) -> None:
        self._all = connections
        self._transport = transport
        self._reader = FrameReader()
        self._channel: TlsChannel | None = None
        self.is_shaking_hands = False
        """Whether a TLS handshake, of this connection, is going on on another thread."""
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
        self._peer_host = unmapped_address(transport.peer_name[0])
        served = connections.served
        nonce = b"" if served.keys is None else os.urandom(16)
        self._session = ServerSession(served.jobs, served.keys, nonce, self, self._peer_host.partition("%")[0])
        if not connections.has_room(transport.socket.fileno()):
            connections.limiter.log_refusal(
                "control connection from %s refused: no descriptor is left for it", self._peer
            )
            self._done = True
            transport.abort()  # without a word, so that it comes again
        connections.opened(self)

    # Its transport's side

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        shares, begun = self._all.shares, 0.0
        if shares is not None and self._tenant:
            if self._unread or (wait := shares.wait(self._tenant)):
                self._read_later(data, 0.0 if self._unread else wait)
                return
            begun = self._all.event_loop.time()
        self._receive(data)
        if shares is not None and begun:
            shares.used(self._tenant, self._all.event_loop.time() - begun)

    def _read_later(self, data: bytes, wait: float) -> None:
        """Its tenant has used more than its share of the loop's time."""
        self._unread += data
        if wait:
            self._transport.pause()
            self._all.event_loop.call_later(wait, self._read_now)

    def _read_now(self) -> None:
        data, self._unread = self._unread, b""
        if not self._transport.is_closing:
            self._transport.resume()
            self.data_received(data)

    def _receive(self, data: bytes) -> None:
        if not self._kind_known and data:
            self._kind_known = True
            if not self._begin(data):
                return
        channel = self._channel
        if channel is not None and not self._done:
            if not channel.is_open:
                self._shake_hands(channel, data)
                return
            data = self._decrypted(channel, partial(channel.receive, data))
        self._take(data)

    def _take(self, data: bytes) -> None:
        """These bytes have arrived, decrypted if need be."""
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
                    self._all.limiter.remove(self)
        except (FrameError, codec.CodecError) as error:
            self._close(str(error))
        except Exception:
            log.exception("control connection from %s: a message could not be handled; it is closed", self._peer)
            self.abort()

    def connection_lost(self, error: OSError | None) -> None:
        """The other side, or we, have disconnected."""
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
        peer = self._all.peer_between(self._transport.own_name, self._transport.peer_name)
        self._is_own_user = peer is Peer.OWN_USER
        if peer is Peer.OTHER_USER and self._all.served.is_open:
            self._refuse(OTHER_USER_REFUSED)
            return False
        return True

    def _shake_hands(self, channel: TlsChannel, data: bytes) -> None:
        """Continue with TLS's handshake on another thread, and read no more before it has ended."""
        self.is_shaking_hands = True
        self._transport.pause()
        work = self._all.event_loop.run_in_executor(self._all.tls_threads, channel.receive, data)
        work.add_done_callback(partial(self._shaken, channel))

    def _shaken(self, channel: TlsChannel, work: asyncio.Future[bytes]) -> None:
        self.is_shaking_hands = False
        if work.cancelled() or self._done or self._transport.is_closing:
            work.cancelled() or work.exception()  # or asyncio says that nobody has looked at it
            return
        self._transport.resume()
        self._take(self._decrypted(channel, work.result))

    def _decrypted(self, channel: TlsChannel, receive: Callable[[], bytes]) -> bytes:
        from rallypoint.base.tls import TlsError

        try:
            plain = receive()
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
        self._all.closed(self)  # and with that it does not count as unauthenticated any more
        try:
            fallback(self._transport.hand_over(), data)
        except OSError as error:  # no threads
            self._close(f"what else is served on this port cannot take it over: {error}")

    def _refuse(self, sentence: str) -> None:
        self._session.refuse(sentence)
        self._close(sentence)

    # What its session requires of it (`SessionOutput`)

    def describe(self, hello: Hello) -> SessionRecord:
        """The handshake is done."""
        if self._all.shares is not None:
            tenant = hello.job if self._all.served.keys is not None else self._peer_host.partition("%")[0]
            self._all.shares.enter(tenant)
            self._tenant = tenant
        self._limit = _WATCHER_LIMIT if hello.is_watcher else _WRITE_BUFFER_LIMIT
        self._takes_plain = self._session.signers is None and not (hello.is_watcher or hello.only_greets)
        own = usable_address(unmapped_address(self._transport.own_name[0]))
        trusted = self._is_own_user or not self._all.served.is_open
        here = hello.node.pid == os.getpid() and hello.address == own and trusted
        return SessionRecord(
            hello.node,
            hello.address,
            own,
            usable_address(self._peer_host),
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
        self._all.event_loop.call_soon_threadsafe(self._end_session, why)

    def _end_session(self, why: str) -> None:
        self._all.limiter.log_end("control connection from %s is closed: %s", self._peer, why)
        if not self._done:
            self._session.end(self._session.end_reason)
        self.abort()

    # Sending and ending

    @property
    def _peer(self) -> str:
        name, address = self._session.node_name, f"{self._peer_host}:{self._transport.peer_name[1]}"
        return f"{address} ({name})" if name else address

    def send_collected(self, payload: bytes) -> None:
        """Send what another node has collected: much of it at once does not mean that this one reads nothing."""
        if not self._transport.unsent:
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
        if self._done or self._transport.is_closing:
            return
        if self._channel is not None:
            self._channel.send(data)
            data = self._channel.to_send()
        self._transport.write(data)
        if len(self._transport.unsent) > self._limit + 2 * self._collected:  # TLS adds a little
            log.warning("control connection from %s does not read what it is sent; it is closed", self._peer)
            self._transport.abort()

    def finish(self, why: str) -> None:
        """Send what is left and the reason for the end; take no more requests, which would not be carried out."""
        if why and not self._done:
            self._session.end(why)
        self._done = True
        if self._channel is not None and not self._transport.is_closing:
            self._channel.close_notify()
            self._transport.write(self._channel.to_send())
        if self._session.is_open:
            self._transport.write_eof()
        else:
            self._transport.close()

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

    def on_handshake_timeout(self) -> None:
        """It has had the time to become a session."""
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
        self.event_loop = asyncio.get_running_loop()
        self.open: set[ControlConnection] = set()
        self.limiter = ConnectionLimiter()
        self.transports = Transports(partial(ControlConnection, self), self.limiter.log_refusal)
        self.shares: Shares | None = None
        """The shares of the tenants, if there are several."""
        if served.jobs.job is None:
            from rallypoint.control.coordinator.jobs import Shares

            self.shares = Shares()
        self.emptied = asyncio.Event()
        """Set when the last connection is gone."""
        self._users = PeerUsers()
        self._warned = False
        self.tls_threads: Executor | None = None
        """For TLS handshakes: those of thousands of nodes take many seconds, in which sessions continue."""
        if served.tls is not None:
            from concurrent.futures.thread import ThreadPoolExecutor

            self.tls_threads = ThreadPoolExecutor(_TLS_THREADS, "rallypoint-tls")
        self.loop = loop
        self.outbox: deque[tuple[ControlConnection, bool, bytes]] = deque()
        self._descriptors = 0
        """The limit of descriptors for connections when it was last looked up; it may be raised."""
        self._most: float = math.inf
        """The number of connections at which the descriptors for connections were last used up."""
        self.posting = False
        self.last_encoded: tuple[Notification | WatcherNotification, bytes] | None = None
        """The last notification, and its bytes: often many receive the same."""

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
        if descriptor >= self._descriptors:
            self._descriptors = connection_limit()
            if descriptor >= self._descriptors:  # those below are in use: there are as many connections as may be
                self._most = len(self.open)
        return len(self.open) < self._most or self.limiter.make_room()

    def opened(self, connection: ControlConnection) -> None:
        """A connection has been made."""
        self.open.add(connection)
        self.emptied.clear()
        self.limiter.add(connection)

    def closed(self, connection: ControlConnection) -> None:
        """A connection is gone. Idempotent."""
        self.open.discard(connection)
        self.limiter.remove(connection)
        if not self.open:
            self.emptied.set()

    def close(self) -> None:
        """There are no more connections."""
        self.transports.close()
        self.limiter.close()
        self._users.close()
        if self.tls_threads is not None:
            self.tls_threads.shutdown(wait=False, cancel_futures=True)

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
    """All connections of a server that are not sessions yet, and the log lines about those that will not be, or no
    longer are.

    On the loop's thread. How many descriptors they take is limited by `Connections.has_room`.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._waiting: dict[ControlConnection, float] = {}
        """When each was added, the oldest first."""
        self._look_again: asyncio.TimerHandle | None = None
        """One timer for all: it is set for the oldest."""
        self._refused = RateLimitedLog(log, "control connections refused", clock)
        self._ended = RateLimitedLog(log, "sessions ended by us", clock)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: ControlConnection) -> None:
        """Add one. The oldest are ended if there are too many: that of a node becomes a session soon."""
        self._waiting[connection] = self._clock.monotonic()
        if self._look_again is None or len(self._waiting) == _MAX_CONNECTIONS + 1:
            self._look()

    def remove(self, connection: ControlConnection) -> None:
        """It has become a session, or is gone. Idempotent."""
        self._waiting.pop(connection, None)

    def make_room(self) -> bool:
        """End the oldest one now; returns whether there was one."""
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        del self._waiting[oldest]
        oldest.evict()
        return True

    def log_refusal(self, line: str, *args: object) -> None:
        """Log a refused connection, unless there were too many such lines just now."""
        self._log(self._refused, line, *args)

    def log_end(self, line: str, *args: object) -> None:
        """Log a session that we have ended, unless there were too many just now: all nodes may have opened another."""
        self._log(self._ended, line, *args)

    def _log(self, lines: RateLimitedLog, line: str, *args: object) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RateLimitedLog.WINDOW, self._sum_up)
        lines.warning(line, *args)

    def close(self) -> None:
        """Log what has not been logged yet."""
        for timer in (self._timer, self._look_again):
            if timer is not None:
                timer.cancel()
        self._sum_up()

    def _look(self) -> None:
        """End those that were here for too long, and look again when the oldest will have been."""
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        while self._waiting:
            oldest, since = next(iter(self._waiting.items()))
            too_many = len(self._waiting) > _MAX_CONNECTIONS
            now = self._clock.monotonic()
            left = since + (_MIN_AGE if too_many else HANDSHAKE_TIMEOUT) - now
            if left > 0:
                self._look_again = asyncio.get_running_loop().call_later(left, self._look)
                return
            del self._waiting[oldest]
            if oldest.is_shaking_hands:  # it waits for us, and has its time again
                self._waiting[oldest] = now
                continue
            (oldest.evict if too_many else oldest.on_handshake_timeout)()

    def _sum_up(self) -> None:
        self._timer = None
        self._refused.summarize()
        self._ended.summarize()
