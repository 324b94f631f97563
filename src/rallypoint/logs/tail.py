"""Following a log file that a worker writes: its whole lines, each with the worker's prefix, as they come.

Laws:
- bytes are never decoded, and a line is cut at newlines only, however long it is. A line that has not ended is not
  kept in memory: it is read again once its end is known;
- long lines are not copied on their way from one buffer, which all files of a thread share, to the console;
- what the worker has written before it died is there when `finish` is called;
- a line in which a progress bar draws (it holds carriage returns) is not kept back for ever: after `PROGRESS_BAR_DELAY`
  seconds what it has drawn so far is shown as a line of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rallypoint.logs.console import Buffer, Chunk

if TYPE_CHECKING:
    from rallypoint.logs.line_filter import FilteredStream, LineFilter

PROGRESS_BAR_DELAY = 1.0
READ_SIZE = 256 * 1024
"""A good size for the buffer that `Tail.pieces` reads into."""

_PROGRESS_BAR = 256 * 1024  # bytes of a progress bar that are shown at once
_LONG_LINE = 2048  # lines of so many bytes on average go out from where they lie; for shorter ones a copy is cheaper
_FEW_LINES = 16  # lines, however short


class Tail:
    """One followed file.

    Args:
        path: the file; it must exist.
        prefix: bytes that stand before each line.
        sieve: where lines that hold one of its texts go as well.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, prefix: bytes, sieve: LineFilter | None = None) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._prefix = prefix
        self._between = b"\n" + prefix
        self._filtered = None if sieve is None else self._apply_filter(sieve)
        self._shown = 0  # everything before this offset has been handed out
        self._read = 0  # everything before this one has been searched for a newline
        self._progress_bar_since: float | None = None  # when the unfinished line was first seen to be a progress bar

    def pieces(self, now: float, room: bytearray) -> Iterator[Chunk]:
        """What can be shown of what is in the file now, in pieces not much larger than `room`.

        Stop only after a piece that ends a line.

        Args:
            now: the moment, on the clock of `progress_bar_deadline`.
            room: what is read into. A piece may lie in it, and holds until the next one is asked for.
        """
        size = os.fstat(self._fd).st_size
        if size < self._read:  # somebody has emptied it
            self._shown = self._read = 0
            self._progress_bar_since = None
            if self._filtered is not None:
                self._filtered.reset()
        view = memoryview(room)
        while self._read < size and (got := os.preadv(self._fd, [view[: size - self._read]], self._read)):
            end = room.rfind(b"\n", 0, got) + 1
            if self._filtered is not None:
                self._filtered.feed(bytes(view[: end or got]))
            if not end:
                self._read += got
                self._note_progress_bar(room, got, now)
                continue
            yield from self._unfinished_line(self._read, len(room))
            parts: list[Buffer] = [] if self._shown < self._read else [self._prefix]
            self._shown = self._read = self._read + end
            self._progress_bar_since = None
            parts += self._long_lines(room, end) or self._short_lines(room, end, got)
            yield Chunk(parts, ends=True)

    def relabel(self, prefix: bytes) -> None:
        """Have the lines that are yet to be shown begin with another prefix, from whatever thread."""
        self._prefix, self._between = prefix, b"\n" + prefix

    def has_unread(self) -> bool:
        """Whether the file holds bytes that `pieces` has not looked at."""
        return os.fstat(self._fd).st_size != self._read

    def progress_bar_deadline(self) -> float | None:
        """When an unfinished progress bar should be shown (call `bar`); None if there is none."""
        return None if self._progress_bar_since is None else self._progress_bar_since + PROGRESS_BAR_DELAY

    def progress_bar(self) -> bytes:
        """What an unfinished progress bar has drawn so far, as a line of its own."""
        self._progress_bar_since = None
        drawn = os.pread(self._fd, _PROGRESS_BAR, self._shown)[: self._read - self._shown]
        end = drawn.rfind(b"\r") + 1
        self._shown += end
        return self._prefix + drawn[:end] + b"\n" if end else b""

    def finish(self, now: float, room: bytearray) -> Iterator[Chunk]:
        """All that is left, a last line without newline included: it is given one. For the rest see `pieces`."""
        yield from self.pieces(now, room)
        if self._shown < self._read:
            yield from self._unfinished_line(self._read, len(room))
            self._shown = self._read
            yield Chunk([b"\n"], ends=True)
        if self._filtered is not None:
            self._filtered.finish()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _apply_filter(self, sieve: LineFilter) -> FilteredStream:
        from rallypoint.logs.line_filter import FilteredStream

        return FilteredStream(sieve, self._prefix, lambda length, offset: os.pread(self._fd, length, offset))

    def _unfinished_line(self, until: int, most: int) -> Iterator[Chunk]:
        at = self._shown
        if at < until:
            yield Chunk([self._prefix], ends=False)
        while at < until and (piece := os.pread(self._fd, min(most, until - at), at)):
            at += len(piece)
            yield Chunk([piece], ends=False)

    def _long_lines(self, room: bytearray, end: int) -> list[Buffer]:
        """The lines up to `end` where they lie, with the prefix between them; nothing if they turn out to be short."""
        parts: list[Buffer] = []
        view, at, count = memoryview(room), 0, 0
        while at < end:
            if count >= _FEW_LINES and at < count * _LONG_LINE:
                return []
            if count:
                parts.append(self._prefix)
            begin, at = at, room.find(b"\n", at, end) + 1
            parts.append(view[begin:at])
            count += 1
        return parts

    def _short_lines(self, room: bytearray, end: int, got: int) -> list[Buffer]:
        """The lines up to `end`, copied, with the prefix between them; `got` bytes are in the room."""
        text = (room if got == len(room) else room[:got]).replace(b"\n", self._between)
        return [memoryview(text)[: len(text) - len(self._prefix) - (got - end)]]

    def _note_progress_bar(self, room: bytearray, got: int, now: float) -> None:
        if self._progress_bar_since is None and room.find(b"\r", 0, got) >= 0:
            self._progress_bar_since = now
