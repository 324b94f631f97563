"""Where people look: the agent's own standard output and standard error, as places that many workers write to.

Laws:
- the descriptors are duplicates, so that nobody can close or reuse them under us;
- where both lead to the same terminal, pipe or file, they are one place, with one turn (`line_scheduler.py`);
- who writes there, workers' lines or lines of our own log, does so in turn (`Place.turn`);
- a console that fails (closed, disk full) costs the bytes that could not be written, and nothing else.
"""

from __future__ import annotations

import fcntl
import os
import select
from typing import NamedTuple

from rallypoint.base.log import STDERR_LOCK, OutputLock
from rallypoint.logs.line_scheduler import MAX_SILENCE, MAX_WAIT, LineScheduler

Buffer = bytes | bytearray | memoryview

_MAX_PARTS = min(1024, os.sysconf("SC_IOV_MAX"))  # that the kernel takes in one call


class Chunk(NamedTuple):
    """Bytes in several parts, so that what lies in a buffer needs no copy on its way out."""

    parts: list[Buffer]
    ends: bool
    """Whether the last byte ends a line."""

    def size(self) -> int:
        """Number of bytes."""
        return sum(map(len, self.parts))


class ConsoleStream:
    """One worker's stream as it is seen at a place. Only one thread may write to the shows of a place.

    Args:
        turns: whose turn it is there.
        fd: the descriptor to write to; None if it is closed.
        turn: told whether a line is left unfinished there.
    """

    def __init__(self, turns: LineScheduler[ConsoleStream], fd: int | None, turn: OutputLock) -> None:
        self._line_scheduler = turns
        self._fd = fd
        self._output_lock = turn

    @property
    def fd(self) -> int | None:
        """The descriptor that is written to, for questions about the console; None if it is closed."""
        return self._fd

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        return self._fd is not None and os.isatty(self._fd)

    def write_or_queue(self, data: bytes, now: float) -> None:
        """Show `data` in its turn: at once, unless another stands in the middle of a line."""
        if data:
            write_all(self._line_scheduler.write_or_queue(self, data, now))

    def write_or_queue_chunk(self, piece: Chunk, now: float) -> None:
        """Show a piece (not empty) in its turn, without a copy if that is at once."""
        if self._line_scheduler.may_write(self):
            self._line_scheduler.wrote(self, piece.ends, now)
            self.write(*piece.parts)
        else:
            self.write_or_queue(b"".join(piece.parts), now)

    def backlog(self) -> int:
        """Bytes that wait for their turn."""
        return self._line_scheduler.backlog(self)

    def write(self, *parts: Buffer) -> None:
        """Write all parts now, one after the other, waiting as long as the console makes us wait. Never raises."""
        if self._fd is None:
            return
        left: list[Buffer] = list(parts)
        if left:
            self._output_lock.line_unfinished = bytes(left[-1][-1:]) != b"\n"
        while left:
            try:
                written = os.writev(self._fd, left[:_MAX_PARTS])
            except BlockingIOError:  # somebody who shares the open file has made it non-blocking
                _wait_writable(self._fd)
            except OSError:
                return
            else:
                left = _after(left, written)


class ConsoleSink:
    """One terminal, pipe or file, as many workers are seen on it. It is for one thread.

    Args:
        fds: descriptors that lead to it, which it owns from now on; None where there is none.
        turn: to be taken while anything is written there; None where nobody else writes.
    """

    def __init__(self, *fds: int | None, turn: OutputLock | None = None) -> None:
        self._fds = fds
        self.output_lock = turn or OutputLock()
        self._line_scheduler = LineScheduler[ConsoleStream](MAX_SILENCE, MAX_WAIT)

    def open_stream(self, which: int) -> ConsoleStream:
        """A new way to be seen here, by way of the descriptor of this number (-1 is the last)."""
        return ConsoleStream(self._line_scheduler, self._fds[which], self.output_lock)

    def flush_due(self, now: float) -> None:
        """Pass on the turn if its time is over."""
        write_all(self._line_scheduler.due_output(now))

    def deadline(self) -> float | None:
        """When `tick` is due; None while nobody waits."""
        return self._line_scheduler.deadline()

    def flush(self) -> None:
        """Write whatever waits."""
        write_all(self._line_scheduler.flush())

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for fd in self._fds:
            if fd is not None:
                os.close(fd)
        self._fds = ()


class Console:
    """Two descriptors of this process, which need not be open: normally 1 and 2. They lead to one place or to two."""

    def __init__(self, stdout: int, stderr: int) -> None:
        out, err = _duplicate(stdout), _duplicate(stderr)
        turn = STDERR_LOCK if stderr == 2 else None
        same = _same_sink(out, err)
        self.sinks = [ConsoleSink(out, err, turn=turn)] if same else [ConsoleSink(out), ConsoleSink(err, turn=turn)]

    def out(self) -> ConsoleStream:
        """A new way to be seen on standard output."""
        return self.sinks[0].open_stream(0)

    def err(self) -> ConsoleStream:
        """A new way to be seen on standard error."""
        return self.sinks[-1].open_stream(-1)


def write_all(pieces: list[tuple[ConsoleStream, bytes]]) -> None:
    """Write what `LineScheduler` has handed out, in order."""
    for show, data in pieces:
        show.write(data)


def _after(parts: list[Buffer], written: int) -> list[Buffer]:
    """What is left of the parts when so many bytes have been written."""
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


def _same_sink(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and os.path.sameopenfile(one, other)


def _wait_writable(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll()
