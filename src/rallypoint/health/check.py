"""The health check under the names that torch's users know; theirs only logs that there is none (contract 5.10).

A port that cannot be had costs a log line, never the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopError, LoopThread, shared_loop
from rallypoint.health.http import HealthView

if TYPE_CHECKING:
    from rallypoint.health.server import HealthServer

log = get_logger(__name__)

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
DEFAULT_TIMEOUT = 60


def _no_status() -> Mapping[str, object]:
    return {}


class HealthCheckServer:
    """Answers `GET /healthz` with 200, or with 503 once the last progress is older than the timeout; `/status` as JSON.

    It answers between `start` and `stop`, on all interfaces of this machine. Both are idempotent, and it can be started
    again.

    Args:
        alive_callback: when there last was progress, in epoch seconds. Called on the loop's thread; it must return at
            once.
        port: 0 lets the kernel choose.
        timeout: seconds.
        status: what `/status` shows beside that; called like the other.
        loop: where to serve; the process's shared loop if none is given.
    """

    def __init__(
        self,
        alive_callback: Callable[[], float],
        port: int,
        timeout: float,
        status: Callable[[], Mapping[str, object]] = _no_status,
        loop: LoopThread | None = None,
    ) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self._status = status
        self._loop = loop
        self._server: HealthServer | None = None
        self._listens_on: int | None = None

    @property
    def alive_callback(self) -> Callable[[], float]:
        """What is asked for the last progress."""
        return self._alive_callback

    @property
    def port(self) -> int:
        """The port on which it answers; that which was asked for while it does not."""
        return self._port if self._listens_on is None else self._listens_on

    def start(self) -> None:
        """Begin to answer. Where that cannot be, a warning says so."""
        if self._server is not None:
            return
        from rallypoint.base.endpoint import listening_socket

        try:
            listener = listening_socket("", self._port)
        except (OSError, OverflowError) as error:
            log.warning("there is no health check: port %d cannot be listened on (%s)", self._port, error)
            return
        port = int(listener.getsockname()[1])
        from rallypoint.health.server import HealthServer

        try:
            self._server = HealthServer(listener, self._look, self._loop or shared_loop())
        except LoopError as error:
            listener.close()
            log.warning("there is no health check: %s", error)
            return
        self._listens_on = port
        log.info("the health check answers on port %d: /healthz and /status", port)

    def stop(self) -> None:
        """Answer no more."""
        server, self._server, self._listens_on = self._server, None, None
        if server is not None:
            server.close()

    def _look(self) -> HealthView:
        try:
            return HealthView(max(0.0, time.time() - self._alive_callback()), self._timeout, self._status())
        except Exception as error:
            return HealthView(0.0, self._timeout, {}, f"the agent cannot be asked ({type(error).__name__}: {error})")


def create_healthcheck_server(
    alive_callback: Callable[[], float],
    port: int,
    timeout: float,
    status: Callable[[], Mapping[str, object]] = _no_status,
) -> HealthCheckServer:
    """A server that has not been started; the arguments are those of `HealthCheckServer`."""
    return HealthCheckServer(alive_callback, port, timeout, status)


def requested_port(environ: Mapping[str, str] = os.environ) -> int | None:
    """The port that `TORCHELASTIC_HEALTH_CHECK_PORT` asks for; None if it asks for none that can be."""
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
