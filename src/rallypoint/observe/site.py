"""Serves jobs over HTTP: a page, its data as JSON, the stream that updates the page, and metrics.

Laws:

1. `/livez`, `/readyz` and the page, which contains no job data, are open to all. Everything else is for clients that
   may see jobs (`Access`).
2. Nothing here can change a job.

A page's jobs come from dispatchers in this process, or from a watcher's session with the coordinator.

Laws:

1. A slow reader misses snapshots, but never gets an old one: the next one is requested after the last was read.
2. A stream ends with the job or its dispatcher. A reader that asks again finds the next job with that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from rallypoint.base.errors import RallypointError
from rallypoint.base.http import (
    Access,
    Answer,
    Client,
    Request,
    RequestError,
    Stream,
    document,
    parse,
    refusal,
    response,
    stream_head,
)
from rallypoint.control.client.dialing import DialTarget
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.jobs import ServedJobs
from rallypoint.observe.metrics import Family, exposition
from rallypoint.observe.status import jobs_fields, status_fields
from rallypoint.observe.watching.client import (
    UnreachableError,
    WatcherSession,
    open_session,
    with_all_nodes,
)
from rallypoint.observe.watching.messages import (
    JobList,
    JobSummary,
    Snapshot,
    SnapshotPart,
    WatcherNotification,
    WatchRequest,
    decode_snapshot,
)
from rallypoint.observe.watching.session import JobWatch, job_list

_ANSWER = 4.0
"""Seconds to wait for the coordinator's answer."""
_LIST_EVERY = 2.0
"""Seconds between looks at the list of jobs while anyone follows it."""

Seen = Snapshot | JobList


class UnknownJobError(RallypointError):
    pass


class JobsSource(Protocol):
    """A source of jobs' states. An empty `job` means the only job or, if several exist, the list of all."""

    async def snapshot(self, job: str, *, all_nodes: bool = False) -> Seen:
        """The current snapshot of a job; with `all_nodes`, it contains the rows of all nodes.

        Raises:
            UnknownJobError: no such job exists.
            RallypointError: the state is unavailable now.
        """
        ...

    def follow(self, job: str) -> AsyncIterator[Seen | None]:
        """Yield the snapshot now and after each change; None after a while without changes. Raises like `snapshot`."""
        ...


# Dispatchers in this process


class InProcessJobs:
    def __init__(self, jobs: ServedJobs) -> None:
        self._jobs = jobs

    async def snapshot(self, job: str, *, all_nodes: bool = False) -> Seen:
        dispatcher = self._find(job)
        if dispatcher is None:
            return job_list(self._jobs)
        with _LocalWatch(dispatcher) as watch:
            seen = await watch.ask(WatchRequest())
            return await with_all_nodes(seen, watch.ask) if all_nodes else seen

    async def follow(self, job: str) -> AsyncIterator[Seen | None]:
        dispatcher = self._find(job)
        if dispatcher is None:
            async for jobs in self._follow_list():
                yield jobs
            return
        with _LocalWatch(dispatcher) as watch:
            async for seen in _follow(watch.ask):
                yield seen
                if self._jobs.find(job) is not dispatcher:
                    return

    def _find(self, job: str) -> Dispatcher | None:
        dispatcher = self._jobs.find(job)
        if dispatcher is None and job:
            raise UnknownJobError(f"job {job!r} is unknown here; remove ?job= to list the jobs")
        return dispatcher

    async def _follow_list(self) -> AsyncIterator[Seen | None]:
        last: list[JobSummary] | None = None
        while self._jobs.find("") is None:
            listed = job_list(self._jobs)
            now = [job._replace(phase_for=0.0) for job in (*listed.jobs, *listed.ended)]
            yield listed if now != last else None
            last = now
            await asyncio.sleep(_LIST_EVERY)


class _LocalWatch:
    """A watcher in this process, as a context manager. Use it on the loop's thread."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._messages: asyncio.Queue[WatcherNotification | None] = asyncio.Queue()

    def __enter__(self) -> _LocalWatch:
        put = self._messages.put_nowait  # None marks the end of the session
        self._watch = JobWatch(self._dispatcher, put, lambda _why: put(None))
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.detach()

    async def ask(self, request: WatchRequest) -> Snapshot:
        """Send a request and return the answer. Raises UnreachableError if none arrives in time."""
        self._watch.receive(request)
        data, job = b"", self._dispatcher.settings.run_id
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER):
                while isinstance(part := await self._messages.get(), SnapshotPart):
                    data += part.data
                    if part.is_last:
                        return decode_snapshot(data)
        raise UnreachableError(f"the coordinator of job {job!r} did not answer within {_ANSWER:g} s; try again")


# A coordinator elsewhere


class RemoteJob:
    """One job, whose coordinator is reached as in `rallyctl status`. `targets` may block; it runs on its own thread."""

    def __init__(self, job: str, targets: Callable[[], Sequence[DialTarget]]) -> None:
        self._job = job
        self._targets = targets

    async def snapshot(self, job: str, *, all_nodes: bool = False) -> Seen:
        async with _in_time(), await self._open(job) as session:
            seen = await session.snapshot(WatchRequest())
            return await with_all_nodes(seen, session.snapshot) if all_nodes else seen

    async def follow(self, job: str) -> AsyncIterator[Seen | None]:
        async with await self._open(job) as session:

            async def ask(request: WatchRequest) -> Snapshot:
                async with _in_time():
                    return await session.snapshot(request)

            async for seen in _follow(ask):
                yield seen

    async def _open(self, job: str) -> WatcherSession:
        if job not in {"", self._job}:
            raise UnknownJobError(f"this agent belongs to job {self._job!r}, not to {job!r}; remove ?job=")
        return await open_session(await asyncio.to_thread(self._targets), self._job)


@contextlib.asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_ANSWER):
            yield
    except TimeoutError:
        raise UnreachableError(f"the coordinator did not answer within {_ANSWER:g} s; try again") from None


async def _follow(ask: Callable[[WatchRequest], Awaitable[Snapshot]]) -> AsyncIterator[Snapshot | None]:
    """See `JobsSource.follow`."""
    known = 0
    while True:
        seen = await ask(WatchRequest(after=known))
        yield None if seen.changes == known else seen
        known = seen.changes
        if seen.detail:
            return


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Allows the page to connect only to its own origin."""
_RETRY = b"retry: 2000\n\n"
"""Milliseconds before a browser's EventSource reconnects."""
_NO_NEWS = b": no news\n\n"


Metrics = Callable[[], Awaitable[Sequence[Family]]]
"""Collects the data for `/metrics`."""


class Site:
    """One server's pages. `answer` is a `base.http.Handler`."""

    def __init__(
        self, source: JobsSource, access: Access, metrics: Metrics, now: Callable[[], float] = time.time
    ) -> None:
        self._source = source
        self._access = access
        self._metrics = metrics
        self._now = now

    async def answer(self, head: bytes, client: Client) -> Answer:
        try:
            request = parse(head)
        except RequestError as error:
            return refusal(error.status)
        if request.path in {"/livez", "/readyz"}:
            return response(HTTPStatus.OK, {"ok": True}, request.bodiless)
        if request.path == "/":
            return _page(request)
        show = self._PAGES.get(request.path)
        if show is None:
            return refusal(HTTPStatus.NOT_FOUND)
        refused = self._access.refusal_for(request, client)
        if refused is not None:
            return refused
        try:
            return await show(self, request)
        except UnknownJobError as error:
            return refusal(HTTPStatus.NOT_FOUND, str(error))
        except RallypointError as error:
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    async def _status(self, request: Request) -> Answer:
        seen = await self._source.snapshot(request.query.get("job", ""), all_nodes=request.query.get("nodes") == "all")
        text = msgspec.json.format(json.dumps(self._fields(seen)), indent=2) + "\n"
        return document(HTTPStatus.OK, "application/json", text.encode(), request.bodiless)

    async def _events(self, request: Request) -> Answer:
        if request.bodiless:
            return stream_head("text/event-stream")
        follower = self._source.follow(request.query.get("job", ""))
        first = await anext(follower, None)  # an unknown job is refused, not streamed
        return Stream(stream_head("text/event-stream"), self._chunks(first, follower))

    async def _chunks(self, first: Seen | None, follower: AsyncIterator[Seen | None]) -> AsyncIterator[bytes]:
        yield _RETRY
        seen = first
        try:
            while True:
                yield _NO_NEWS if seen is None else _event(_kind(seen), self._fields(seen))
                seen = await anext(follower)
        except StopAsyncIteration:
            return
        except RallypointError as error:
            yield _event("lost", {"error": str(error)})
        finally:
            aclose = getattr(follower, "aclose", None)
            if aclose is not None:
                await aclose()

    async def _show_metrics(self, request: Request) -> Answer:
        families = await self._metrics()
        kind, text = await asyncio.to_thread(exposition, families)
        return document(HTTPStatus.OK, kind, text, request.bodiless)

    def _fields(self, seen: Seen) -> dict[str, Any]:
        return jobs_fields(seen, self._now()) if isinstance(seen, JobList) else status_fields(seen, self._now())

    _PAGES: ClassVar = {"/status.json": _status, "/events": _events, "/metrics": _show_metrics}


def _page(request: Request) -> bytes:
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Referrer-Policy": "no-referrer"}
    return document(HTTPStatus.OK, "text/html; charset=utf-8", _document(), request.bodiless, headers)


def _kind(seen: Seen) -> str:
    return "status" if isinstance(seen, Snapshot) else "jobs"


def _event(kind: str, fields: object) -> bytes:
    """An event in a stream (text/event-stream): JSON in one line."""
    return f"event: {kind}\ndata: {json.dumps(fields)}\n\n".encode()


@cache
def _document() -> bytes:
    """The page as one self-contained document. It requests jobs, with a token if required."""
    return Path(__file__).with_name("page.html").read_bytes()
