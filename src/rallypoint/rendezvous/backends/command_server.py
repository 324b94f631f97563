"""The server at which commands of this machine reach a coordinator that has no other node, and so no server.

It takes 9 MB and 50 ms of imports, and most jobs never need it. A listening socket costs nothing: it is opened once the
workers are under way, and the server is started when somebody connects. Laws:

1. The job needs nothing of this. If something is missing, such as descriptors or threads, `open` or `serve` fails,
   nothing else has changed, and either can be tried again.
2. The server has a loop of its own: the one that the process shares is for what the job needs, and would be lost to
   that if it could not be made just now.
"""

from __future__ import annotations

import threading

from rallypoint.base.endpoint import Endpoint, listening_sockets
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.rendezvous.backends.options import accepted_keys

if TYPE_CHECKING:
    from rallypoint.base.loop import LoopThread
    from rallypoint.base.tls import ControlTls
    from rallypoint.control.coordinator.dispatcher import Dispatcher, TimerThread
    from rallypoint.control.coordinator.server import ControlServer

_STOP_TIMEOUT = 1.0
"""Seconds that the end of a job waits for the loop to end."""


class CommandServer:
    """Listens from the beginning; serves from the end of the first successful `serve` on."""

    def __init__(self, dispatcher: Dispatcher, tls: ControlTls | None, timer: TimerThread | None) -> None:
        """Listen on loopback. `timer` ticks the dispatcher until the server does. Raises OSError."""
        self._dispatcher = dispatcher
        self._tls = tls
        self._timer = timer
        self._keys = accepted_keys()
        (self.listener,) = listening_sockets(["127.0.0.1"], 0)
        self.endpoint = str(Endpoint("127.0.0.1", self.listener.getsockname()[1]))
        self._lock = threading.Lock()
        self._closed = False
        self._served: tuple[ControlServer, LoopThread] | None = None

    def serve(self) -> None:
        """Start the server, unless it runs or this is closed. Takes time. Raises RallypointError or RuntimeError."""
        if self._has_server() or self._closed:
            return
        from rallypoint.base.loop import LoopThread
        from rallypoint.control.coordinator.server import ControlServer

        loop = LoopThread("rallypoint-commands")
        try:
            _ = loop.loop  # waits; the lock is not held meanwhile
            with self._lock:
                if not (self._has_server() or self._closed):
                    server = ControlServer(self._dispatcher, self.listener, keys=self._keys, tls=self._tls, loop=loop)
                    server.until_serving()
                    self._served = server, loop
                    if self._timer is not None:
                        self._timer.close()
        finally:
            if self._served is None or self._served[1] is not loop:
                loop.stop()

    def _has_server(self) -> bool:
        return self._served is not None

    def close(self, why: str) -> None:
        """End the server, with a last message to those that are connected. Idempotent."""
        with self._lock:
            self._closed = True
        if self._served is None:
            self.listener.close()
            return
        server, loop = self._served
        server.close(why=why)
        loop.stop(_STOP_TIMEOUT)
