"""A small HTTP server on the process's loop thread, for probes, a page with its stream, and a scraper.

Laws:

- connections are limited in size, time and number. A new connection replaces the oldest, so that no number of
  connections can lock out a probe. Streams are counted separately, and end if their reader is too slow;
- the handler runs on the loop's thread, and moves slow work elsewhere;
- no error here ends the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from http import HTTPStatus

from rallypoint.base.http import MAX_REQUEST, Answer, Client, Handler, Stream, refusal
from rallypoint.base.log import get_logger
from rallypoint.base.netlink import PeerUsers

log = get_logger(__name__)

_MAX_CONNECTIONS = 64
_MAX_STREAMS = 32
_REQUEST_TIMEOUT = 5.0
"""Maximum duration of a connection in seconds, except for streams."""
_READ_TIMEOUT = 10.0
"""Seconds that a stream's reader has to accept data."""
_MAX_DISCARDED = 64 * 1024
"""Bytes to read and discard after a reply: with unread input, the client might lose the reply."""


async def serve(listeners: Sequence[socket.socket], handler: Handler, stop: asyncio.Event) -> None:
    """Answer until `stop` is set, then close all connections and the listeners."""
    connections = HttpConnections(handler)
    servers = [
        await asyncio.start_server(connections.connected, sock=listener, limit=MAX_REQUEST, backlog=_MAX_CONNECTIONS)
        for listener in listeners
    ]
    try:
        await stop.wait()
    finally:
        for server in servers:
            server.close()
        await connections.end()


class HttpConnections:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._users = PeerUsers()
        self._requests: dict[asyncio.Task[None], None] = {}  # oldest first
        self._streams: dict[asyncio.Task[None], None] = {}

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        _add(self._requests, task, _MAX_CONNECTIONS)
        try:
            # The client may disconnect or be slow, or a new connection may replace this one.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                async with asyncio.timeout(_REQUEST_TIMEOUT):
                    answer = await self._serve_one(reader, writer)
                if answer is not None:
                    del self._requests[task]
                    _add(self._streams, task, _MAX_STREAMS)
                    await _send_stream(answer, reader, writer, task)
        finally:
            self._requests.pop(task, None)
            self._streams.pop(task, None)
            writer.transport.abort()

    async def end(self) -> None:
        tasks = [*self._requests, *self._streams]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._users.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream | None:
        """Serve one request. Returns the stream if the answer is one."""
        try:
            answer = await self._answer(await reader.readuntil(b"\r\n\r\n"), writer)
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            answer = refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        if isinstance(answer, Stream):
            return answer
        writer.write(answer)
        await writer.drain()
        writer.write_eof()
        left = _MAX_DISCARDED
        while left > 0 and (data := await reader.read(left)):
            left -= len(data)
        return None

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> Answer:
        peer = writer.get_extra_info("peername")
        user = self._users.peer_of(writer.get_extra_info("socket"))
        try:
            return await self._handler(head, Client(str(peer[0]) if isinstance(peer, tuple) else "", user))
        except Exception as error:
            log.warning("an HTTP request cannot be answered (%s: %s)", type(error).__name__, error)
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR)


def _add(tasks: dict[asyncio.Task[None], None], task: asyncio.Task[None], most: int) -> None:
    if len(tasks) >= most:
        oldest = next(iter(tasks))
        del tasks[oldest]
        oldest.cancel()
    tasks[task] = None


async def _send_stream(
    stream: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
) -> None:
    disconnected = asyncio.ensure_future(_until_disconnected(reader))
    disconnected.add_done_callback(lambda _: task.cancel())
    try:
        writer.write(stream.head)
        async for chunk in stream.chunks:
            writer.write(chunk)
            async with asyncio.timeout(_READ_TIMEOUT):
                await writer.drain()
        writer.write_eof()
    except (OSError, asyncio.CancelledError):
        raise
    except Exception as error:
        log.warning("an HTTP stream ended (%s: %s)", type(error).__name__, error)
    finally:
        disconnected.cancel()
        aclose = getattr(stream.chunks, "aclose", None)
        if aclose is not None:
            await aclose()


async def _until_disconnected(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(4096):
            pass
