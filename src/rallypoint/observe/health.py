"""The agent's health, over HTTP, under the names that torch's users know (contract section 5.10).

Its start does not block: asyncio is imported on the loop's thread, and the kernel queues early probes. An unusable port
is logged. The server itself is `base.http_server`.

An agent's loop shows its progress with two calls: it goes to sleep, it wakes. A healthy loop may sleep for hours while
it waits for events, so the time of the last event proves nothing. Laws:

- a sleeping loop makes progress until its own wake-up time; after that, it has stalled since then;
- an awake loop has stalled since it woke, since each of its steps should be short;
- the loop only replaces one reference, so no reader can block it, and each reader sees a consistent state.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.http import Answer, Client, Handler, Request, RequestError, parse, refusal, response
from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopError, LoopThread, shared_loop

if TYPE_CHECKING:
    import asyncio
    import socket

    from rallypoint.base.http import Access

log = get_logger(__name__)

TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
DEFAULT_TIMEOUT = 60
_CLOSE_TIMEOUT = 2.0
"""Seconds that `stop` waits for the loop's thread, in case it is busy."""


# Whether the agent makes progress


class _Snapshot(NamedTuple):
    stands_from: float  # no progress after this time; in the future while the loop sleeps
    status: Mapping[str, object]


class ProgressProbe:
    """One thread writes it, any thread may read it. `clock` is the clock of `wake_at`."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._snapshot = _Snapshot(clock.monotonic(), {})

    def going_to_sleep(self, wake_at: float, status: Mapping[str, object]) -> None:
        """Record that the loop is about to wait for events, at most until `wake_at` on the clock (perhaps infinity).

        `status` is shown on request: plain data that must not change afterwards.
        """
        self._snapshot = _Snapshot(wake_at, status)

    def on_wake(self) -> None:
        self._snapshot = _Snapshot(self._clock.monotonic(), self._snapshot.status)

    def age(self) -> float:
        """Seconds without progress; 0 while the loop is healthy."""
        stands_from = self._snapshot.stands_from
        return 0.0 if math.isinf(stands_from) else max(0.0, self._clock.monotonic() - stands_from)

    def last_progress(self) -> float:
        """The time of the last progress in epoch seconds, for an `alive_callback`."""
        return time.time() - self.age()

    def status(self) -> Mapping[str, object]:
        return self._snapshot.status


# The replies


class HealthView(NamedTuple):
    """The agent's health: `age` is the number of seconds since its last progress, `timeout` the limit.

    `trouble` explains in a sentence why the age is unknown.
    """

    age: float
    timeout: float
    status: Mapping[str, object]
    trouble: str = ""

    @property
    def is_well(self) -> bool:
        return not self.trouble and self.age <= self.timeout


def reply_to(request: Request, view: Callable[[], HealthView]) -> bytes | None:
    """The reply to a request; None for any other page. Pure."""
    page = _PAGES.get(request.path)
    return None if page is None else response(*page(view()), bodiless=request.bodiless)


def _healthz(health: HealthView) -> tuple[HTTPStatus, dict[str, object]]:
    status = HTTPStatus.OK if health.is_well else HTTPStatus.SERVICE_UNAVAILABLE
    return status, _health_of(health)


def _status(health: HealthView) -> tuple[HTTPStatus, dict[str, object]]:
    return HTTPStatus.OK, {**health.status, **_health_of(health)}


def _health_of(health: HealthView) -> dict[str, object]:
    shown: dict[str, object] = {
        "healthy": health.is_well,
        "seconds_since_progress": round(health.age, 3),
        "timeout_seconds": health.timeout,
    }
    return {**shown, "trouble": health.trouble} if health.trouble else shown


def _ready(health: HealthView) -> tuple[HTTPStatus, dict[str, object]]:
    ready = health.is_well and health.status.get("state") == "HEALTHY"
    return HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE, {**_health_of(health), "ready": ready}


STATUS = "/status"
"""The page with details."""

_PAGES = {"/healthz": _healthz, "/livez": _healthz, "/readyz": _ready, STATUS: _status}


# The server


class HealthCheckServer:
    """Answers `GET /healthz` with 200, or with 503 once the last progress is older than the timeout; `/status` as JSON.

    `/livez` is an alias of `/healthz`; `/readyz` returns 200 while workers are running. The server answers between
    `start` and `stop`, on all interfaces of this machine, and can be restarted.

    Args:
        alive_callback: returns the time of the last progress, in epoch seconds, without waiting; called on the loop's
            thread.
        port: 0 lets the kernel choose.
        timeout: seconds.
        status: returns more fields for `/status`; called like `alive_callback`.
        loop: where to serve; the process's shared loop by default.
        others: answers requests for other pages; 404 otherwise.
        access: the clients that may see `/status`; by default this user and root on this machine.
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
        self._serving: Serving | None = None

    @property
    def port(self) -> int:
        return self._port if self._serving is None else self._serving.port

    def start(self) -> None:
        """Start to answer, or log a warning. Idempotent."""
        if self._serving is not None:
            return
        from rallypoint.base.endpoint import listening_socket

        try:
            listener = listening_socket("", self._port)
        except (OSError, OverflowError) as error:
            log.warning("the health check is off: cannot listen on port %d (%s)", self._port, error)
            return
        try:
            self._serving = Serving([listener], self._answer, self._loop or shared_loop(), "the health server")
        except LoopError as error:
            listener.close()
            log.warning("the health check is off: %s", error)
            return
        log.info("the health check answers on port %d: /healthz and /status", self.port)

    def stop(self) -> None:
        """Stop answering. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()

    async def _answer(self, head: bytes, client: Client) -> Answer:
        try:
            request = parse(head)
        except RequestError as error:
            return refusal(error.status)
        if request.path == STATUS:
            from rallypoint.base.http import Access

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
            return HealthView(0.0, self._timeout, {}, f"the agent cannot be queried ({type(error).__name__}: {error})")


class Serving:
    """Serves HTTP on listening sockets. Raises LoopError without a loop; the caller then keeps the sockets.

    `what` is the server's name in log lines.
    """

    def __init__(self, listeners: Sequence[socket.socket], handler: Handler, loop: LoopThread, what: str) -> None:
        self.port = int(listeners[0].getsockname()[1])
        self._listeners = listeners
        self._handler = handler
        self._loop = loop
        self._what = what
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = threading.Event()
        loop.call(self._begin)

    def close(self) -> None:
        """Close listeners and connections; waits at most `_CLOSE_TIMEOUT`. Do not call on the loop's thread."""
        if not self._loop.withdraw(self._begin):
            self._loop.call(self._end)
            if not self._ended.wait(_CLOSE_TIMEOUT):
                log.warning(
                    "%s did not close within %.0f s; the event loop of this process is stuck",
                    self._what,
                    _CLOSE_TIMEOUT,
                )
        self._ended.set()
        for listener in self._listeners:
            listener.close()

    def _begin(self) -> None:
        import asyncio

        from rallypoint.base.http_server import serve

        self._stop = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(serve(self._listeners, self._handler, self._stop))
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
    return HealthCheckServer(alive_callback, port, timeout, status, others=others, access=access)


def requested_port(environ: Mapping[str, str] = os.environ) -> int | None:
    """The port in `TORCHELASTIC_HEALTH_CHECK_PORT`; None if it is unset or not a port."""
    text = environ.get(TORCHELASTIC_HEALTH_CHECK_PORT, "")
    if not text:
        return None
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        log.warning(
            "%s=%r is not a port from 0 to 65535, so the health check is off", TORCHELASTIC_HEALTH_CHECK_PORT, text
        )
        return None
    return port


@contextmanager
def health_check(
    server: HealthCheckServer | None, pages: Callable[[], tuple[Handler, Access]] | None = None
) -> Iterator[ProgressProbe | None]:
    """Serve the health check.

    Args:
        server: the server; None for one on the port in `TORCHELASTIC_HEALTH_CHECK_PORT`, if set.
        pages: returns the handler of that server's other pages, and who may access them.

    Yields:
        The progress probe of our own server; None without such a server.
    """
    probe = None
    if server is None and (port := requested_port()) is not None:
        probe = ProgressProbe()
        others, access = (None, None) if pages is None else pages()
        server = create_healthcheck_server(probe.last_progress, port, DEFAULT_TIMEOUT, probe.status, others, access)
    if server is None:
        yield None
        return
    server.start()
    try:
        yield probe
    finally:
        server.stop()
