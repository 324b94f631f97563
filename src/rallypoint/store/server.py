"""The store's server: a listening socket, open from the start, and a table served on a loop's thread.

The socket listens when the constructor returns, so clients can already connect; the kernel queues them until asyncio
has been imported on the loop's thread, which nobody waits for. `carrying` says which of the two stores serves then, and
`serving` has the laws of what happens.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rallypoint.base.endpoint import listening_socket
from rallypoint.base.loop import LoopThread, shared_loop

if TYPE_CHECKING:
    import asyncio
    import socket
    from types import TracebackType


class StoreServer:
    """A store for torch's TCPStore clients and ours, for as long as it is open.

    Args:
        host: an address or name of this machine, or empty for all its interfaces, IPv6 and IPv4.
        port: 0 lets the kernel choose; see `port` for what it chose.
        listener: a listening socket to use instead of a new one; the server closes it in the end.
        loop: where to serve; the process's shared loop if none is given.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """

    def __init__(
        self, host: str = "", port: int = 0, listener: socket.socket | None = None, loop: LoopThread | None = None
    ) -> None:
        self.host = host
        self._listener = listener if listener is not None else listening_socket(host, port)
        self._port: int = self._listener.getsockname()[1]
        self._thread = loop if loop is not None else shared_loop()
        self._thread_id = 0
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = threading.Event()
        try:
            self._thread.call(self._begin, can_wait=True)
        except BaseException:
            self._listener.close()
            raise

    @property
    def port(self) -> int:
        """The TCP port on which it listens."""
        return self._port

    def hurry(self) -> None:
        """Serve at once, also in the first moments of the process: somebody waits for an answer."""
        self._thread.call(lambda: None)

    def close(self) -> None:
        """End all connections and stop listening. All is closed when this returns. Idempotent.

        Raises:
            RuntimeError: called on the loop's own thread, which cannot wait for itself; use `close_soon` there.
        """
        if threading.get_ident() == self._thread_id:
            raise RuntimeError(
                "StoreServer.close waits for the loop and cannot be called on its thread; use close_soon"
            )
        if self._ended.is_set():
            return
        if self._thread.withdraw(self._begin):  # nobody was ever served, or not by this copy of the process
            self._listener.close()
            self._ended.set()
            return
        self.close_soon()
        if not self._thread.loop.is_closed():  # else all has ended with the loop, or never began
            self._ended.wait()
        self._listener.close()

    def close_soon(self) -> None:
        """Begin what `close` does and return at once. Idempotent, and safe on any thread."""
        self._thread.call(self._end)

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        import asyncio

        self._thread_id = threading.get_ident()
        self._stop = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._serve(self._stop))
        self._task.add_done_callback(lambda _task: self._ended.set())

    def _end(self) -> None:
        if self._stop is not None:  # else it was withdrawn before it began
            self._stop.set()

    async def _serve(self, stop: asyncio.Event) -> None:
        import asyncio

        from rallypoint.store.carrying import open_carrier

        loop = asyncio.get_running_loop()
        sockets = open_carrier(self._listener, loop.call_later)
        loop.add_reader(sockets, sockets.ready)
        try:
            await stop.wait()
        finally:
            loop.remove_reader(sockets)
            sockets.close()
