"""A control server's connections at the byte level: admission, greeting, frames, output.

Runs on the loop's thread. These laws limit the loop time that an unauthenticated peer gets:

1. The loop handles one connection's input for `_TURN` at a time, and all input for `_TURN_OF_ALL`. The rest waits in
   its connection, which is not read again until the rest is handled. Meanwhile others have their turn.
2. While more than `_POSTED` notifications wait to be written, no other request is handled: the results of earlier
   requests go out before new ones are created.
3. A watcher's next message is handled after the watcher reads the earlier answers.

Without a secret, a control plane decides by the user at the other end of a connection. Laws:

1. On its own machine it serves its own user and root. It refuses all other users before anything else happens.
2. Only these users, and a job's nodes on other machines (`Coordinator.is_stranger`), may send commands that end or
   change a job.
3. A connection whose owner the kernel cannot name is served, but may not send commands; this is logged once.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.descriptors import connection_limit
from rallypoint.base.endpoint import keep_alive, unmapped_address, usable_address
from rallypoint.base.log import RateLimitedLog, get_logger
from rallypoint.base.netlink import Peer, PeerUsers, SocketName
from rallypoint.base.own_process import process_token
from rallypoint.control.coordinator.session import HEARTBEAT, ServerSession
from rallypoint.control.coordinator.sessions import STRANGER_REFUSED, SessionRecord, SessionState
from rallypoint.control.coordinator.transport import Transport, Transports
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, MAX_FRAME, MAX_GREETING, TLS_HANDSHAKE, FrameReader, frame
from rallypoint.control.protocol.errors import FrameError
from rallypoint.control.protocol.messages import SIGNATURE_SIZE, CollectedPart

if TYPE_CHECKING:
    from rallypoint.base.tls import ControlTls, TlsChannel
    from rallypoint.control.coordinator.jobs import ServedJobs
    from rallypoint.control.coordinator.shares import Shares
    from rallypoint.control.protocol.handshake import Hello, Keys

log = get_logger(__name__)


HANDSHAKE_TIMEOUT = 10.0
"""Seconds within which a connection must become a session."""

_WRITE_BUFFER_LIMIT, _WATCHER_LIMIT = 4 * 1024 * 1024, 16 * 1024 * 1024
"""Bytes that a node or a watcher may leave unread before it counts as gone."""
_COLLECTED_LIMIT = 64 * 1024 * 1024
"""Additional bytes collected from other nodes that a node may leave unread; any beyond that are dropped."""

_TURN, _TURN_OF_ALL = 0.002, 0.02
"""Seconds for which the loop handles one connection's input, and all input, before others have their turn."""
_POSTED = 1024
"""Maximum connections written to per turn, and notifications waiting for it before requests are held back."""

MAX_PLAIN = MAX_FRAME - SIGNATURE_SIZE
"""Maximum size of a message before it is signed, in bytes."""

_HEARTBEAT_FRAME = frame(HEARTBEAT)
"""An unsigned heartbeat: most of the traffic of a large job, and always the same bytes."""

_MANY_SESSIONS = 256
"""Number of connections above which a server requests fewer heartbeats, and answers only every second one of each node.
That is enough to show that it is alive."""

_TLS_THREADS = min(8, len(os.sched_getaffinity(0)) + 1)
"""Threads for TLS handshakes: if one is held up, another is free."""

_TLS_ONLY = (
    "this control plane accepts only TLS; set tls_cert, tls_key and tls_ca in --rdzv-conf on this node, as on the "
    "others"
)


OTHER_USER_REFUSED = (
    "without a secret, this control plane accepts only its own user and root on its machine, and this is another user; "
    "set the same RALLYPOINT_SECRET_FILE for all nodes and commands of the job (`rallyctl secret` creates one)"
)


class ControlConnection:
    """An unauthenticated connection at first; after the handshake, a node's session."""

    def __init__(self, connections: Connections, transport: Transport) -> None:
        self._all = connections
        self._transport = transport
        self._reader = FrameReader(MAX_GREETING)
        self._frames: list[bytes] = []
        """Frames to handle, the next one last. An empty deque would take half a kilobyte."""
        self._is_behind = False
        """Whether these frames wait for a later turn, or until the peer reads what it was sent."""
        self.unwritten: list[bytes] = []
        """Frames to write at the end of this turn or a later one: see `Connections.outbox`."""
        self._channel: TlsChannel | None = None
        self.is_shaking_hands = False
        """Whether another thread is performing this connection's TLS handshake."""
        self._kind_known = False
        """Whether the first byte arrived."""
        self._magic_sent = False
        self._takes_plain = False
        """Whether this is a node's session whose frames are unsigned."""
        self._is_watcher = False
        self._done = False
        self._limit = _WRITE_BUFFER_LIMIT
        self._collected = 0
        """Collected bytes that the peer might not have read: those sent since nothing was unread."""
        self._tenant = ""
        """The tenant whose share of the server it uses (`shares`); empty before the handshake."""
        self._is_own_user = False
        """Whether the peer is certainly a process of our own user or root."""
        self.peer_host = unmapped_address(transport.peer_name[0])
        served = connections.served
        nonce = b"" if served.keys is None else os.urandom(16)
        self._session = ServerSession(served.jobs, served.keys, nonce, self, self.peer_host.partition("%")[0])
        if connections.has_room(transport.socket.fileno(), self.peer_host):
            connections.add(self)
            return
        connections.limiter.log_refusal("control connection from %s refused: no file descriptor is left", self._peer)
        self._done = True
        transport.abort()  # without a reason, so that the peer retries

    # Called by the transport

    def data_received(self, data: bytes) -> None:
        """Handle bytes that arrived."""
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
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        """Process bytes that arrived, decrypted if needed."""
        if self._done:
            return
        if data == _HEARTBEAT_FRAME and self._takes_plain and not self._frames and not self._reader.has_partial_frame:
            try:
                if (why := self._session.heartbeat()) is not None:
                    self._close(why)
            except Exception:
                self._break_off()
            return
        try:
            arrived = self._reader.feed(data)
        except FrameError as error:
            self._close(str(error))
            return
        everyone = self._all
        until = everyone.transports.turn_began + _TURN_OF_ALL
        waits = self._frames or self._is_watcher or everyone.shares or everyone.unwritten > _POSTED
        if len(arrived) == 1 and not waits and SYSTEM_CLOCK.monotonic() < until:
            # Shortcut of `_work` for nearly all reads from nodes.
            self._handle(arrived[0])
            return
        arrived.reverse()
        self._frames = arrived + self._frames if self._frames else arrived
        if not self._is_behind:
            self._work(until)

    def go_on(self) -> None:
        """Continue with the waiting frames in a later turn, or after the peer reads its messages."""
        self._is_behind = False
        self._work(math.inf)
        if not (self._is_behind or self._transport.is_closing):
            self._transport.resume()

    def _work(self, until: float) -> None:
        """Handle frames while this connection may use the loop in this turn, at the latest until `until`."""
        everyone = self._all
        shares = everyone.shares if self._tenant else None
        began = now = SYSTEM_CLOCK.monotonic()
        if shares is not None and (wait := shares.wait(self._tenant)):
            self._fall_behind()
            everyone.event_loop.call_later(wait, self.go_on)
            return
        until = min(began + _TURN, until)
        while self._frames and not self._done and not self._transport.is_closing:
            if self._is_watcher and self._transport.unsent:
                self._fall_behind()  # until `all_sent`
                break
            if now >= until or everyone.unwritten > _POSTED:
                self._fall_behind()
                everyone.go_on_later(self)
                break
            self._handle(self._frames.pop())
            if self._frames or shares is not None:
                now = SYSTEM_CLOCK.monotonic()
        if shares is not None:
            shares.used(self._tenant, now - began)

    def _fall_behind(self) -> None:
        # Read nothing meanwhile, not even the end of the connection:
        #   1. a node sends several messages, the last of which says that it leaves, and disconnects;
        #   2. the messages wait for a later turn;
        #   3. if the end were read now, the leave would be lost, and the node would count as lost.
        self._is_behind = True
        self._transport.pause()

    def _handle(self, payload: bytes) -> None:
        """Handle one message."""
        session = self._session
        was_open = session.is_open
        try:
            if (why := session.receive(payload)) is not None:
                self._close(why)
        except codec.CodecError as error:
            self._close(str(error), is_permanent=True)
        except FrameError as error:
            self._close(str(error))
        except Exception:
            self._break_off()
        if not was_open and session.is_open:  # a peer that only queries is still subject to the timeout
            self._reader.most = MAX_FRAME
            self._all.limiter.remove(self)

    def _break_off(self) -> None:
        """Handle a defect of ours: end only this connection, and log the error."""
        log.exception("a message could not be handled, so the control connection from %s is being closed", self._peer)
        self._session.end("a message could not be handled: this is a bug in the control plane; see its log")
        self.abort()

    def all_sent(self) -> None:
        if self._is_behind and self._is_watcher:
            self.go_on()

    def connection_lost(self, error: OSError | None) -> None:
        """Handle the end of the connection, whichever side disconnected."""
        how = "its connection was closed before it left" if error is None else f"its connection broke: {error}"
        self._session.detach(how)
        if self._all.shares is not None and self._tenant:
            self._all.shares.leave(self._tenant)
        self._all.discard(self)

    # Handshake, then session

    def _begin(self, data: bytes) -> bool:
        """Detect the kind of connection from its first byte. Returns whether it is one of ours."""
        first, tls = data[:1], self._all.served.tls
        for_fallback = first not in {TLS_HANDSHAKE, MAGIC[:1]} and self._all.served.fallback is not None
        if self._all.served.keys is None and not for_fallback and not self._admit():
            return False
        if not for_fallback and self._is_store_probe(data):
            log.debug("an agent at %s asked whether this control plane is a store", self._peer)
            self._done = True
            self._transport.close()
            return False
        if first == TLS_HANDSHAKE:
            if tls is not None:
                from rallypoint.base.tls import TlsChannel

                self._channel = TlsChannel(tls)
                return True
            self._refuse(
                "it uses TLS, but this control plane does not; set tls_cert, tls_key and tls_ca for the control plane "
                "too"
            )
            return False
        if first != MAGIC[:1] and self._all.served.fallback is not None:
            self._hand_over(data, self._all.served.fallback)
            return False
        if tls is not None:
            self._refuse(_TLS_ONLY)
            return False
        return True

    @staticmethod
    def _is_store_probe(data: bytes) -> bool:
        """Whether this comes from an agent that found the control plane slow (`client.dialing`)."""
        if data[:1] != b"\0":
            return False
        from rallypoint.store.wire import probe

        return data == probe()

    def _admit(self) -> bool:
        """Decide whether to serve this peer, which proves nothing about the job (see the laws at the top)."""
        peer = self._all.peer_between(self._transport.own_name, self._transport.peer_name)
        self._is_own_user = peer is Peer.OWN_USER
        if peer is Peer.OTHER_USER and self._all.served.is_open:
            self._refuse(OTHER_USER_REFUSED)
            return False
        return True

    def _shake_hands(self, channel: TlsChannel, data: bytes) -> None:
        """Continue the TLS handshake on another thread, and read nothing until it ends."""
        self.is_shaking_hands = True
        self._transport.pause()
        handshakes = self._all.handshakes
        assert handshakes is not None, "it speaks TLS"
        handshakes.add(self.peer_host, partial(channel.receive, data), partial(self._on_handshake, channel))

    def _on_handshake(self, channel: TlsChannel, work: asyncio.Future[bytes]) -> None:
        self.is_shaking_hands = False
        if work.cancelled() or self._done or self._transport.is_closing:
            work.cancelled() or work.exception()  # otherwise asyncio logs that the exception was never retrieved
            return
        self._transport.resume()
        self._feed(self._decrypted(channel, work.result))

    def _decrypted(self, channel: TlsChannel, receive: Callable[[], bytes]) -> bytes:
        from rallypoint.base.tls import TlsError

        try:
            plain = receive()
        except TlsError as error:
            self._transport.write(channel.to_send())  # the alert that gives the reason
            self._close(str(error))
            return b""
        self._transport.write(channel.to_send())
        if channel.objection is not None:
            self._refuse(channel.objection)
            return b""
        return plain

    def _hand_over(self, data: bytes, fallback: Callable[[socket.socket, bytes], None]) -> None:
        self._done = True
        self._all.discard(self)  # so that it no longer counts as unauthenticated
        try:
            fallback(self._transport.hand_over(), data)
        except OSError as error:  # no threads are left
            self._close(f"the other service on this port cannot take it over: {error}")

    def _refuse(self, sentence: str) -> None:
        self._session.refuse(sentence)
        self._close(sentence)

    # The session's output (`SessionOutput`)

    def describe(self, hello: Hello) -> SessionRecord:
        """Describe the session after the handshake."""
        if self._all.shares is not None:
            tenant = hello.job if self._all.served.keys is not None else self.peer_host.partition("%")[0]
            self._all.shares.enter(tenant)
            self._tenant = tenant
        self._is_watcher = hello.is_watcher
        self._limit = _WATCHER_LIMIT if hello.is_watcher else _WRITE_BUFFER_LIMIT
        if hello.is_watcher:  # a watcher has no lease: without this, a dead machine would go unnoticed
            keep_alive(self._transport.socket)
        self._takes_plain = self._session.signers is None and not (hello.is_watcher or hello.only_greets)
        own = usable_address(unmapped_address(self._transport.own_name[0]))
        trusted = self._is_own_user or not self._all.served.is_open
        here = trusted and bool(hello.process) and compare_digest(hello.process, process_token())
        return SessionRecord(
            node=hello.node,
            address=hello.address,
            server_address=own,
            observed_address=usable_address(self.peer_host),
            settings=hello.settings,
            in_this_process=here,
            local=here and self._all.served.has_local_nodes,
            is_own_user=self._is_own_user,
            trusted=trusted,
            state=SessionState.RESUMING if hello.incarnation else SessionState.OPEN,
        )

    @property
    def answers_all(self) -> bool:
        """Whether there are few enough connections to answer every heartbeat."""
        return len(self._all.open) <= _MANY_SESSIONS

    @property
    def is_written(self) -> bool:
        """Whether all posted messages were written."""
        return not self.unwritten

    def post(self, message: Any) -> None:
        """Send a message at the end of the turn, in the order of the calls. Drop it if it cannot be encoded and the job
        can continue without it."""
        everyone = self._all
        if everyone.last_encoded[0] is not message:
            try:
                payload = codec.encode(message)
                if len(payload) > MAX_PLAIN:
                    codec.check_size(len(payload))
            except (ValueError, OverflowError, FrameError) as error:
                if not isinstance(message, codec.EXPENDABLE):
                    raise
                kind = type(message).__name__
                everyone.limiter.log_drop(
                    "a %s message for %s was dropped because it could not be sent (%s)", kind, self._peer, error
                )
                return
            everyone.last_encoded = message, payload
        if isinstance(message, CollectedPart):  # as large as a frame: writing it with others gains nothing
            everyone.write_to(self)
            self._send_collected(everyone.last_encoded[1])
            return
        if not self.unwritten:
            everyone.outbox.append(self)
        self.unwritten.append(everyone.last_encoded[1])
        everyone.unwritten += 1
        everyone.end_turn_soon()

    def disconnect(self, why: str) -> None:
        """End the session, as the coordinator decided."""
        self._all.limiter.log_end("control connection from %s is closed: %s", self._peer, why)
        self._all.write_to(self)
        if not self._done:
            self._session.end(why, is_permanent=why == STRANGER_REFUSED)
        self.abort()

    # Sending and ending

    @property
    def _peer(self) -> str:
        name, address = self._session.node_name, f"{self.peer_host}:{self._transport.peer_name[1]}"
        return f"{address} ({name})" if name else address

    def _send_collected(self, payload: bytes) -> None:
        """Send what another node collected. A large unread amount does not mean that this node reads nothing."""
        if not self._transport.unsent:
            self._collected = 0
        if self._collected + len(payload) <= _COLLECTED_LIMIT:
            self._collected += len(payload)
            self.send(payload)

    def send(self, *payloads: bytes) -> None:
        """Send each payload as a frame, signed if the session is, in one write. On the loop's thread."""
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
            log.warning("closing the control connection from %s, which does not read its messages", self._peer)
            self._transport.abort()

    def finish(self, why: str) -> None:
        """Send what is left and the reason for the end. Accept no more requests: they would not be carried out."""
        self._all.write_to(self)
        if why and not self._done:
            self._session.end(why)
        self._done = True
        self._frames.clear()
        if self._is_behind and not self._transport.is_closing:
            self._transport.resume()  # to read its end
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

    def _close(self, why: str, *, is_permanent: bool = False) -> None:
        if not self._session.is_open:
            self._all.limiter.log_refusal("control connection from %s refused: %s", self._peer, why)
        else:
            self._all.limiter.log_end("control connection from %s is closed: %s", self._peer, why)
            self._session.end(why, is_permanent=is_permanent)
        self._done = True
        self._transport.close()

    def on_handshake_timeout(self) -> None:
        """End the connection, which did not become a session in time."""
        if self._session.only_asked:
            self._done = True
            self._transport.close()
            return
        self._close(f"it did not open a session within {HANDSHAKE_TIMEOUT:.0f} s")

    def evict(self) -> None:
        """End a connection that is not a session yet, to make room for newer ones."""
        self._close("too many connections have not opened a session; newer ones replace this one")
        self.abort()
        self._all.discard(self)  # now: other connections are counted before the end is reported


class Served(NamedTuple):
    """The jobs that a server serves, and who may connect; see `ControlServer`."""

    jobs: ServedJobs
    keys: Keys | None
    tls: ControlTls | None
    fallback: Callable[[socket.socket, bytes], None] | None
    has_local_nodes: bool

    @property
    def is_open(self) -> bool:
        """Whether peers prove nothing: neither a secret nor TLS is set."""
        return self.keys is None and self.tls is None


class Connections:
    """All connections of one server: admission and output. On the loop's thread."""

    def __init__(self, served: Served, on_turn_end: Callable[[], None]) -> None:
        """`on_turn_end` is called at the end of each turn for which `end_turn_soon` was called."""
        self.served = served
        self.event_loop = asyncio.get_running_loop()
        self.open: set[ControlConnection] = set()
        self.limiter = ConnectionLimiter()
        self.transports = Transports(partial(ControlConnection, self), self.limiter.log_refusal)
        self.shares: Shares | None = None
        """The shares of the tenants, if there are several."""
        if served.jobs.job is None:
            from rallypoint.control.coordinator.shares import Shares

            self.shares = Shares()
        self.emptied = asyncio.Event()
        """Set when the last connection is closed."""
        self._users = PeerUsers()
        self._warned = False
        self.handshakes = None if served.tls is None else TlsHandshakes(self.event_loop)
        self.outbox: deque[ControlConnection] = deque()
        """Connections with output, in the order of their first message. One write sends everything that a connection
        gets in a turn."""
        self.unwritten = 0
        """The number of messages to write."""
        self.last_encoded: tuple[Any, bytes] = None, b""
        """The last message and its bytes, because many nodes often receive the same one."""
        self._behind: deque[ControlConnection] = deque()
        """Connections with more input than fitted in their turn."""
        self._goes_on = False
        """Whether the loop will call `_go_on` in its next turn."""
        self._ends_turn = False
        """Whether the loop will call `_end_turn`."""
        self._on_turn_end = on_turn_end
        self._descriptors = 0
        """The limit of descriptors for connections at the last check; it can be raised."""
        self._most: float = math.inf
        """The number of open connections when descriptors last ran out."""

    def peer_between(self, own: SocketName, peer_name: SocketName) -> Peer:
        """Find the owner of a connection's other end by the names of both ends."""
        peer = self._users.peer_between(own, peer_name)
        if peer is Peer.UNKNOWN and not self._warned:
            self._warned = True
            log.warning(
                "this machine does not show which user opened a connection, so this control plane refuses commands; "
                "set RALLYPOINT_SECRET_FILE for the job (`rallyctl secret` creates one)"
            )
        return peer

    def has_room(self, descriptor: int, peer_host: str) -> bool:
        """Decide whether a new connection with this descriptor can stay. If needed, one that is no session makes room.

        1. The new connection's descriptor is the first one beyond the limit: all lower ones are in use, by the other
           connections that are open now.
        2. From now on each new connection closes an older one. Evicted connections keep their descriptors for a moment,
           so the descriptors exceed the limit by at most one burst of connections. Because evicted connections do not
           count as open, the next check of a descriptor beyond the limit finds no more connections than the last.
        """
        if descriptor >= self._descriptors:
            self._descriptors = connection_limit()
            self._most = len(self.open) if descriptor >= self._descriptors else math.inf
        return len(self.open) < self._most or self.limiter.make_room(peer_host)

    def add(self, connection: ControlConnection) -> None:
        """Add a connection."""
        self.open.add(connection)
        self.emptied.clear()
        self.limiter.add(connection)

    def discard(self, connection: ControlConnection) -> None:
        """Remove a closed connection. Idempotent."""
        self.open.discard(connection)
        self.limiter.remove(connection)
        if not self.open:
            self.emptied.set()

    def close(self) -> None:
        """Stop: no connection is left."""
        self.transports.close()
        self.limiter.close()
        self._users.close()
        if self.handshakes is not None:
            self.handshakes.close()

    def end_turn_soon(self) -> None:
        """Write the messages that an event causes, once for all events of this turn."""
        if not self._ends_turn:
            self._ends_turn = True
            self.event_loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._ends_turn = False
        for _ in range(min(len(self.outbox), _POSTED)):
            self.write_to(self.outbox.popleft())
        if self.outbox:
            self.end_turn_soon()
        self._on_turn_end()

    def write_to(self, connection: ControlConnection) -> None:
        """Write all messages of this connection. It can stay in the outbox with nothing to write."""
        payloads, connection.unwritten = connection.unwritten, []
        self.unwritten -= len(payloads)
        try:
            if payloads:
                connection.send(*payloads)
        except Exception:  # affects only this connection: continue with the others
            log.exception("a notification could not be sent, so the control connection is being closed")
            connection.abort()

    # Work that takes several turns

    def go_on_later(self, connection: ControlConnection) -> None:
        """Let a connection handle more of its input after others had their turn."""
        self._behind.append(connection)
        self._call_soon()

    def _call_soon(self) -> None:
        if not self._goes_on:
            self._goes_on = True
            self.event_loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        until = SYSTEM_CLOCK.monotonic() + _TURN
        for _ in range(len(self._behind)):  # a connection that is not done after its turn is appended again
            if self.unwritten > _POSTED or SYSTEM_CLOCK.monotonic() >= until:
                break
            self._behind.popleft().go_on()
        if self._behind:
            self._call_soon()


class TlsHandshakes:
    """TLS handshakes on a few threads. Thousands of handshakes take many seconds, during which sessions continue.

    The peers' addresses take turns, so that one that floods us with greetings delays only itself. On the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        from concurrent.futures.thread import ThreadPoolExecutor

        self._loop = loop
        self._threads = ThreadPoolExecutor(_TLS_THREADS, "rallypoint-tls")
        self._waiting: OrderedDict[str, deque[tuple[_Step, _OnStep]]] = OrderedDict()
        """The waiting steps of each address; the next address is first."""
        self._running = 0

    def add(self, peer_host: str, step: _Step, done: _OnStep) -> None:
        """Take a step of a handshake when it is the peer's turn, then call `done` with the result."""
        self._waiting.setdefault(peer_host, deque()).append((step, done))
        self._begin()

    def close(self) -> None:
        """Take no further steps."""
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._waiting and self._running < _TLS_THREADS:
            peer_host, steps = self._waiting.popitem(last=False)
            step, done = steps.popleft()
            if steps:
                self._waiting[peer_host] = steps
            self._running += 1
            work = self._loop.run_in_executor(self._threads, step)
            work.add_done_callback(self._on_step_done)
            work.add_done_callback(done)

    def _on_step_done(self, _work: asyncio.Future[bytes]) -> None:
        self._running -= 1
        self._begin()


_Step = Callable[[], bytes]
_OnStep = Callable[["asyncio.Future[bytes]"], None]

_MAX_CONNECTIONS = 16384
"""Number of connections that are not sessions yet above which the oldest make room."""
_MIN_AGE = 1.0
"""Seconds that each of these gets in any case, because many nodes might connect at once."""
_SHARE, _SHARE_LEAST = 0.25, 64
"""The fraction of these, and the minimum number, that one address can keep when room is needed."""


class ConnectionLimiter:
    """A server's connections that are not sessions yet, and the log lines about refused and ended ones.

    On the loop's thread. `Connections.has_room` limits the descriptors that they take.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._waiting: dict[ControlConnection, float] = {}
        """When each was added, oldest first."""
        self._of_host: dict[str, dict[ControlConnection, None]] = {}
        """The same connections, by the address of the peer."""
        self._look_again: asyncio.TimerHandle | None = None
        """One timer for all, set for the oldest."""
        self._refused = RateLimitedLog(log, "control connections refused", clock)
        self._ended = RateLimitedLog(log, "sessions ended by us", clock)
        self._dropped = RateLimitedLog(log, "messages dropped", clock)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: ControlConnection) -> None:
        """Add a connection. If there are too many, end the oldest: nodes' connections soon become sessions."""
        self._waiting[connection] = self._clock.monotonic()
        self._of_host.setdefault(connection.peer_host, {})[connection] = None
        if self._look_again is None or len(self._waiting) == _MAX_CONNECTIONS + 1:
            self._end_overdue()

    def remove(self, connection: ControlConnection) -> None:
        """Remove a connection that became a session or was closed. Idempotent."""
        if self._waiting.pop(connection, None) is not None:
            of_host = self._of_host[connection.peer_host]
            del of_host[connection]
            if not of_host:
                del self._of_host[connection.peer_host]

    def make_room(self, peer_host: str = "") -> bool:
        """End one connection now; returns whether there was one. It is the oldest, or the oldest from `peer_host` if
        that has more than its share: a peer that floods us loses its own connections."""
        of_host = self._of_host.get(peer_host, ())
        has_share = len(of_host) <= max(_SHARE_LEAST, len(self._waiting) * _SHARE)
        oldest = next(iter(self._waiting if has_share else of_host), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.evict()
        return True

    def log_refusal(self, line: str, *args: object) -> None:
        """Log a refused connection at a limited rate."""
        self._log(self._refused, line, *args)

    def log_end(self, line: str, *args: object) -> None:
        """Log a session that we ended at a limited rate: all nodes might have opened another at once."""
        self._log(self._ended, line, *args)

    def log_drop(self, line: str, *args: object) -> None:
        """Log a message that is not sent at a limited rate; from any thread."""
        self._dropped.warning(line, *args)

    def _log(self, lines: RateLimitedLog, line: str, *args: object) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RateLimitedLog.WINDOW, self._sum_up)
        lines.warning(line, *args)

    def close(self) -> None:
        """Log a summary of the suppressed lines."""
        for timer in (self._timer, self._look_again):
            if timer is not None:
                timer.cancel()
        self._sum_up()

    def _end_overdue(self) -> None:
        """End overdue connections, and check again when the next one is due."""
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        while self._waiting:
            oldest, since = next(iter(self._waiting.items()))
            too_many = len(self._waiting) > _MAX_CONNECTIONS
            left = since + (_MIN_AGE if too_many else HANDSHAKE_TIMEOUT) - self._clock.monotonic()
            if left > 0:
                self._look_again = asyncio.get_running_loop().call_later(left, self._end_overdue)
                return
            self.remove(oldest)
            if oldest.is_shaking_hands:  # it is waiting for us: its time starts again
                self.add(oldest)
                continue
            (oldest.evict if too_many else oldest.on_handshake_timeout)()

    def _sum_up(self) -> None:
        self._timer = None
        self._refused.summarize()
        self._ended.summarize()
        self._dropped.summarize()
