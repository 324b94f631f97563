"""The control server: sessions over TCP for one job (embedded in an agent) or for many (`jobs`).

Bytes from an unauthenticated peer cost a log line, never the job: every connection must greet with the magic, say hello
and prove the secret within a deadline, and each frame is bounded and typed. Of many unauthenticated connections
(`ConnectionLimiter`) only some are logged, and the oldest make room. It runs on the thread of the loop that it is
given.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from rallypoint.base.endpoint import Endpoint, is_loopback
from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopError, LoopThread, shared_loop
from rallypoint.control.coordinator.dispatcher import do_nothing

if TYPE_CHECKING:
    import asyncio

    from rallypoint.base.tls import ControlTls
    from rallypoint.control.coordinator.connection import Connections, ControlConnection
    from rallypoint.control.coordinator.jobs import ServedJobs
    from rallypoint.control.protocol.handshake import Keys

log = get_logger(__name__)

_CLOSE_TIMEOUT = 5.0
"""Seconds that `close` waits for the loop, beyond the time that nodes have."""


class ControlServer:
    """Listens for nodes.

    The socket listens when this returns; connections are served as soon as the loop thread is up.
    """

    def __init__(
        self,
        jobs: ServedJobs,
        listener: socket.socket | Sequence[socket.socket],
        *,
        keys: Keys | None = None,
        tls: ControlTls | None = None,
        loop: LoopThread | None = None,
        fallback: Callable[[socket.socket, bytes], None] | None = None,
        has_local_nodes: bool = False,
    ) -> None:
        """Serve `jobs` on `listener`, which this takes over.

        Args:
            jobs: the jobs that requests go to.
            listener: a listening socket (`base.endpoint.listening_socket`), or several; `port` is that of the first.
            keys: the keys of which nodes must prove to hold one; None if the job has none.
            tls: the TLS that every control connection must use, if any; connections of a `fallback` need not.
            loop: the loop to run on; the process's shared loop if not given.
            fallback: takes over connections that do not greet as ours do, with what has been read from them, if
                something else is served on the same port (the worker store of a static rendezvous).
            has_local_nodes: whether a node that connects from this very process lives and dies with the server.
        """
        self.jobs = jobs
        self._keys = keys
        self._tls = tls
        self._fallback = fallback
        self._has_local_nodes = has_local_nodes
        self._listeners = (listener,) if isinstance(listener, socket.socket) else tuple(listener)
        self.host: str
        self.port: int
        self.host, self.port = self._listeners[0].getsockname()[:2]
        self._connections: Connections | None = None
        """Set on the loop's thread, when it serves."""
        self._loop = loop or shared_loop()
        self._serves = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._closed: Future[None] | None = None
        if keys is None and tls is None:
            self._warn_if_open()
        self._loop.call(self._serve)

    @property
    def connections(self) -> Collection[ControlConnection]:
        """The open connections, for reading only."""
        return () if self._connections is None else self._connections.open

    def _warn_if_open(self) -> None:
        """Warn that anyone may connect, if other machines can."""
        places = [listener.getsockname()[:2] for listener in self._listeners]
        outside = [Endpoint("*" if host in {"::", "0.0.0.0"} else host, port) for host, port in places]
        outside = [place for place in outside if not is_loopback(place.host)]
        if outside:
            log.warning(
                "the control plane listens at %s without a secret, so that whoever reaches it can join the job and "
                "see its status; give all nodes the same RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)",
                " and ".join(map(str, outside)),
            )

    def close(self, linger: float = 2.0, why: str = "") -> None:
        """Accept no more nodes, let the last notifications arrive, and end all sessions. Idempotent.

        Args:
            linger: seconds that nodes have to read what was sent and disconnect.
            why: the last message to them.
        """
        if self._closed is None:
            self._closed = self._loop.submit(self._close_all(linger, why))
        try:
            self._closed.result(linger + _CLOSE_TIMEOUT)
        except TimeoutError:  # the loop is busy; nothing may keep this process from ending
            log.warning(
                "the control plane was not closed within %.1f s; it ends without a last message",
                linger + _CLOSE_TIMEOUT,
            )

    def until_serving(self) -> None:
        """Wait until connections are served. Not on the loop's thread. Raises LoopError: they never will be."""

        async def serves() -> bool:  # behind `_serve`
            return self._serves

        if not self._loop.submit(serves()).result():
            raise LoopError("the control plane cannot be served; look at the limit of open files (`ulimit -n`)")

    def _serve(self) -> None:
        from rallypoint.control.coordinator.connection import Connections, Served

        served = Served(self.jobs, self._keys, self._tls, self._fallback, self._has_local_nodes)
        self._connections = connections = Connections(served, self._arm)
        for listener in self._listeners:
            connections.transports.listen(listener)
        self.jobs.turns.move_to(self._loop)
        self.jobs.on_change = connections.end_turn_soon
        self._serves = True
        self._arm()

    async def _close_all(self, linger: float, why: str) -> None:
        import asyncio

        self._serves = False
        self.jobs.on_change = do_nothing
        if self._timer is not None:
            self._timer.cancel()
        connections = self._connections
        if connections is None:  # for lack of descriptors
            for listener in self._listeners:
                listener.close()
            return
        connections.transports.stop_listening()
        if self.jobs.is_awaited:  # nodes that end with the job answer a watcher first
            await self._until_answered(linger)
        self.jobs.tick()  # who follows is sent how the job has ended
        for connection in list(connections.open):
            connection.finish(why)
        if connections.open:
            try:
                await asyncio.wait_for(connections.emptied.wait(), linger)
            except TimeoutError:
                log.info("%d control connections did not disconnect in %.1f s", len(connections.open), linger)
        for connection in list(connections.open):
            connection.abort()
        await asyncio.sleep(0)  # let the aborted transports report that they are closed
        connections.close()

    async def _until_answered(self, linger: float) -> None:
        import asyncio

        done = asyncio.Event()

        def check() -> None:
            if not self.jobs.is_awaited:
                self._loop.call(done.set)

        self.jobs.on_change = check
        check()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), linger)
        self.jobs.on_change = do_nothing

    def _arm(self) -> None:
        """Set the timer to when the coordinator next has something to do."""
        import asyncio

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
