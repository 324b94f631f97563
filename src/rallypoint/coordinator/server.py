"""The control server: sessions over TCP for one job (embedded in an agent) or for many (`jobs`).

The bytes of an unauthenticated peer cost a log line, never the job: every connection must greet with the magic, say
hello and prove the secret within a deadline, and each frame is bounded and typed. Of many unauthenticated connections
(`connection_limiter`) only some are logged, and the oldest make room. It runs on the process's loop thread.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from rallypoint.base.endpoint import Endpoint, is_loopback
from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopThread, shared_loop
from rallypoint.coordinator.dispatcher import Dispatcher, do_nothing

if TYPE_CHECKING:
    import asyncio

    from rallypoint.base.tls import ControlTls
    from rallypoint.coordinator.connection import ControlConnection
    from rallypoint.coordinator.connection_limiter import ConnectionLimiter
    from rallypoint.protocol.handshake import Hello, Keys
    from rallypoint.protocol.messages import Notification

log = get_logger(__name__)


class JobDirectory(Protocol):
    """Whose nodes a server takes: those of one job (`dispatcher.Dispatcher`) or of any (`jobs.ManyJobs`)."""

    on_change: Callable[[], None]
    """Called after each event, from any thread: `wake_at` may have moved."""

    @property
    def job(self) -> str | None:
        """The one job that nodes must be of; None takes any."""
        ...

    def dispatcher_for(self, hello: Hello, peer: str) -> Dispatcher:
        """The dispatcher of the job that a node, which has proved that it may, belongs to. HandshakeError if there is
        none.

        `peer` is the address that its connection comes from.
        """
        ...

    def now(self) -> float:
        """The time on which `wake_at` is."""
        ...

    def wake_at(self) -> float:
        """When `tick` should be called next; infinity for never."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...


class ControlServer:
    """Listens for nodes.

    The socket listens when this returns; connections are served as soon as the loop thread is up.
    """

    def __init__(
        self,
        jobs: JobDirectory,
        listener: socket.socket | Sequence[socket.socket],
        *,
        keys: Keys | None = None,
        tls: ControlTls | None = None,
        loop: LoopThread | None = None,
        fallback: Callable[[socket.socket, bytes], None] | None = None,
        home: bool = False,
    ) -> None:
        """Serve `jobs` on `listener`, which this takes over.

        Args:
            jobs: where requests go.
            listener: a listening socket (`base.endpoint.listening_socket`), or some; `port` is that of the first.
            keys: what nodes must prove to hold one of; None if the job has none.
            tls: what every control connection must speak, if anything; a `fallback` is not asked to.
            loop: where to run; the process's shared loop if not given.
            fallback: takes over connections that do not greet as ours do, with what has been read from them, if
                something else is served on the same port (the worker store of a static rendezvous).
            home: whether a node that connects from this very process lives and dies with the server.
        """
        self.jobs = jobs
        self.keys = keys
        self.tls = tls
        self.fallback = fallback
        self.has_local_nodes = home
        self._listeners = (listener,) if isinstance(listener, socket.socket) else tuple(listener)
        self.host, self.port = self._listeners[0].getsockname()[:2]
        self.connections: set[ControlConnection] = set()
        self._outbox: deque[tuple[ControlConnection, bytes]] = deque()
        self._posting = False
        self.last_encoded: tuple[Notification, bytes] | None = None
        """The notification that was told last, and its bytes: often many are told the same."""
        self.connection_limiter: ConnectionLimiter
        self._loop = loop or shared_loop()
        self._servers: list[asyncio.Server] = []
        self._serves = False
        self._arming = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._emptied: asyncio.Event | None = None
        self._closed: Future[None] | None = None
        if keys is None and tls is None:
            self._warn_if_open()
        jobs.on_change = self._arm_soon
        self._loop.call(self._start)

    def _warn_if_open(self) -> None:
        """Say that anybody may come, where others than this machine can."""
        places = [each.getsockname()[:2] for each in self._listeners]
        outside = [Endpoint("*" if host in {"::", "0.0.0.0"} else host, port) for host, port in places]
        outside = [each for each in outside if not is_loopback(each.host)]
        if outside:
            log.warning(
                "the control plane listens at %s without a secret, so that whoever reaches it can join, restart and "
                "end the job; give all nodes the same RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)",
                " and ".join(map(str, outside)),
            )

    def close(self, linger: float = 2.0, why: str = "") -> None:
        """Take no more nodes, let the last notifications arrive, and end all sessions. Idempotent.

        Args:
            linger: seconds that nodes have to read what was sent and hang up.
            why: what to tell them, last of all.
        """
        if self._closed is None:
            self._closed = self._loop.submit(self._close_all(linger, why))
        self._closed.result()

    def post(self, connection: ControlConnection, payload: bytes) -> None:
        """Have a frame of `payload` written on the loop's thread, in the order of the calls; from any thread.

        The loop is woken once for all that it has not got to yet.
        """
        self._outbox.append((connection, payload))
        if not self._posting:
            self._posting = True
            self._loop.call(self._write_posted)

    def _write_posted(self) -> None:
        self._posting = False  # first: who appends from now on has us called again
        while self._outbox:
            connection, payload = self._outbox.popleft()
            connection.send(payload)

    @staticmethod
    def nonce() -> bytes:
        """Bytes that no other handshake has had."""
        return os.urandom(16)

    def _start(self) -> None:
        import asyncio

        self._starting = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        import asyncio

        from rallypoint.coordinator.connection import ControlConnection
        from rallypoint.coordinator.connection_limiter import ConnectionLimiter

        self.connection_limiter = ConnectionLimiter()

        def protocol() -> asyncio.Protocol:
            return ControlConnection(self)

        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            self._servers.append(await loop.create_server(protocol, sock=listener, backlog=4096))
        self._serves = True
        self._arm()

    async def _close_all(self, linger: float, why: str) -> None:
        import asyncio

        await self._starting
        self._serves = False
        for server in self._servers:
            server.close()
        self.jobs.on_change = do_nothing
        if self._timer is not None:
            self._timer.cancel()
        self._emptied = asyncio.Event()
        for connection in list(self.connections):
            connection.finish(why)
        if self.connections:
            try:
                await asyncio.wait_for(self._emptied.wait(), linger)
            except TimeoutError:
                log.info("%d control connections did not hang up in %.1f s", len(self.connections), linger)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)  # let the aborted transports report that they are gone
        self.connection_limiter.close()
        for listener in self._listeners:
            listener.close()

    def connection_closed(self, connection: ControlConnection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        self.connection_limiter.remove(connection)
        if not self.connections and self._emptied is not None:
            self._emptied.set()

    def _arm_soon(self) -> None:
        """See to the timer on the loop's thread; once for all that happens until then."""
        if not self._arming:
            self._arming = True
            self._loop.call(self._arm)

    def _arm(self) -> None:
        """Set the timer to when the coordinator next has something to do. On the loop's thread."""
        import asyncio

        self._arming = False
        if not self._serves:
            return
        at = self.jobs.wake_at()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at < float("inf"):
            delay = max(0.0, at - self.jobs.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_at = float("inf")
        try:
            self.jobs.tick()
        finally:
            self._arm()
