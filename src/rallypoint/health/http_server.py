"""The health server's work: probes are answered on the process's loop thread, and can hold up nobody.

Laws:

- what a connection may cost is bounded: its bytes, its time, and the number of connections, of which the oldest makes
  room for a new one, so that no crowd keeps a probe out;
- the callback is called on the loop's thread and must only look;
- nothing that happens here ends the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from http import HTTPStatus

from rallypoint.base.log import get_logger
from rallypoint.health.http import MAX_REQUEST, HealthView, read_request, refusal_status, refused_response, respond

log = get_logger(__name__)

_MAX_CONNECTIONS = 64
"""Connections at a time."""
_REQUEST_TIMEOUT = 5.0
"""Seconds from a connection's beginning to its end."""
_MAX_DISCARDED = 64 * 1024
"""Bytes that are read and thrown away after a reply, which might be lost if they were left unread."""


async def serve(listener: socket.socket, look: Callable[[], HealthView], stop: asyncio.Event) -> None:
    """Answer until `stop` is set; all connections have ended then, and the listener is closed."""
    probes = ProbeConnections(look)
    server = await asyncio.start_server(probes.connected, sock=listener, limit=MAX_REQUEST, backlog=_MAX_CONNECTIONS)
    try:
        await stop.wait()
    finally:
        server.close()
        await probes.end()


class ProbeConnections:
    """The connections of one server.

    Args:
        look: says how the agent is; it must return at once.
    """

    def __init__(self, look: Callable[[], HealthView]) -> None:
        self._look = look
        self._tasks: dict[asyncio.Task[None], None] = {}
        """The oldest first."""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected: the whole life of the connection."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        self._tasks[task] = None
        try:
            # Whoever probes may go in the middle of it, be slow, or make room: the connection ends, and no more.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                async with asyncio.timeout(_REQUEST_TIMEOUT):
                    await self._serve_one(reader, writer)
        finally:
            self._tasks.pop(task, None)
            writer.transport.abort()

    async def end(self) -> None:
        """End all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self._reply(await reader.readuntil(b"\r\n\r\n")))
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            writer.write(refused_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        await writer.drain()
        writer.write_eof()
        left = _MAX_DISCARDED
        while left > 0 and (data := await reader.read(left)):
            left -= len(data)

    def _reply(self, head: bytes) -> bytes:
        request = read_request(head)
        refused = refusal_status(request)
        if request is None or refused is not None:
            return refused_response(refused or HTTPStatus.BAD_REQUEST)
        try:
            return respond(request, self._look())
        except Exception as error:
            log.warning("the health check cannot answer (%s: %s)", type(error).__name__, error)
            return refused_response(HTTPStatus.INTERNAL_SERVER_ERROR)
