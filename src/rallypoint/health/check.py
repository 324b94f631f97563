"""The health check under the names that torch's users know; torch's only logs that there is none (contract 5.10).

It starts without waiting: asyncio is imported on the loop's thread, and the kernel queues early probes. A port that
cannot be used is logged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

from rallypoint.base.http import Answer, Client, Handler, RequestError, parse, refusal
from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopError, LoopThread, shared_loop
from rallypoint.health.http import STATUS, HealthView, reply_to

if TYPE_CHECKING:
    import asyncio
    import socket

    from rallypoint.base.http_access import Access

log = get_logger(__name__)

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
DEFAULT_TIMEOUT = 60
_CLOSE_TIMEOUT = 2.0
"""Seconds that `stop` waits; the loop's thread may be busy."""


class HealthCheckServer:
    """Answers `GET /healthz` with 200, or with 503 once the last progress is older than the timeout; `/status` as JSON.

    `/livez` is the same as `/healthz`, and `/readyz` is well while the workers run. It answers between `start` and
    `stop`, on all interfaces of this machine; it can be started again.

    Args:
        alive_callback: returns the time of the last progress, in epoch seconds, at once; called on the loop's thread.
        port: 0 lets the kernel choose.
        timeout: seconds.
        status: what else `/status` shows; called like the other.
        loop: where to serve; the process's shared loop by default.
        others: answers requests for anything else, if that is known; 404 otherwise.
        access: who may see `/status`; without it the same user and root on this machine.
    """

    def __init__(
        self,
        alive_callback: Callable[[], float],
        port: int,
        timeout: float,
        status: Callable[[], Mapping[str, object]] = dict,
        loop: LoopThread | None = None,
        others: Handler | None = None,
        access: Access | None = None,
    ) -> None:
        self.alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self._status = status
        self._loop = loop
        self._others = others
        self._access = access
        self._serving: _Serving | None = None

    @property
    def port(self) -> int:
        """The port on which it answers; the requested one while it does not."""
        return self._port if self._serving is None else self._serving.port

    def start(self) -> None:
        """Begin to answer; logs a warning if that fails. Idempotent."""
        if self._serving is not None:
            return
        from rallypoint.base.endpoint import listening_socket

        try:
            listener = listening_socket("", self._port)
        except (OSError, OverflowError) as error:
            log.warning("there is no health check: port %d cannot be listened on (%s)", self._port, error)
            return
        try:
            self._serving = _Serving(listener, self._answer, self._loop or shared_loop())
        except LoopError as error:
            listener.close()
            log.warning("there is no health check: %s", error)
            return
        log.info("the health check answers on port %d: /healthz and /status", self.port)

    def stop(self) -> None:
        """Answer no more. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()

    async def _answer(self, head: bytes, client: Client) -> Answer:
        try:
            request = parse(head)
        except RequestError as error:
            return refusal(error.status)
        if request.path == STATUS:
            from rallypoint.base.http_access import Access

            refused = (self._access or Access()).refusal_for(request, client)
            if refused is not None:
                return refused
        own = reply_to(request, self._view)
        if own is None and self._others is not None:
            return await self._others(head, client)
        return own or refusal(HTTPStatus.NOT_FOUND)

    def _view(self) -> HealthView:
        try:
            return HealthView(max(0.0, time.time() - self.alive_callback()), self._timeout, self._status())
        except Exception as error:
            return HealthView(0.0, self._timeout, {}, f"the agent cannot be asked ({type(error).__name__}: {error})")


class _Serving:
    """One run of the server on a listening socket. LoopError if there is no loop; the socket is then the caller's."""

    def __init__(self, listener: socket.socket, handler: Handler, loop: LoopThread) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._handler = handler
        self._loop = loop
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = threading.Event()
        loop.call(self._begin)

    def close(self) -> None:
        """Close the listener and all connections; waits `_CLOSE_TIMEOUT` at most. Not on the loop's thread."""
        if not self._loop.withdraw(self._begin):
            self._loop.call(self._end)
            if not self._ended.wait(_CLOSE_TIMEOUT):
                log.warning(
                    "the health server did not close in %.0f s; the loop of this process is stuck", _CLOSE_TIMEOUT
                )
        self._ended.set()
        self._listener.close()

    def _begin(self) -> None:
        import asyncio

        from rallypoint.base.http_server import serve

        self._stop = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(serve([self._listener], self._handler, self._stop))
        self._task.add_done_callback(lambda _task: self._ended.set())

    def _end(self) -> None:
        if self._stop is not None:
            self._stop.set()


def create_healthcheck_server(
    alive_callback: Callable[[], float],
    port: int,
    timeout: float,
    status: Callable[[], Mapping[str, object]] = dict,
    others: Handler | None = None,
    access: Access | None = None,
) -> HealthCheckServer:
    """A server that has not been started; the arguments are those of `HealthCheckServer`."""
    return HealthCheckServer(alive_callback, port, timeout, status, others=others, access=access)


def requested_port(environ: Mapping[str, str] = os.environ) -> int | None:
    """The port in `TORCHELASTIC_HEALTH_CHECK_PORT`; None if it is not set, or not a port."""
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        log.warning("%s=%r is not a port from 0 to 65535; there is no health check", VARIABLE, text)
        return None
    return port
