"""Copies lines of followed output that contain one of some texts to a file of their own (contract section 6.6).

Laws:
- a line is written whole, with its prefix, however long it is and in whatever pieces it came;
- a file that cannot be written is given up with a warning, and nothing else is affected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from rallypoint.base.log import get_logger

_CHUNK = 256 * 1024

_logger = get_logger(__name__)


class LineFilter:
    """The file, and the texts. Shared by the streams of all workers, in one thread.

    Args:
        path: the file; it is created, or truncated.
        texts: a line that contains one of them matches.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, texts: Sequence[str]) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._texts = tuple(map(os.fsencode, texts))
        self.overlap = max((len(text) for text in self._texts), default=1) - 1
        """Bytes of one chunk that must be searched again with the next."""

    def matches(self, data: bytes) -> bool:
        return any(text in data for text in self._texts)

    def write(self, data: bytes) -> None:
        """Append to the file. Never raises."""
        left = memoryview(data)
        while left and self._fd >= 0:
            try:
                left = left[os.write(self._fd, left) :]
            except OSError as error:
                _logger.warning("filtered output is no longer written: %s: %s", self._path, error.strerror)
                self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class FilteredStream:
    """Filters one followed file, whose bytes are given to `feed` in order.

    Args:
        line_filter: where matching lines go.
        prefix: written before each of them.
        read: `(length, offset)` to bytes of the file, for lines that turn out to match when most of them has passed.
    """

    def __init__(self, line_filter: LineFilter, prefix: bytes, read: Callable[[int, int], bytes]) -> None:
        self._filter = line_filter
        self._prefix = prefix
        self._read = read
        self.reset()

    def reset(self) -> None:
        """The file was truncated."""
        self._begin = 0  # where the line that has not ended begins
        self._seen = 0
        self._matched = False  # whether a text was found in that line
        self._last = b""  # its last bytes, in which a text may begin

    def feed(self, data: bytes) -> None:
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
        if self._filter.matches(data):  # rarely, so that most lines are not split
            lines = data[:-1].split(b"\n")
            self._filter.write(b"".join(self._prefix + line + b"\n" for line in lines if self._filter.matches(line)))

    def _append_part(self, part: bytes) -> None:
        self._seen += len(part)
        if not self._matched:
            joint = self._last + part
            self._matched = self._filter.matches(joint)
            self._last = joint[len(joint) - self._filter.overlap :] if self._filter.overlap < len(joint) else joint

    def _end_line(self, end: bytes = b"") -> None:
        """Copy the line that came in pieces, if it matches."""
        if not self._matched:
            return
        self._filter.write(self._prefix)
        at = self._begin
        while at < self._seen and (part := self._read(min(_CHUNK, self._seen - at), at)):
            at += len(part)
            self._filter.write(part)
        self._filter.write(end)
