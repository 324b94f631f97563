"""Streams of the small HTTP server, over real sockets. The tests of the health check cover the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from rallypoint.base import http_server
from rallypoint.base.endpoint import listening_socket
from rallypoint.base.http import Answer, Client, Stream, stream_head

TIMEOUT = 120.0
GET = b"GET / HTTP/1.1\r\n\r\n"


class Ticker:
    """Streams that send what they are given, and count how many there are."""

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


def test_a_stream_lasts_longer_than_a_request_and_ends_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_streams_are_bounded_and_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_reader_that_is_too_slow_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
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
