"""The embedded control server: sessions over TCP for one hub.

A stranger's bytes cost a log line, never the job: every connection must greet with the magic, say hello and prove the
secret within a deadline, and each frame is bounded and typed. It runs on the process's loop thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopThread, shared_loop
from rallypoint.rendezvous.hub import Hub

if TYPE_CHECKING:
    import asyncio

    from rallypoint.rendezvous.connection import ControlConnection

log = get_logger(__name__)


class ControlServer:
    """Listens for the nodes of one job.

    The socket listens when this returns; connections are served as soon as the loop thread is up.
    """

    def __init__(
        self,
        hub: Hub,
        listener: socket.socket,
        *,
        secret: bytes | None = None,
        loop: LoopThread | None = None,
        fallback: Callable[[], asyncio.Protocol] | None = None,
    ) -> None:
        """Serve `hub` on `listener`, which this takes over.

        Args:
            hub: where requests go.
            listener: a listening socket (`base.endpoint.listening_socket`).
            secret: what nodes must prove to hold; None if the job has none.
            loop: where to run; the process's shared loop if not given.
            fallback: makes the protocol for connections that do not greet as ours do, if something else is served
                on the same port (the worker store of a static rendezvous).
        """
        self.hub = hub
        self.secret = secret
        self.fallback = fallback
        self.host, self.port = listener.getsockname()[:2]
        self.connections: set[ControlConnection] = set()
        self._listener = listener
        self._loop = loop or shared_loop()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._emptied: asyncio.Event | None = None
        self._closed: Future[None] | None = None
        hub.on_change = lambda: self._loop.call(self._arm)
        self._loop.call(self._start)

    def close(self, linger: float = 2.0) -> None:
        """Take no more nodes, let the last notices arrive, and end all sessions. Idempotent.

        Args:
            linger: seconds that nodes have to read what was sent and hang up.
        """
        if self._closed is None:
            self._closed = self._loop.submit(self._shut(linger))
        self._closed.result()

    @staticmethod
    def nonce() -> bytes:
        """Bytes that no other handshake has had."""
        return os.urandom(16)

    def _start(self) -> None:
        import asyncio

        self._starting = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        import asyncio

        from rallypoint.rendezvous.connection import ControlConnection

        def protocol() -> asyncio.Protocol:
            return ControlConnection(self)

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(protocol, sock=self._listener, backlog=4096)
        self._arm()

    async def _shut(self, linger: float) -> None:
        import asyncio

        await self._starting
        assert self._server is not None
        self._server.close()
        self.hub.on_change = _nothing
        if self._timer is not None:
            self._timer.cancel()
        self._emptied = asyncio.Event()
        for connection in list(self.connections):
            connection.finish()
        if self.connections:
            try:
                await asyncio.wait_for(self._emptied.wait(), linger)
            except TimeoutError:
                log.info("%d control connections did not hang up in %.1f s", len(self.connections), linger)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)  # let the aborted transports report that they are gone
        self._listener.close()

    def forget(self, connection: ControlConnection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if not self.connections and self._emptied is not None:
            self._emptied.set()

    def _arm(self) -> None:
        """Set the timer to when the arbiter next has something to do. On the loop's thread."""
        import asyncio

        if self._server is None or self._emptied is not None:
            return
        at = self.hub.wake_at()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at < float("inf"):
            delay = max(0.0, at - self.hub.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_at = float("inf")
        self.hub.tick()


def _nothing() -> None:
    return None
