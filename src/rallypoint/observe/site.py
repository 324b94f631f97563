"""Serves jobs over HTTP: a page, the same as JSON, the stream that keeps the page up to date, metrics.

Laws:

1. `/livez` and `/readyz` are open to all; so is the page, which has no data of any job. Everything else is for clients
   that may see jobs (`Access`).
2. Nothing here can change a job.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar

from rallypoint.base.errors import RallypointError
from rallypoint.base.http import (
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
from rallypoint.base.http_access import Access
from rallypoint.control.protocol.observation import JobList, Snapshot
from rallypoint.observe.metrics import Family, exposition
from rallypoint.observe.sources import JobsSource, Seen, UnknownJobError
from rallypoint.observe.status import jobs_fields, status_fields

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page may only connect to its own origin."""
_RETRY = b"retry: 2000\n\n"
"""Milliseconds after which a browser's EventSource comes again."""
_NO_NEWS = b": no news\n\n"


Metrics = Callable[[], Awaitable[Sequence[Family]]]
"""Gathers what `/metrics` shows."""


class Site:
    """The pages of one server. `answer` is a `base.http.Handler`.

    Args:
        source: where the jobs are from.
        access: who may see them.
        metrics: what `/metrics` shows.
        now: the time of day, in epoch seconds.
    """

    def __init__(
        self, source: JobsSource, access: Access, metrics: Metrics, now: Callable[[], float] = time.time
    ) -> None:
        self._source = source
        self._access = access
        self._metrics = metrics
        self._now = now

    async def answer(self, head: bytes, client: Client) -> Answer:
        """The answer to a request, of which `head` is all up to the blank line, by `client`."""
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
        seen = await self._source.look(request.query.get("job", ""))
        text = json.dumps(self._fields(seen), indent=2) + "\n"
        return document(HTTPStatus.OK, "application/json", text.encode(), request.bodiless)

    async def _events(self, request: Request) -> Answer:
        if request.bodiless:
            return stream_head("text/event-stream")
        follower = self._source.follow(request.query.get("job", ""))
        first = await anext(follower, None)  # a job that there is not is refused, and not streamed
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
        return jobs_fields(seen.jobs) if isinstance(seen, JobList) else status_fields(seen, self._now())

    _PAGES: ClassVar = {"/status.json": _status, "/events": _events, "/metrics": _show_metrics}


def _page(request: Request) -> bytes:
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Referrer-Policy": "no-referrer"}
    return document(HTTPStatus.OK, "text/html; charset=utf-8", _document(), request.bodiless, headers)


def _kind(seen: Seen) -> str:
    return "status" if isinstance(seen, Snapshot) else "jobs"


def _event(kind: str, fields: object) -> bytes:
    """An event of a stream (text/event-stream): JSON in one line."""
    return f"event: {kind}\ndata: {json.dumps(fields)}\n\n".encode()


@cache
def _document() -> bytes:
    """One document, without anything from elsewhere. It asks for jobs, with a token where one is wanted."""
    return Path(__file__).with_name("page.html").read_bytes()
