"""Follows a log file that a worker writes: its whole lines, each with the worker's prefix.

Laws:
- bytes are never decoded, and lines are cut at newlines only, however long they are. A line that has not ended is not
  kept in memory: it is read again when it ends;
- long lines are not copied from the buffer, which all files of a thread share;
- `finish` returns all that the worker wrote before it died;
- a progress bar (a line with carriage returns) does not wait forever: after `PROGRESS_BAR_DELAY` seconds, what it has
  drawn so far is shown as a line of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.workers.logs.console import Buffer, Chunk

if TYPE_CHECKING:
    from rallypoint.workers.logs.line_filter import FilteredStream, LineFilter

PROGRESS_BAR_DELAY = 1.0
READ_SIZE = 256 * 1024
"""A good size for the buffer of `Tail.chunks`."""

_PROGRESS_BAR = 256 * 1024  # bytes of a progress bar that are shown at once
_LONG_LINE = 2048  # lines of so many bytes on average are not copied; for shorter ones a copy is cheaper
_FEW_LINES = 16  # lines, however short


class Tail:
    """One followed file, which must exist.

    Args:
        path: the file.
        prefix: shown before each line.
        line_filter: where lines that contain one of its texts go as well.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, prefix: bytes, line_filter: LineFilter | None = None) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._prefix = prefix
        self._between = b"\n" + prefix
        self._filtered = None if line_filter is None else self._apply_filter(line_filter)
        self._shown = 0  # everything before this offset was returned
        self._read = 0  # everything before this one has been searched for a newline
        self._progress_bar_since: float | None = None  # when the unfinished line was first seen to be a progress bar

    def chunks(self, now: float, buffer: bytearray) -> Iterator[Chunk]:
        """What can be shown of the file now, in chunks not much larger than `buffer`. Stop only after a chunk that ends
        a line.

        Args:
            now: seconds on the clock of `progress_bar_deadline`.
            buffer: what is read into. A chunk may refer to it, and is valid until the next one.
        """
        size = os.fstat(self._fd).st_size
        if size < self._read:  # it was truncated
            self._shown = self._read = 0
            self._progress_bar_since = None
            if self._filtered is not None:
                self._filtered.reset()
        view = memoryview(buffer)
        while self._read < size and (got := os.preadv(self._fd, [view[: size - self._read]], self._read)):
            end = buffer.rfind(b"\n", 0, got) + 1
            if self._filtered is not None:
                self._filtered.feed(bytes(view[: end or got]))
            if not end:
                self._read += got
                if self._progress_bar_since is None and buffer.find(b"\r", 0, got) >= 0:
                    self._progress_bar_since = now
                continue
            yield from self._unfinished_line(self._read, len(buffer))
            parts: list[Buffer] = [] if self._shown < self._read else [self._prefix]
            self._shown = self._read = self._read + end
            self._progress_bar_since = None
            parts += self._long_lines(buffer, end) or self._short_lines(buffer, end, got)
            yield Chunk(parts, ends=True)

    def relabel(self, prefix: bytes) -> None:
        """Start the lines that are yet to be shown with another prefix; from any thread."""
        self._prefix, self._between = prefix, b"\n" + prefix

    def has_unread(self) -> bool:
        """Whether the file has bytes that `chunks` has not read."""
        return os.fstat(self._fd).st_size != self._read

    def progress_bar_deadline(self) -> float | None:
        """When to show an unfinished progress bar (call `progress_bar`); None if there is none."""
        return None if self._progress_bar_since is None else self._progress_bar_since + PROGRESS_BAR_DELAY

    def progress_bar(self) -> bytes:
        """An unfinished progress bar so far, as a line of its own."""
        self._progress_bar_since = None
        drawn = os.pread(self._fd, _PROGRESS_BAR, self._shown)[: self._read - self._shown]
        end = drawn.rfind(b"\r") + 1
        self._shown += end
        return self._prefix + drawn[:end] + b"\n" if end else b""

    def finish(self, now: float, buffer: bytearray) -> Iterator[Chunk]:
        """All that is left, a last line without newline included, which gets one; see `chunks`."""
        yield from self.chunks(now, buffer)
        if self._shown < self._read:
            yield from self._unfinished_line(self._read, len(buffer))
            self._shown = self._read
            yield Chunk([b"\n"], ends=True)
        if self._filtered is not None:
            self._filtered.finish()

    def close(self) -> None:
        os.close(self._fd)

    def _apply_filter(self, line_filter: LineFilter) -> FilteredStream:
        from rallypoint.workers.logs.line_filter import FilteredStream

        return FilteredStream(line_filter, self._prefix, lambda length, offset: os.pread(self._fd, length, offset))

    def _unfinished_line(self, until: int, most: int) -> Iterator[Chunk]:
        at = self._shown
        if at < until:
            yield Chunk([self._prefix], ends=False)
        while at < until and (part := os.pread(self._fd, min(most, until - at), at)):
            at += len(part)
            yield Chunk([part], ends=False)

    def _long_lines(self, buffer: bytearray, end: int) -> list[Buffer]:
        """The lines up to `end` in the buffer, with the prefix between them; nothing if they are short."""
        parts: list[Buffer] = []
        view, at, count = memoryview(buffer), 0, 0
        while at < end:
            if count >= _FEW_LINES and at < count * _LONG_LINE:
                return []
            if count:
                parts.append(self._prefix)
            begin, at = at, buffer.find(b"\n", at, end) + 1
            parts.append(view[begin:at])
            count += 1
        return parts

    def _short_lines(self, buffer: bytearray, end: int, got: int) -> list[Buffer]:
        """The lines up to `end`, copied, with the prefix between them; `got` bytes are in the buffer."""
        text = (buffer if got == len(buffer) else buffer[:got]).replace(b"\n", self._between)
        return [memoryview(text)[: len(text) - len(self._prefix) - (got - end)]]
