"""The agent's own standard output and standard error, as sinks that many workers write to.

Laws:
- the descriptors are duplicates, so that no other code can close or reuse them;
- where both lead to the same terminal, pipe or file, they are one sink, with one line scheduler;
- all that is written there, workers' lines or lines of our own log, is written under `ConsoleSink.output_lock`;
- a console that fails (closed, disk full) loses the bytes that could not be written, and nothing else.
"""

from __future__ import annotations

import fcntl
import os
import select

from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.log import STDERR_LOCK, OutputLock
from rallypoint.logs.line_scheduler import LineScheduler

Buffer = bytes | bytearray | memoryview

_MAX_PARTS = min(1024, os.sysconf("SC_IOV_MAX"))  # that the kernel takes in one call


class Chunk(NamedTuple):
    """Bytes in several parts, so that a part of a buffer needs no copy; `ends` is whether they end a line."""

    parts: list[Buffer]
    ends: bool

    def size(self) -> int:
        """Number of bytes."""
        return sum(map(len, self.parts))


class ConsoleStream:
    """One worker's stream on a sink, written to `fd`, which is None if that is closed. For the sink's thread only."""

    def __init__(self, scheduler: LineScheduler[ConsoleStream], fd: int | None, lock: OutputLock) -> None:
        self.fd = fd
        self._line_scheduler = scheduler
        self._output_lock = lock

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        return self.fd is not None and os.isatty(self.fd)

    def write_or_queue(self, data: bytes, now: float) -> None:
        """Write `data` at once, or when the line scheduler allows it."""
        if data:
            write_all(self._line_scheduler.write_or_queue(self, data, now))

    def write_or_queue_chunk(self, chunk: Chunk, now: float) -> None:
        """Write a chunk (not empty) as `write_or_queue` does, without a copy if that is at once."""
        if self._line_scheduler.may_write(self):
            self._line_scheduler.wrote(self, chunk.ends, now)
            self.write(*chunk.parts)
        else:
            self.write_or_queue(b"".join(chunk.parts), now)

    def backlog(self) -> int:
        """Bytes that wait."""
        return self._line_scheduler.backlog(self)

    def write(self, *parts: Buffer) -> None:
        """Write all parts in order, as slowly as the console takes them. Never raises."""
        if self.fd is None:
            return
        left: list[Buffer] = list(parts)
        if left:
            if self._output_lock.shows_live_line:
                left.insert(0, self._output_lock.take_live_line().encode())
            self._output_lock.line_unfinished = bytes(left[-1][-1:]) != b"\n"
        while left:
            try:
                written = os.writev(self.fd, left[:_MAX_PARTS])
            except BlockingIOError:  # another process has made the open file non-blocking
                _wait_writable(self.fd)
            except OSError:
                return
            else:
                left = _after(left, written)


class ConsoleSink:
    """One terminal, pipe or file that shows many workers. For one thread.

    Args:
        fds: descriptors that lead to it, which it owns; None for a closed one.
        lock: held while anything is written there; None if there is no other writer.
    """

    def __init__(self, *fds: int | None, lock: OutputLock | None = None) -> None:
        self._fds = fds
        self.output_lock = lock or OutputLock()
        self._line_scheduler = LineScheduler[ConsoleStream]()

    def open_stream(self, which: int) -> ConsoleStream:
        """A new stream, written to the descriptor of this number (-1 is the last)."""
        return ConsoleStream(self._line_scheduler, self._fds[which], self.output_lock)

    def flush_due(self, now: float) -> None:
        """Write what the line scheduler has due."""
        write_all(self._line_scheduler.due_output(now))

    def deadline(self) -> float | None:
        """When `flush_due` is due; None while nothing waits."""
        return self._line_scheduler.deadline()

    def flush(self) -> None:
        """Write all that waits."""
        write_all(self._line_scheduler.flush())

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for fd in self._fds:
            if fd is not None:
                os.close(fd)
        self._fds = ()


class Console:
    """Two descriptors of this process, normally 1 and 2, which may be closed. They lead to one sink or to two."""

    def __init__(self, stdout: int, stderr: int) -> None:
        out, err = _duplicate(stdout), _duplicate(stderr)
        lock = STDERR_LOCK if stderr == 2 else None
        same = out is not None and err is not None and os.path.sameopenfile(out, err)
        self.sinks = [ConsoleSink(out, err, lock=lock)] if same else [ConsoleSink(out), ConsoleSink(err, lock=lock)]

    def out(self) -> ConsoleStream:
        """A new stream on standard output."""
        return self.sinks[0].open_stream(0)

    def err(self) -> ConsoleStream:
        """A new stream on standard error."""
        return self.sinks[-1].open_stream(-1)


def write_all(chunks: list[tuple[ConsoleStream, bytes]]) -> None:
    """Write the output of `LineScheduler`, in order."""
    for stream, data in chunks:
        stream.write(data)


def _after(parts: list[Buffer], written: int) -> list[Buffer]:
    """The rest of the parts behind `written` bytes."""
    for number, part in enumerate(parts):
        if written < len(part):
            return [memoryview(part)[written:], *parts[number + 1 :]]
        written -= len(part)
    return []


def _duplicate(fd: int) -> int | None:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        return None


def _wait_writable(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll()
