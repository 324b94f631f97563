"""Serves this machine's commands to a coordinator without other nodes, which has no server itself.

A server takes 9 MB and 50 ms of imports, and most jobs never need one. A listening socket costs nothing: it opens once
the workers have started, and the server starts when a command connects. Laws:

1. The job does not need this server. If descriptors or threads are lacking, `open` or `serve` fails and nothing else
   changes; either can be retried.
2. The server has its own loop. The job needs the shared loop, and would lose it if it could not be created now.
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
"""Seconds that a job's end waits for the loop."""


class CommandServer:
    """Listens at once; serves after the first successful `serve`."""

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
        """Start the server unless it is running or was closed. Takes time. Raises RallypointError or RuntimeError."""
        if self._has_server() or self._closed:
            return
        from rallypoint.base.loop import LoopThread
        from rallypoint.control.coordinator.server import ControlServer

        loop = LoopThread("rallypoint-commands")
        try:
            _ = loop.loop  # waits without holding the lock
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
        """Shut down the server, sending a final message to connected commands. Idempotent."""
        with self._lock:
            self._closed = True
        if self._served is None:
            self.listener.close()
            return
        server, loop = self._served
        server.close(why=why)
        loop.stop(_STOP_TIMEOUT)
