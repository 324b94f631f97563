"""Following a log file that a worker writes: its whole lines, each with the worker's prefix, as they come.

Laws:
- bytes are never decoded, and a line is cut at newlines only, however long it is. A line that has not ended is not
  kept in memory: it is read again once its end is known;
- what the worker has written before it died is there when `finish` is called;
- a line in which a progress bar draws (it holds carriage returns) is not kept back for ever: after `BAR_PATIENCE`
  seconds what it has drawn so far is shown as a line of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.logs.sieve import Sieve, Sifter

BAR_PATIENCE = 1.0
_CHUNK = 256 * 1024


class Tail:
    """One followed file.

    Args:
        path: the file; it must exist.
        prefix: bytes that stand before each line.
        sieve: where lines that hold one of its texts go as well.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, prefix: bytes, sieve: Sieve | None = None) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._prefix = prefix
        self._between = b"\n" + prefix
        self._sifter = None if sieve is None else self._sift(sieve)
        self._shown = 0  # everything before this offset has been handed out
        self._read = 0  # everything before this one has been searched for a newline
        self._bar_since: float | None = None  # when the unfinished line was first seen to be a progress bar

    def pieces(self, now: float) -> Iterator[bytes]:
        """What can be shown of what is in the file now, in pieces of bounded size.

        A piece that ends a line ends with a newline, and no other does: stop only after such a piece.
        """
        size = os.fstat(self._fd).st_size
        if size < self._read:  # somebody has emptied it
            self._shown = self._read = 0
            self._bar_since = None
            if self._sifter is not None:
                self._sifter.forget()
        while self._read < size and (chunk := os.pread(self._fd, min(_CHUNK, size - self._read), self._read)):
            end = chunk.rfind(b"\n") + 1
            if self._sifter is not None:
                self._sifter.see(chunk[:end] if end else chunk)
            if not end:
                self._read += len(chunk)
                self._notice_bar(chunk, now)
                continue
            yield from self._unfinished_line(self._read)
            first = b"" if self._shown < self._read else self._prefix
            self._shown = self._read = self._read + end
            self._bar_since = None
            yield b"".join((first, chunk[: end - 1].replace(b"\n", self._between), b"\n"))

    def behind(self) -> bool:
        """Whether the file holds bytes that `pieces` has not looked at."""
        return os.fstat(self._fd).st_size != self._read

    def bar_deadline(self) -> float | None:
        """When an unfinished progress bar should be shown (call `bar`); None if there is none."""
        return None if self._bar_since is None else self._bar_since + BAR_PATIENCE

    def bar(self) -> bytes:
        """What an unfinished progress bar has drawn so far, as a line of its own."""
        self._bar_since = None
        drawn = os.pread(self._fd, _CHUNK, self._shown)[: self._read - self._shown]
        end = drawn.rfind(b"\r") + 1
        self._shown += end
        return self._prefix + drawn[:end] + b"\n" if end else b""

    def finish(self, now: float) -> Iterator[bytes]:
        """All that is left, a last line without newline included: it is given one."""
        yield from self.pieces(now)
        if self._shown < self._read:
            yield from self._unfinished_line(self._read)
            self._shown = self._read
            yield b"\n"
        if self._sifter is not None:
            self._sifter.finish()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _sift(self, sieve: Sieve) -> Sifter:
        from rallypoint.logs.sieve import Sifter

        return Sifter(sieve, self._prefix, lambda length, offset: os.pread(self._fd, length, offset))

    def _unfinished_line(self, until: int) -> Iterator[bytes]:
        at = self._shown
        if at < until:
            yield self._prefix
        while at < until and (piece := os.pread(self._fd, min(_CHUNK, until - at), at)):
            at += len(piece)
            yield piece

    def _notice_bar(self, chunk: bytes, now: float) -> None:
        if self._bar_since is None and b"\r" in chunk:
            self._bar_since = now
