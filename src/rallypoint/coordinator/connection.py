"""One control connection, seen from the server: greeting, handshake, session."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from rallypoint.base.endpoint import shorten_retransmission, unmapped_address, usable_address
from rallypoint.base.log import get_logger, printable
from rallypoint.coordinator.session_registry import SessionRecord
from rallypoint.membership.state import NodeId, Reason
from rallypoint.protocol import codec
from rallypoint.protocol.frames import MAGIC, TLS_HANDSHAKE, FrameError, FrameReader, frame
from rallypoint.protocol.handshake import (
    PROTOCOL_VERSION,
    Challenge,
    HandshakeError,
    HandshakeRefused,
    Hello,
    Proof,
    ServerHandshake,
    Welcome,
    version_error,
)
from rallypoint.protocol.messages import Heartbeat, JoinRequest, LeaveRequest, Notification, Request, SessionEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from rallypoint.base.tls import TlsChannel
    from rallypoint.coordinator.connection_context import ConnectionContext
    from rallypoint.coordinator.dispatcher import Dispatcher
    from rallypoint.protocol.signing import Signers

log = get_logger(__name__)

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a connection has to become a session."""

_WRITE_BUFFER_LIMIT = 4 * 1024 * 1024
"""Bytes of notifications that a node may leave unread before it counts as gone."""

_HEARTBEAT = codec.encode(Heartbeat())
_HEARTBEAT_FRAME = frame(_HEARTBEAT)
"""A heartbeat as it comes and goes where nothing is signed: nearly all that is ever said in a large job, and the same
bytes each time."""

_HEARTBEAT_REQUEST = Heartbeat()

_MANY_SESSIONS = 256
"""Where a server has more connections, it answers every second heartbeat of each. That it lives can be told from
these."""

_UNKNOWN = "an unknown address"

_TLS_ONLY = (
    "this control plane speaks TLS only; give this node tls_cert, tls_key and tls_ca in --rdzv-conf, as the others"
)


class ControlConnection(asyncio.Protocol):
    """An unauthenticated connection at first, a node's session after the handshake."""

    def __init__(self, context: ConnectionContext) -> None:
        self._context = context
        self._reader = FrameReader()
        self._handshake = ServerHandshake(context.jobs.job, context.keys, context.nonce())
        self._signers: Signers | None = None
        self._channel: TlsChannel | None = None
        self._kind_known = False
        """Whether the first byte has come."""
        self._transcript = b""
        self._dispatcher: Dispatcher | None = None
        self._session = 0
        self._leaving = False
        self._answered = False
        """Whether the last heartbeat was."""
        self._done = False
        self._end_reason = "its session has ended"

    # asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection has come in."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        peer = transport.get_extra_info("peername")
        self._peer_host = unmapped_address(str(peer[0])) if isinstance(peer, tuple) else ""
        self._peer = f"{self._peer_host}:{peer[1]}" if self._peer_host else _UNKNOWN
        shorten_retransmission(transport.get_extra_info("socket"))
        self._context.opened(self)
        self._timeout = self._loop.call_later(HANDSHAKE_TIMEOUT, self._on_handshake_timeout)

    def data_received(self, data: bytes) -> None:
        """Bytes have come in."""
        if not self._kind_known and data:
            self._kind_known = True
            if not self._begin(data):
                return
        if self._channel is not None and not self._done:
            data = self._decrypted(self._channel, data)
        if self._done:
            return
        if data == _HEARTBEAT_FRAME and self._dispatcher is not None and not self._reader.has_partial_frame:
            self._on_heartbeat(self._dispatcher)
            return
        try:
            for payload in self._reader.feed(data):
                if not self._on_frame(payload):
                    return
        except (FrameError, codec.CodecError) as error:
            self._close_unauthenticated(str(error))
        except Exception:
            log.exception("control connection from %s: a message could not be handled; it is closed", self._peer)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """The other side, or we, have hung up."""
        self._timeout.cancel()
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            how = "its connection was closed before it left" if error is None else f"its connection broke: {error}"
            dispatcher.detach(self._session, Reason.DEPARTED if self._leaving else Reason.LOST, how)
        self._context.closed(self)

    # The handshake, then the session

    def _begin(self, data: bytes) -> bool:
        """Tell from the first byte what kind of connection this is; returns whether it is one of ours."""
        first, tls = data[:1], self._context.tls
        if first == TLS_HANDSHAKE:
            if tls is not None:
                from rallypoint.base.tls import TlsChannel

                self._channel = TlsChannel(tls)
                return True
            self._refuse("it speaks TLS, and this control plane does not; give it tls_cert, tls_key and tls_ca too")
            return False
        if first != MAGIC[:1] and self._context.fallback is not None:
            self._hand_over(data, self._context.fallback)
            return False
        if tls is not None:
            self._refuse(_TLS_ONLY)
            return False
        return True

    def _decrypted(self, channel: TlsChannel, data: bytes) -> bytes:
        from rallypoint.base.tls import TlsError

        try:
            plain = channel.receive(data)
        except TlsError as error:
            self._transport.write(channel.to_send())  # the alert that says why
            self._close_unauthenticated(str(error))
            return b""
        self._transport.write(channel.to_send())
        if channel.objection is not None:
            self._refuse(channel.objection)
            return b""
        return plain

    def _hand_over(self, data: bytes, fallback: Callable[[socket.socket, bytes], None]) -> None:
        self._done = True
        self._timeout.cancel()
        self._context.closed(self)  # and with that it does not count as unauthenticated any more
        try:
            own = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
            fallback(own, data)
        except OSError as error:  # no descriptors, or no threads
            self._close_unauthenticated(f"what else is served on this port cannot take it over: {error}")
        else:
            self._transport.abort()  # which closes our descriptor, and not the connection

    def _on_frame(self, payload: bytes) -> bool:
        """Deal with one message; returns whether the connection goes on."""
        if self._dispatcher is not None:
            if self._signers is not None:
                payload = self._signers.incoming.verify(payload)
            self._on_request(
                self._dispatcher, _HEARTBEAT_REQUEST if payload == _HEARTBEAT else codec.decode_request(payload)
            )
            return True
        if self._handshake.greeted is None:
            version = codec.version_of(payload)
            answer = (
                self._answer_to(payload) if version == PROTOCOL_VERSION else HandshakeRefused(version_error(version))
            )
            self.write(MAGIC)
            return self._send_or_refuse(answer)
        refused = self._handshake.proof(codec.decode(payload, Proof), self._transcript)
        if refused is not None:
            return self._send_or_refuse(refused)
        try:
            self._open(self._handshake.greeted)
        except HandshakeError as error:
            return self._send_or_refuse(HandshakeRefused(str(error)))
        return True

    def _answer_to(self, payload: bytes) -> Challenge | HandshakeRefused:
        try:
            hello = codec.decode(payload, Hello)
        except codec.CodecError as error:
            return HandshakeRefused(str(error))
        self._peer = f"{self._peer} ({printable(hello.host or hello.address, 64)})"
        answer = self._handshake.hello(hello)
        if self._context.keys is not None:
            from rallypoint.protocol.signing import transcript_of

            self._transcript = transcript_of(payload, codec.encode(answer))
        return answer

    def _refuse(self, sentence: str) -> None:
        self.write(MAGIC)
        self._send_or_refuse(HandshakeRefused(sentence))

    def _send_or_refuse(self, answer: Challenge | HandshakeRefused) -> bool:
        self._send_message(answer)
        if isinstance(answer, HandshakeRefused):
            self._close_unauthenticated(f"it was told: {answer.sentence}")
            return False
        return True

    def _open(self, hello: Hello) -> None:
        dispatcher = self._context.jobs.dispatcher_for(hello, self._peer_host.partition("%")[0] or _UNKNOWN)
        self._signers = self._handshake.signers
        self._timeout.cancel()
        self._context.limiter.remove(self)
        own = usable_address(unmapped_address(str(self._transport.get_extra_info("sockname")[0])))
        here = hello.pid == os.getpid() and hello.address == own
        # The welcome must be the session's first frame: the name is known only after attaching, so notifications of
        # this session cannot precede it (they are only sent in answer to what the node says).
        self._session, name = dispatcher.attach(
            self._deliver,
            SessionRecord(
                NodeId(hello.address, hello.pid, hello.local_id, hello.host),
                hello.address,
                own,
                self._peer_host and usable_address(self._peer_host),
                hello.settings,
                in_this_process=here,
                local=here and self._context.has_local_nodes,
            ),
            self._hang_up,
        )
        self._dispatcher = dispatcher
        self._send_message(
            Welcome(name, dispatcher.settings.lease, dispatcher.incarnation, self._context.jobs.job is not None)
        )

    def _on_heartbeat(self, dispatcher: Dispatcher) -> None:
        if not dispatcher.heartbeat(self._session):
            self._close_unauthenticated(self._end_reason)
            return
        self._answered = not self._answered or len(self._context.connections) <= _MANY_SESSIONS
        if self._answered:
            # At once: an answer may overtake what else is told, and means only that we live and have heard all so far.
            if self._signers is None:
                self.write(_HEARTBEAT_FRAME)
            else:
                self.send(_HEARTBEAT)

    def _on_request(self, dispatcher: Dispatcher, request: Request) -> None:
        if isinstance(request, Heartbeat):
            self._on_heartbeat(dispatcher)
            return
        if isinstance(request, LeaveRequest):
            self._leaving = True
        elif isinstance(request, JoinRequest):
            self._leaving = False
        if not dispatcher.receive(self._session, request):
            self._close_unauthenticated(self._end_reason)

    def _deliver(self, notification: Notification) -> None:
        self._context.post(self, notification)

    def _hang_up(self, why: str) -> None:
        log.warning("control connection from %s is closed: %s", self._peer, why)
        self._end_reason = why
        self._loop.call_soon_threadsafe(self._end_session)

    def _end_session(self) -> None:
        if not self._done:
            self._send_message(SessionEnded(self._end_reason))
        self.abort()

    # Sending and ending

    def _send_message(self, message: object) -> None:
        self.send(codec.encode(message))

    def send(self, payload: bytes) -> None:
        """Send a frame, signed where the session's are. On the loop's thread."""
        if self._signers is not None:
            payload = self._signers.outgoing.sign(payload)
        self.write(frame(payload))

    def write(self, data: bytes) -> None:
        """Send bytes, unless it was said that nothing more comes. On the loop's thread."""
        if self._done or self._transport.is_closing():
            return
        if self._channel is not None:
            self._channel.send(data)
            data = self._channel.to_send()
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _WRITE_BUFFER_LIMIT:
            log.warning("control connection from %s does not read what it is sent; it is closed", self._peer)
            self._transport.abort()

    def finish(self, why: str) -> None:
        """Send what is left and why nothing more comes; take no more requests, which nobody would stand for."""
        if why and self._dispatcher is not None and not self._done:
            self._send_message(SessionEnded(why))
        self._done = True
        if self._channel is not None and not self._transport.is_closing():
            self._channel.close_notify()
            self._transport.write(self._channel.to_send())
        if self._dispatcher is None:
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        """Hang up at once."""
        self._transport.abort()

    def _close_unauthenticated(self, why: str) -> None:
        self._done = True
        if self._dispatcher is None:
            self._context.limiter.log_refusal("control connection from %s refused: %s", self._peer, why)
        else:
            log.warning("control connection from %s is closed: %s", self._peer, why)
        self._transport.close()

    def _on_handshake_timeout(self) -> None:
        self._close_unauthenticated(f"it said nothing that opens a session within {HANDSHAKE_TIMEOUT:.0f} s")

    def evict(self) -> None:
        """End a connection that has not become a session, for the sake of newer ones."""
        self._close_unauthenticated(
            "too many connections are open that said nothing that opens a session; newer ones take its place"
        )
        self.abort()
