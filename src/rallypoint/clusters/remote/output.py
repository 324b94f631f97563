"""The output of a launch: each host's lines after its name, and their way to the console.

Laws:

1. Bytes are never decoded, and nothing is lost or reordered.
2. A line longer than `LONGEST` bytes is split, so that memory is bounded.
3. A progress bar (a line with carriage returns) is shown before it is complete: see `progress_bar`.
4. A blocked console (a pager, ^S) stops neither heartbeats nor signals, since threads write to it. It slows down the
   hosts instead, whose output is not read meanwhile. (asyncio's own pipes do not accept files, and would make a
   terminal non-blocking for the shell that shares it.)
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from contextlib import suppress

LONGEST = 64 * 1024
_MOST_WAITING = 1024 * 1024
"""Bytes."""


class PrefixedLines:
    """One stream of one host. `prefix` begins each line; `mark` precedes the last message, which is not a line."""

    def __init__(self, prefix: bytes, mark: bytes = b"") -> None:
        self._prefix = prefix
        self._mark = mark
        self._rest = bytearray()
        self.received = 0
        """The number of received bytes."""
        self._end_at = -1
        """Where the last message starts in the rest; -1 before it arrives."""

    def feed(self, data: bytes) -> bytes:
        self._rest += data
        self.received += len(data)
        if self._end_at < 0 and self._mark:
            self._end_at = self._rest.find(self._mark)
        if self._end_at >= 0:
            return b""
        whole = self._rest.rfind(b"\n") + 1
        out = self._show(self._take(whole)[:-1]) if whole else b""
        while len(self._rest) >= LONGEST + len(self._mark):  # the rest may start with a part of the mark
            out += self._show(self._take(LONGEST))
        return out

    @property
    def has_progress_bar(self) -> bool:
        return self._end_at < 0 and b"\r" in self._rest

    def progress_bar(self) -> bytes:
        """The current state of an unfinished progress bar, as a separate line."""
        drawn = self._rest.rfind(b"\r") + 1
        return self._show(self._take(drawn)) if drawn and self._end_at < 0 else b""

    def finish(self) -> tuple[bytes, bytes]:
        """The rest of the lines, and the message after the mark; empty if missing."""
        rest = bytes(self._rest)
        self._rest.clear()
        if self._end_at < 0:
            return self._show(rest) if rest else b"", b""
        shown, last = rest[: self._end_at], rest[self._end_at + len(self._mark) :]
        return self._show(shown.removesuffix(b"\n")) if shown else b"", last

    @property
    def last_size(self) -> int:
        return len(self._rest) - self._end_at - len(self._mark) if self._end_at >= 0 else 0

    def _take(self, count: int) -> bytes:
        data = bytes(self._rest[:count])
        del self._rest[:count]
        return data

    def _show(self, text: bytes) -> bytes:
        return self._prefix + text.replace(b"\n", b"\n" + self._prefix) + b"\n"


class HostOutput:
    """One descriptor and the thread that writes to it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._waiting = 0
        self._room = asyncio.Event()
        self.failed = ""
        """Why output is lost: nobody reads it, or the disk is full; empty otherwise."""
        threading.Thread(target=self._write, name=f"rallypoint-output-{fd}", daemon=True).start()

    @property
    def busy(self) -> bool:
        return self._waiting > 0

    async def write(self, data: bytes) -> None:
        """Queue whole lines for writing. Wait while too much is queued."""
        if not data or self.failed:
            return
        while self._waiting > _MOST_WAITING:
            self._room.clear()
            await self._room.wait()
        self._waiting += len(data)
        self._queue.put(data)

    async def drain(self) -> None:
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


class LauncherConsole:
    """Both outputs. If they lead to the same file, they share a thread, so that lines stay in order."""

    def __init__(self) -> None:
        self.out = HostOutput(1)
        self.err = self.out if _same_file(1, 2) else HostOutput(2)
        self._failure_told = False

    def failure(self) -> str:
        """Return a sentence once if standard output can no longer be written; empty otherwise."""
        if not self.out.failed or self._failure_told:
            return ""
        self._failure_told = True
        return f"standard output cannot be written ({self.out.failed}); the job continues, and its output is lost"

    async def say(self, text: str) -> None:
        await self.err.write(f"rallyctl: {text}\n".encode(errors="replace"))

    async def drain(self) -> None:
        await self.out.drain()
        await self.err.drain()


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
