"""The pages of `rallyctl serve --http`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from rallypoint.base.endpoint import Endpoint, is_loopback, listening_sockets, parse_endpoint, resolve
from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.base.http import Access
from rallypoint.base.http_server import serve
from rallypoint.base.log import get_logger
from rallypoint.base.loop import shared_loop
from rallypoint.base.secrets import http_token, job_secret
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.observe.metrics import Family, build_family, job_families, jobs_families
from rallypoint.observe.site import LocalJobs, Site

log = get_logger(__name__)

HTTP_PORT = 29480
_CLOSE_TIMEOUT = 2.0
"""Seconds that `close` waits for connections to end."""


class PageServer:
    """Serves the pages of all jobs of a control plane at HOST:PORT (without HOST, to this machine only), from now on.

    Raises:
        UsageError: an argument cannot work.
        RallypointError: it cannot listen there.
    """

    def __init__(self, jobs: ManyJobs, where: str, token_file: str = "") -> None:
        self._jobs = jobs
        token = http_token(token_file, "--http-token-file") if token_file else ""
        endpoint = _endpoint(where)
        listeners = _listeners(endpoint)
        here = all(is_loopback(each.getsockname()[0]) for each in listeners)
        if not here and not token and job_secret() is not None:
            raise UsageError(
                f"--http={where} would show jobs to whoever reaches it, while this control plane has a secret; give "
                "--http-token-file, or listen on localhost"
            )
        if not here and not token:
            log.warning(
                "whoever reaches %s can see all jobs of this control plane; give --http-token-file, or listen on "
                "localhost",
                endpoint,
            )
        self.endpoint = Endpoint(endpoint.host, int(listeners[0].getsockname()[1]))
        site = Site(LocalJobs(jobs), Access(token, is_open=not here), self._metrics)
        self._stop = asyncio.Event()
        self._loop = shared_loop()
        self._serving = self._loop.submit(self._serve(listeners, site))

    def close(self) -> None:
        self._loop.call(self._stop.set)
        try:
            self._serving.result(_CLOSE_TIMEOUT)
        except TimeoutError:
            log.warning("the pages were not closed within %.0f s", _CLOSE_TIMEOUT)

    async def _serve(self, listeners: Sequence[socket.socket], site: Site) -> None:
        try:
            await serve(listeners, site.answer, self._stop)
        finally:
            for each in listeners:
                each.close()

    async def _metrics(self) -> Sequence[Family]:
        return await asyncio.to_thread(self._gather)

    def _gather(self) -> Sequence[Family]:
        jobs = self._jobs.summaries()
        found = (self._jobs.find(each.job) for each in jobs)
        snapshots = [each.snapshot() for each in found if each is not None]
        return [build_family(), *jobs_families(jobs), *job_families(snapshots)]


def _endpoint(where: str) -> Endpoint:
    text = f":{where}" if where.isdecimal() else where
    try:
        return parse_endpoint(f"localhost{text}" if text.startswith(":") else text, HTTP_PORT)
    except UserError as error:
        raise UsageError(f"--http: {error}") from None


def _listeners(endpoint: Endpoint) -> list[socket.socket]:
    try:
        return listening_sockets(resolve(endpoint.host), endpoint.port)
    except OSError as error:
        raise RallypointError(
            f"the pages cannot be served at {endpoint}: {error.strerror}; give --http another port, or an address of "
            "this machine"
        ) from None
