"""One control connection, seen from the server: greeting, handshake, session."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rallypoint.base.log import get_logger
from rallypoint.rendezvous import codec
from rallypoint.rendezvous.frames import MAGIC, FrameError, FrameReader, frame
from rallypoint.rendezvous.handshake import Challenge, Hello, Proof, Refused, ServerHandshake, Welcome
from rallypoint.rendezvous.messages import JoinRequest, Leave, Notice, Request
from rallypoint.rendezvous.state import NodeId, Reason

if TYPE_CHECKING:
    from rallypoint.rendezvous.server import ControlServer

log = get_logger(__name__)

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a connection has to become a session."""

_UNREAD_LIMIT = 4 * 1024 * 1024
"""Bytes of notices that a node may leave unread before it counts as gone."""


class ControlConnection(asyncio.Protocol):
    """A stranger at first, a node's session after the handshake."""

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._reader = FrameReader()
        self._handshake = ServerHandshake(server.hub.settings.run_id, server.secret, server.nonce())
        self._session: int | None = None
        self._leaving = False
        self._done = False

    # asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection has come in."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._peer = _shown(transport.get_extra_info("peername"))
        self._server.connections.add(self)
        self._timeout = self._loop.call_later(HANDSHAKE_TIMEOUT, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Bytes have come in."""
        if self._done:
            return
        if not self._reader.greeted and self._is_for_the_fallback(data):
            return
        try:
            for payload in self._reader.feed(data):
                if not self._on_frame(payload):
                    return
        except (FrameError, codec.CodecError) as error:
            self._drop(str(error))

    def connection_lost(self, _error: Exception | None) -> None:
        """The other side, or we, have hung up."""
        self._timeout.cancel()
        if self._session is not None:
            session, self._session = self._session, None
            self._server.hub.detach(session, Reason.DEPARTED if self._leaving else Reason.LOST)
        self._server.forget(self)

    # The handshake, then the session

    def _is_for_the_fallback(self, data: bytes) -> bool:
        fallback = self._server.fallback
        if fallback is None or data[:1] == MAGIC[:1]:
            return False
        self._done = True
        self._timeout.cancel()
        self._server.forget(self)
        protocol = fallback()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)
        return True

    def _on_frame(self, payload: bytes) -> bool:
        """Deal with one message; returns whether the connection goes on."""
        if self._session is not None:
            self._on_request(self._session, codec.decode_request(payload))
            return True
        if self._handshake.greeted is None:
            answer = self._handshake.hello(codec.decode(payload, Hello))
            self._write(MAGIC)
            return self._say_or_refuse(answer)
        refused = self._handshake.proof(codec.decode(payload, Proof))
        if refused is not None:
            return self._say_or_refuse(refused)
        self._open(self._handshake.greeted)
        return True

    def _say_or_refuse(self, answer: Challenge | Refused) -> bool:
        self._say(answer)
        if isinstance(answer, Refused):
            self._drop(answer.sentence)
            return False
        return True

    def _open(self, hello: Hello) -> None:
        self._timeout.cancel()
        node = NodeId(hello.address, hello.pid, hello.local_id)
        own = str(self._transport.get_extra_info("sockname")[0])
        # The welcome must be the session's first frame: the name is known only after attaching, so notices of this
        # session cannot precede it (they are only sent in answer to what the node says).
        self._session, name = self._server.hub.attach(
            self._deliver, node, address=hello.address, server_address=_plain(own), hang_up=self._hang_up
        )
        self._say(Welcome(str(name), self._server.hub.settings.lease))

    def _on_request(self, session: int, request: Request) -> None:
        if isinstance(request, Leave):
            self._leaving = True
        elif isinstance(request, JoinRequest):
            self._leaving = False
        if not self._server.hub.receive(session, request):
            self._drop("its node was silent for longer than its lease and has been taken out")

    def _deliver(self, notice: Notice) -> None:
        data = frame(codec.encode(notice))
        self._loop.call_soon_threadsafe(self._write, data)

    def _hang_up(self) -> None:
        log.warning(
            "control connection from %s: its node was silent for longer than its lease; it is taken out", self._peer
        )
        self._loop.call_soon_threadsafe(self.abort)

    # Sending and ending

    def _say(self, message: object) -> None:
        self._write(frame(codec.encode(message)))

    def _write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _UNREAD_LIMIT:
            log.warning("control connection from %s does not read what it is sent; it is closed", self._peer)
            self._transport.abort()

    def finish(self) -> None:
        """Send what is left and say that nothing more comes."""
        if self._session is None:
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        """Hang up at once."""
        self._transport.abort()

    def _drop(self, why: str) -> None:
        self._done = True
        log.warning("control connection from %s refused: %s", self._peer, why)
        self._transport.close()

    def _too_slow(self) -> None:
        self._drop(f"it said nothing that opens a session within {HANDSHAKE_TIMEOUT:.0f} s")


def _shown(address: object) -> str:
    match address:
        case (str(host), int(port), *_):
            return f"{_plain(host)}:{port}"
        case _:
            return "an unknown address"


def _plain(address: str) -> str:
    """An IPv4 address without the dress that a dual-stack socket puts on it."""
    return address.removeprefix("::ffff:") if "." in address else address
