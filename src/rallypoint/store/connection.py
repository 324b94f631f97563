"""A store's connection that asyncio carries: for servers that share their port with other protocols."""

from __future__ import annotations

import asyncio
from typing import cast

from rallypoint.store.carrying import peer_text
from rallypoint.store.serving import Connection, ServedTable

__all__ = ["ServedTable", "StoreProtocol"]


class StoreProtocol(Connection, asyncio.Protocol):
    """One client's connection to `served`.

    A server that first looks at a connection's first bytes hands it over by `transport.set_protocol(protocol)`,
    `protocol.connection_made(transport)` and `protocol.data_received(bytes_so_far)`.
    """

    __slots__ = ("_transport",)
    _transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        self._served.connections.add(self)
        if self._served.closed:
            self.abort()

    def data_received(self, data: bytes) -> None:
        """The client has sent bytes."""
        if not self._over:
            self.serve(data)
            self._served.flush()

    def eof_received(self) -> bool:
        """The client sends no more. It gets the replies that it has earned, and then the connection closes."""
        self.leave()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has gone, and whatever waited in it."""
        self.leave()
        self._backlog.clear()
        self._served.connections.discard(self)

    def pause_writing(self) -> None:
        """Too much is on its way to this client."""
        self._full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The client has read most of what was on its way."""
        self._full = False
        while self._backlog and not self._full:
            self._transport.write(self._backlog.popleft())
        if self._backlog:
            return
        if self._over:
            self._transport.close()
            return
        self.serve(b"")
        self._served.flush()
        if not self._full:
            self._transport.resume_reading()

    def write(self, replies: bytes) -> None:
        if self._full:
            self._backlog.append(replies)
        else:
            self._transport.write(replies)

    def finish(self) -> None:
        if not self._backlog:
            self._transport.close()

    def abort(self) -> None:
        self.leave()
        self._transport.abort()

    def peer(self) -> str:
        return peer_text(self._transport.get_extra_info("peername"))
