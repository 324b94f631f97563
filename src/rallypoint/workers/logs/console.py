"""The agent's standard output and standard error, as sinks to which many workers write.

Laws:
- the descriptors are duplicates, so that no other code can close or reuse them;
- if both lead to the same terminal, pipe or file, they share one sink and one line scheduler;
- all output, workers' lines and our own log lines, is written under `ConsoleSink.output_lock`;
- a console that fails (closed, disk full) loses only the bytes that could not be written;
- nothing is lost, changed or reordered within one stream;
- output is written as soon as possible: a prompt or a progress bar does not wait for a newline;
- a stream with an unfinished line keeps the console until its newline. Another stream gets the console only after the
first is silent for `MAX_SILENCE` seconds or makes the other wait for `MAX_WAIT` seconds, or when workers end, whose
last output does not wait (`flush`);
- no stream starves: while others wait, a stream gives up the console at the end of a line.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import time
from collections.abc import Hashable

from rallypoint.base.light_typing import Generic, NamedTuple, TypeVar
from rallypoint.base.stderr import STDERR_LOCK, OutputLock

Buffer = bytes | bytearray | memoryview

_MAX_PARTS = min(1024, os.sysconf("SC_IOV_MAX"))  # the kernel's limit per call

S = TypeVar("S", bound=Hashable)

MAX_SILENCE, MAX_WAIT = 0.1, 0.5


class _Queued:
    __slots__ = ("data", "since")

    def __init__(self, data: bytes, since: float) -> None:
        self.data = bytearray(data)
        self.since = since


class LineScheduler(Generic[S]):
    """Decides which of several sources may write to a shared console. Pure: bytes and `now` in, bytes out.

    Methods that might pass the console on return the output to write, in order.
    """

    def __init__(self) -> None:
        self._holder: S | None = None  # the source with an unfinished line
        self._held_since = 0.0
        self._last_bytes = 0.0  # when the holder last wrote
        self._waiting: dict[S, _Queued] = {}  # first come, first served

    def write_or_queue(self, source: S, data: bytes, now: float) -> list[tuple[S, bytes]]:
        """Return what to write now that `source` has `data` (not empty) to write."""
        if self.may_write(source):  # like `due_output`, but without a copy
            self.wrote(source, data.endswith(b"\n"), now)
            return [(source, data)]
        if (queued := self._waiting.get(source)) is not None:
            queued.data += data
        else:
            self._waiting[source] = _Queued(data, now)
        return self.due_output(now)

    def may_write(self, source: S) -> bool:
        """Whether `source` may write at once. It then calls `wrote`."""
        return not self._waiting and self._holder in (None, source)

    def wrote(self, source: S, ends: bool, now: float) -> None:
        """Note that `source` wrote at once; `ends` if this ended a line."""
        if self._holder is None:
            self._held_since = now
        self._note_output(source, ends, now)

    def due_output(self, now: float) -> list[tuple[S, bytes]]:
        """The output to write at `now`. Call this once `deadline` passes."""
        out: list[tuple[S, bytes]] = []
        while self._waiting:
            deadline = self.deadline()
            yields = deadline is not None and now >= deadline
            if self._holder is None or (self._holder not in self._waiting and yields):
                self._holder = next(iter(self._waiting))
                self._held_since = now
            if self._holder not in self._waiting:
                break
            out.append((self._holder, self._take_output(self._holder, now)))
        return out

    def flush(self) -> list[tuple[S, bytes]]:
        """Take all waiting output; no source keeps the console."""
        out = []
        if self._holder is not None and (own := self._waiting.pop(self._holder, None)):
            out.append((self._holder, bytes(own.data)))
        out += [(source, bytes(waiting.data)) for source, waiting in self._waiting.items()]
        self._waiting.clear()
        self._holder = None
        return out

    def backlog(self, source: S) -> int:
        waiting = self._waiting.get(source)
        return len(waiting.data) if waiting else 0

    def deadline(self) -> float | None:
        """When to call `due_output`, on the clock of `now`; None while no source waits."""
        for first in self._waiting.values():
            return min(self._last_bytes + MAX_SILENCE, max(first.since, self._held_since) + MAX_WAIT)
        return None

    def _take_output(self, source: S, now: float) -> bytes:
        """Take the output that `source` may write now, and pass the console on if a line ends."""
        data = bytes(self._waiting.pop(source).data)
        whole = data.rfind(b"\n") + 1
        if whole and self._waiting and whole < len(data):
            self._waiting[source] = _Queued(data[whole:], now)  # the next line waits behind older sources
            data = data[:whole]
        self._note_output(source, data.endswith(b"\n"), now)
        return data

    def _note_output(self, source: S, ends: bool, now: float) -> None:
        """Note that `source` writes, and keeps the console unless this ends a line."""
        self._holder = None if ends else source
        self._last_bytes = now


class Chunk(NamedTuple):
    """Bytes in several parts, so that part of a buffer is not copied; `ends`: whether they end a line."""

    parts: list[Buffer]
    ends: bool

    def size(self) -> int:
        return sum(map(len, self.parts))


class ConsoleStream:
    """A worker's standard output (0) or standard error (1) on a sink. For the sink's thread only."""

    def __init__(self, sink: ConsoleSink, end: int) -> None:
        self.fd = sink.fds[-end]
        """None once closed."""
        self._line_scheduler = sink.scheduler
        self._output_lock = sink.output_lock

    def write_or_queue(self, data: bytes, now: float) -> None:
        """Write `data` at once, or when the line scheduler permits it."""
        if data:
            write_all(self._line_scheduler.write_or_queue(self, data, now))

    def write_or_queue_chunk(self, chunk: Chunk, now: float) -> None:
        """Write a chunk (not empty) like `write_or_queue`, without a copy if it is written at once."""
        if self._line_scheduler.may_write(self):
            self._line_scheduler.wrote(self, chunk.ends, now)
            self.write(*chunk.parts)
        else:
            self.write_or_queue(b"".join(chunk.parts), now)

    def backlog(self) -> int:
        return self._line_scheduler.backlog(self)

    def write(self, *parts: Buffer) -> None:
        """Write all parts in order, however slowly the console accepts them. Never raises."""
        if self.fd is None:
            return
        left: list[Buffer] = list(parts)
        if left:
            if self._output_lock.shows_live_line:
                left.insert(0, self._output_lock.take_live_line().encode())
            self._output_lock.line_unfinished = bytes(left[-1][-1:]) != b"\n"
        self._output_lock.writing_since = time.monotonic()
        try:
            while left:
                try:
                    written = os.writev(self.fd, left[:_MAX_PARTS])
                except BlockingIOError:  # another process made the open file non-blocking
                    _wait_writable(self.fd)
                else:
                    left = _after(left, written)
                    self._output_lock.writing_since = time.monotonic()
        except OSError:
            return
        finally:
            self._output_lock.writing_since = None


class ConsoleSink:
    """One terminal, pipe or file that shows many workers. For one thread.

    Args:
        fds: its descriptors, which it owns; None for a closed one.
        lock: the lock for all writes to it; None if it has no other writer.
    """

    def __init__(self, *fds: int | None, lock: OutputLock | None = None) -> None:
        self.fds = fds
        self.pipes = {fd for fd in fds if fd is not None and _is_pipe(fd)}
        self.output_lock = lock or OutputLock()
        self.scheduler: LineScheduler[ConsoleStream] = LineScheduler()

    def close(self) -> None:
        for fd in self.fds:
            if fd is not None:
                os.close(fd)
        self.fds = ()


def open_sinks(stdout: int, stderr: int) -> list[ConsoleSink]:
    """Create sinks for two descriptors of this process, normally 1 and 2, which may be closed: one, or one each."""
    out, err = _duplicate(stdout), _duplicate(stderr)
    lock = STDERR_LOCK if stderr == 2 else None
    same = out is not None and err is not None and os.path.sameopenfile(out, err)
    return [ConsoleSink(out, err, lock=lock)] if same else [ConsoleSink(out), ConsoleSink(err, lock=lock)]


def write_all(chunks: list[tuple[ConsoleStream, bytes]]) -> None:
    """Write the `LineScheduler`'s output in order."""
    for stream, data in chunks:
        stream.write(data)


def _after(parts: list[Buffer], written: int) -> list[Buffer]:
    """The rest of the parts after `written` bytes."""
    for number, part in enumerate(parts):
        if written < len(part):
            return [memoryview(part)[written:], *parts[number + 1 :]]
        written -= len(part)
    return []


def _is_pipe(fd: int) -> bool:
    return stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK)


def _duplicate(fd: int) -> int | None:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        return None


def _wait_writable(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll()
