"""Streams of the small HTTP server, over real sockets; the tests of the health check cover the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import pytest

from rallypoint.base import http_server
from rallypoint.base.endpoint import listening_socket
from rallypoint.base.http import Answer, Client, Request, RequestError, Stream, document, parse, refusal, stream_head

TIMEOUT = 120.0
GET = b"GET / HTTP/1.1\r\n\r\n"


class Ticker:
    """Streams that repeat a chunk; counts the open ones."""

    def __init__(self, chunk: bytes = b"tick\n") -> None:
        self.chunk = chunk
        self.open = 0
        self.changed = asyncio.Event()
        self.end = asyncio.Event()

    async def answer(self, _head: bytes, _client: Client) -> Answer:
        return Stream(stream_head("text/plain"), self._chunks())

    async def _chunks(self) -> AsyncIterator[bytes]:
        self._count(1)
        try:
            while not self.end.is_set():
                yield self.chunk
                await asyncio.sleep(0.005)
        finally:
            self._count(-1)

    def _count(self, by: int) -> None:
        self.open += by
        self.changed.set()

    async def until(self, streams: int) -> None:
        async with asyncio.timeout(TIMEOUT):
            while self.open != streams:
                await self.changed.wait()
                self.changed.clear()


@asynccontextmanager
async def serving(ticker: Ticker) -> AsyncIterator[int]:
    listener = listening_socket("127.0.0.1", 0)
    stop = asyncio.Event()
    task = asyncio.create_task(http_server.serve([listener], ticker.answer, stop))
    try:
        yield int(listener.getsockname()[1])
    finally:
        stop.set()
        await asyncio.wait_for(task, TIMEOUT)
        listener.close()
    assert ticker.open == 0


async def dial(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET)
    return reader, writer


async def ticks(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(TIMEOUT):
        await reader.readuntil(b"tick\n")


def test_streams_outlive_the_request_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_REQUEST_TIMEOUT", 0.05)

    async def run() -> None:
        ticker = Ticker()
        async with serving(ticker) as port:
            reader, writer = await dial(port)
            for _ in range(40):
                await ticks(reader)
            assert ticker.open == 1
            writer.close()
            await ticker.until(0)
            reader, writer = await dial(port)
            await ticks(reader)
            ticker.end.set()
            await asyncio.wait_for(reader.read(), TIMEOUT)
            assert reader.at_eof()
            writer.close()

    asyncio.run(run())


def test_a_new_stream_replaces_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MAX_STREAMS", 2)

    async def run() -> None:
        ticker = Ticker()
        async with serving(ticker) as port:
            opened = []
            for _ in range(3):
                opened.append(await dial(port))
                await ticks(opened[-1][0])
            await ticker.until(2)
            with suppress(ConnectionError):
                await asyncio.wait_for(opened[0][0].read(), TIMEOUT)  # up to its end
            for _, writer in opened:
                writer.close()

    asyncio.run(run())


def test_slow_readers_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_READ_TIMEOUT", 0.1)

    async def run() -> None:
        ticker = Ticker(b"x" * (1 << 20))
        async with serving(ticker) as port:
            _, writer = await dial(port)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await ticker.until(1)
            await ticker.until(0)
            writer.close()

    asyncio.run(run())


def test_parse() -> None:
    head = b"GET /a%20b?job=x%2Fy&job=z&e HTTP/1.1\r\nHost:  me:1 \r\nAuthorization: Bearer t\r\n\r\n"
    wanted = Request("/a b", {"job": "z", "e": ""}, {"host": "me:1", "authorization": "Bearer t"}, bodiless=False)
    assert parse(head) == wanted
    assert parse(b"HEAD / HTTP/1.0\r\n\r\n").bodiless


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", HTTPStatus.METHOD_NOT_ALLOWED),
        (b"GET http HTTP/3\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /?" + b"&".join(b"a=%d" % n for n in range(99)) + b" HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
    ],
)
def test_refused_requests(head: bytes, status: HTTPStatus) -> None:
    with pytest.raises(RequestError) as refused:
        parse(head)
    assert refused.value.status is status


def test_replies_forbid_caching_and_sniffing() -> None:
    for head in (
        document(HTTPStatus.OK, "text/html", b"x"),
        stream_head("text/event-stream"),
        refusal(HTTPStatus(401)),
    ):
        assert b"\r\nCache-Control: no-store\r\n" in head
        assert b"\r\nX-Content-Type-Options: nosniff\r\n" in head
    assert b"\r\nWWW-Authenticate: Bearer" in refusal(HTTPStatus.UNAUTHORIZED)
