"""The health server: probes are answered on the process's loop thread.

Laws:

- what connections may use is bounded: bytes, time and number; a new one replaces the oldest, so that no number of
  connections keeps a probe out;
- the callback is called on the loop's thread and must return at once;
- nothing that happens here ends the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from http import HTTPStatus

from rallypoint.base.log import get_logger
from rallypoint.health.http import MAX_REQUEST, HealthView, refusal, reply

log = get_logger(__name__)

_MAX_CONNECTIONS = 64
_REQUEST_TIMEOUT = 5.0
"""Seconds from a connection's beginning to its end."""
_MAX_DISCARDED = 64 * 1024
"""Bytes that are read and discarded after a reply, which could be lost if they were left unread."""


async def serve(listener: socket.socket, view: Callable[[], HealthView], stop: asyncio.Event) -> None:
    """Answer until `stop` is set; then all connections and the listener are closed."""
    probes = ProbeConnections(view)
    server = await asyncio.start_server(probes.connected, sock=listener, limit=MAX_REQUEST, backlog=_MAX_CONNECTIONS)
    try:
        await stop.wait()
    finally:
        server.close()
        await probes.end()


class ProbeConnections:
    """The connections of one server; `view` returns the agent's health, at once."""

    def __init__(self, view: Callable[[], HealthView]) -> None:
        self._view = view
        self._tasks: dict[asyncio.Task[None], None] = {}  # the oldest first

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a connection, from its beginning to its end."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        self._tasks[task] = None
        try:
            # The client may disconnect or be slow, or a new connection replaces this one.
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
            writer.write(refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        await writer.drain()
        writer.write_eof()
        left = _MAX_DISCARDED
        while left > 0 and (data := await reader.read(left)):
            left -= len(data)

    def _reply(self, head: bytes) -> bytes:
        try:
            return reply(head, self._view)
        except Exception as error:
            log.warning("the health check cannot answer (%s: %s)", type(error).__name__, error)
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR)
