"""Lines of followed output that hold one of some texts, written to a file of their own (contract section 6.6).

Laws:
- a line is written whole, with its prefix, however long it is and in whatever pieces it came;
- a file that cannot be written costs itself, and a warning; nobody else notices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from rallypoint.base.log import get_logger

_CHUNK = 256 * 1024

_logger = get_logger(__name__)


class LineFilter:
    """The file, and what a line must hold to get into it. Shared by the streams of all workers, in one thread.

    Args:
        path: the file; it is made, and emptied.
        texts: a line that holds one of them passes.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: str, texts: Sequence[str]) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._texts = tuple(map(os.fsencode, texts))
        self.overlap = max((len(text) for text in self._texts), default=1) - 1
        """Bytes of one piece that must be looked at again with the next."""

    def matches(self, data: bytes) -> bool:
        """Whether one of the texts is in `data`."""
        return any(text in data for text in self._texts)

    def write(self, data: bytes) -> None:
        """Append. Never raises."""
        left = memoryview(data)
        while left and self._fd >= 0:
            try:
                left = left[os.write(self._fd, left) :]
            except OSError as error:
                _logger.warning("filtered output is no longer kept: %s: %s", self._path, error.strerror)
                self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class FilteredStream:
    """One followed file on its way through a sieve. It is shown everything in order, by `see`.

    Args:
        sieve: where lines that pass go.
        prefix: bytes that stand before each line there.
        read: `(length, offset)` to bytes of the file, for lines that are found to pass when most of them has gone by.
    """

    def __init__(self, sieve: LineFilter, prefix: bytes, read: Callable[[int, int], bytes]) -> None:
        self._filter = sieve
        self._prefix = prefix
        self._read = read
        self.reset()

    def reset(self) -> None:
        """The file has been emptied."""
        self._begin = 0  # where the line that has not ended begins
        self._seen = 0
        self._matched = False  # whether what is known of that line holds a text
        self._last = b""  # its last bytes, in which a text may begin

    def feed(self, data: bytes) -> None:
        """The next bytes of the file."""
        end = data.find(b"\n") + 1 if self._begin < self._seen else 0
        if end:
            self._append_part(data[:end])
            self._end_line()
        whole = data.rfind(b"\n") + 1
        if whole > end:
            self._whole_lines(data[end:whole])
        if whole:
            self._begin, self._matched, self._last = self._seen, False, b""
        if whole < len(data):
            self._append_part(data[whole:])

    def finish(self) -> None:
        """The file ends here; a last line gets a newline."""
        if self._begin < self._seen:
            self._end_line(b"\n")
            self._begin = self._seen

    def _whole_lines(self, data: bytes) -> None:
        self._seen += len(data)
        if self._filter.matches(data):  # rarely, so that most is looked at by the C library alone
            lines = data[:-1].split(b"\n")
            self._filter.write(b"".join(self._prefix + line + b"\n" for line in lines if self._filter.matches(line)))

    def _append_part(self, part: bytes) -> None:
        self._seen += len(part)
        if not self._matched:
            joint = self._last + part
            self._matched = self._filter.matches(joint)
            self._last = joint[len(joint) - self._filter.overlap :] if self._filter.overlap < len(joint) else joint

    def _end_line(self, end: bytes = b"") -> None:
        """Copy the line that has come in pieces, if it passes."""
        if not self._matched:
            return
        self._filter.write(self._prefix)
        at = self._begin
        while at < self._seen and (piece := self._read(min(_CHUNK, self._seen - at), at)):
            at += len(piece)
            self._filter.write(piece)
        self._filter.write(end)
