"""The health server as its owner sees it: it serves when made, until it is closed.

Making it waits for nothing: asyncio is imported on the loop's thread, and the kernel holds early probes until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopThread

if TYPE_CHECKING:
    import asyncio
    import socket

    from rallypoint.health.http import HealthView

log = get_logger(__name__)

_CLOSING = 2.0
"""Seconds that closing may take; the loop's thread has other things to do, and may be stuck in one."""


class HealthServer:
    """Answers on a listening socket, which it takes over.

    Args:
        listener: the socket.
        look: says how the agent is. Called on the loop's thread; it must return at once.
        loop: where to serve.

    Raises:
        LoopError: there is no loop. The listener is still the caller's then.
    """

    def __init__(self, listener: socket.socket, look: Callable[[], HealthView], loop: LoopThread) -> None:
        self._listener = listener
        self._look = look
        self._loop = loop
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = threading.Event()
        loop.call(self._begin)

    def close(self) -> None:
        """Stop listening and end all connections, and wait for that, but not for long. Not for the loop's thread."""
        if not self._loop.withdraw(self._begin):
            self._loop.call(self._end)
            if not self._ended.wait(_CLOSING):
                log.warning("the health server did not close in %.0f s; the loop of this process is stuck", _CLOSING)
        self._ended.set()
        self._listener.close()

    def _begin(self) -> None:
        import asyncio

        from rallypoint.health.http_server import serve

        self._stop = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(serve(self._listener, self._look, self._stop))
        self._task.add_done_callback(lambda _task: self._ended.set())

    def _end(self) -> None:
        if self._stop is not None:
            self._stop.set()
