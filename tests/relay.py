"""A TCP relay between a client and a server, which delays the answers."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from types import TracebackType

from rallypoint.base.endpoint import Endpoint, listening_socket


class Relay:
    """Hands on to `server` whatever arrives at `endpoint`, and back, which takes `delay` seconds."""

    def __init__(self, server: Endpoint, delay: float = 0.0) -> None:
        self._server = server
        self._delay = delay
        self._listener = listening_socket("127.0.0.1", 0)
        self._listener.setblocking(True)
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(10)
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for each in (*self._open, self._listener):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server, timeout=10)
                self._open += [client, server]
                for source, target, delay in ((client, server, 0.0), (server, client, self._delay)):
                    thread = threading.Thread(target=self._hand_on, args=(source, target, delay))
                    self._threads.append(thread)
                    thread.start()

    def _hand_on(self, source: socket.socket, target: socket.socket, delay: float) -> None:
        on_the_way = deque[tuple[float, bytes]]()
        with contextlib.suppress(OSError):
            while True:
                if not on_the_way or select.select([source], [], [], max(0.0, on_the_way[0][0] - time.monotonic()))[0]:
                    data = source.recv(65536)
                    if not data:
                        break
                    on_the_way.append((time.monotonic() + delay, data))
                while on_the_way and on_the_way[0][0] <= time.monotonic():
                    target.sendall(on_the_way.popleft()[1])
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
