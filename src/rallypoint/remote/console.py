"""Standard output and standard error of `rallyctl launch`, written by threads: a console that is not read (a pager, ^S)
must stop neither heartbeats nor signals. It slows down the hosts instead, whose output is not read meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from contextlib import suppress

_MOST_WAITING = 1024 * 1024
"""Bytes."""


class Output:
    """One descriptor and its thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._waiting = 0
        self._room = asyncio.Event()
        self.failed = ""
        """Why what comes is lost: nobody reads it any more, or the disk is full; empty while it is not."""
        threading.Thread(target=self._write, name=f"rallypoint-output-{fd}", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether anything is not written yet."""
        return self._waiting > 0

    async def write(self, data: bytes) -> None:
        """Write whole lines, later; waits while too much waits already."""
        if not data or self.failed:
            return
        while self._waiting > _MOST_WAITING:
            self._room.clear()
            await self._room.wait()
        self._waiting += len(data)
        self._queue.put(data)

    async def drained(self) -> None:
        """Wait until all is written."""
        while self._waiting:
            self._room.clear()
            await self._room.wait()

    def _write(self) -> None:
        while True:
            data = self._queue.get()
            left = memoryview(data)
            while left and not self.failed:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:
                    _wait_writable(self._fd)
                except OSError as error:
                    self.failed = error.strerror or str(error)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._written, len(data))

    def _written(self, count: int) -> None:
        self._waiting -= count
        if self._waiting <= _MOST_WAITING:
            self._room.set()


def _wait_writable(fd: int) -> None:
    import select

    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll()


class Console:
    """Both, which are one where they lead to the same file, so that their lines keep their order."""

    def __init__(self) -> None:
        self.out = Output(1)
        self.err = self.out if _same(1, 2) else Output(2)
        self._failure_told = False

    def failure(self) -> str:
        """The sentence for a standard output that cannot be written any more, once; empty if it can."""
        if not self.out.failed or self._failure_told:
            return ""
        self._failure_told = True
        return f"standard output cannot be written ({self.out.failed}); the job goes on, and its output is lost"

    async def say(self, text: str) -> None:
        """Write a line of our own to standard error."""
        await self.err.write(f"rallyctl: {text}\n".encode(errors="replace"))

    async def drained(self) -> None:
        """Wait until all is written."""
        await self.out.drained()
        await self.err.drained()


def _same(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
