"""The control server: sessions over TCP for one job (embedded in an agent) or for many (`jobs`).

Bytes from an unauthenticated peer can cost a log line, but never the job: every connection must send the magic and the
hello and prove the secret within a deadline, and each frame is bounded and typed. If there are many unauthenticated
connections (`ConnectionLimiter`), only some are logged, and the oldest make room. The server runs on its loop's thread.
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
"""Seconds that `close` waits for the loop, besides the time for the nodes."""


class ControlServer:
    """Listens for nodes.

    The socket is listening when the constructor returns; connections are served once the loop's thread runs.
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
        """Serve `jobs` on `listener`, and own it from now on.

        Args:
            jobs: the jobs to serve.
            listener: a listening socket (`base.endpoint.listening_socket`), or several; `port` is the first one's.
            keys: nodes must prove that they have one of these keys; None if the job has none.
            tls: the TLS that every control connection must use, if any; not required for `fallback`.
            loop: the loop to run on; by default the process's shared loop.
            fallback: takes over connections without our greeting, together with the bytes already read, if the same
                port serves something else (the worker store of a static rendezvous).
            has_local_nodes: whether a node that connects from this process ends with the server.
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
        """Set on the loop's thread when it begins to serve."""
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
        """The open connections, read-only."""
        return () if self._connections is None else self._connections.open

    def _warn_if_open(self) -> None:
        """Warn that anyone can connect, if other machines can reach this server."""
        places = [listener.getsockname()[:2] for listener in self._listeners]
        outside = [Endpoint("*" if host in {"::", "0.0.0.0"} else host, port) for host, port in places]
        outside = [place for place in outside if not is_loopback(place.host)]
        if outside:
            log.warning(
                "the control plane listens at %s without a secret, so anyone who can reach it can join the job and see "
                "its status; set the same RALLYPOINT_SECRET_FILE on all nodes (`rallyctl secret` creates one)",
                " and ".join(map(str, outside)),
            )

    def close(self, linger: float = 2.0, why: str = "") -> None:
        """Accept no more nodes, deliver the last notifications, and end all sessions. Idempotent.

        Args:
            linger: seconds for nodes to read their messages and to disconnect.
            why: the last message to them.
        """
        if self._closed is None:
            self._closed = self._loop.submit(self._close_all(linger, why))
        try:
            self._closed.result(linger + _CLOSE_TIMEOUT)
        except TimeoutError:  # the loop is busy, but the process must end
            log.warning(
                "the control plane did not close within %.1f s, so it is exiting without a last message",
                linger + _CLOSE_TIMEOUT,
            )

    def until_serving(self) -> None:
        """Wait until connections are served. Not on the loop's thread. Raises LoopError if they never will be."""

        async def serves() -> bool:  # queued behind `_serve`
            return self._serves

        if not self._loop.submit(serves()).result():
            raise LoopError("the control plane cannot accept connections; check the limit of open files (`ulimit -n`)")

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
        if connections is None:  # the process had too few descriptors
            for listener in self._listeners:
                listener.close()
            return
        connections.transports.stop_listening()
        if self.jobs.is_awaited:  # nodes that end with the job first answer a watcher
            await self._until_answered(linger)
        self.jobs.tick()  # sends followers the end of the job
        for connection in list(connections.open):
            connection.finish(why)
        if connections.open:
            try:
                await asyncio.wait_for(connections.emptied.wait(), linger)
            except TimeoutError:
                log.info("%d control connections did not disconnect within %.1f s", len(connections.open), linger)
        for connection in list(connections.open):
            connection.abort()
        await asyncio.sleep(0)  # let the aborted transports report their end
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
        """Set the timer for the coordinator's next tick."""
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
