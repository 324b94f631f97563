"""Follows a worker's log file, and returns whole lines with the worker's prefix.

Laws:
- bytes are never decoded, and lines are cut only at newlines, however long they are, except in the two cases below. An
unfinished line is not stored in memory: it is read again when it ends;
- long lines are not copied out of the buffer, which all files of a thread share;
- after the worker dies, `end` and `finish` show everything that it wrote, and nothing written later;
- a progress bar (a line with carriage returns) does not wait forever: after `PROGRESS_BAR_DELAY` seconds, what is drawn
so far is shown as a line;
- another unfinished line, such as a debugger's prompt, is shown as a line after `PROMPT_DELAY` seconds of silence. If
it continues, the rest waits longer each time, so that a row of dots makes few lines. A worker that writes whole blocks
did not stop in the middle of a line, so its unfinished line waits for its end unless it looks like a prompt;
- lines that contain a filter's text are also written to a separate file (contract section 6.6), whole and with their
prefix, however long they are and in whatever pieces they arrive. If that file cannot be written, it is abandoned with a
warning, and nothing else is affected.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from rallypoint.base.log import get_logger
from rallypoint.workers.logs.console import Buffer, Chunk

PROGRESS_BAR_DELAY, PROMPT_DELAY = 1.0, 0.3
READ_SIZE = 256 * 1024
"""A good buffer size for `Tail.chunks`."""

_PROGRESS_BAR = 256 * 1024  # bytes of a progress bar to show at once
_LONG_LINE = 2048  # average bytes per line from which lines are not copied; copying shorter lines is cheaper
_FEW_LINES = 16  # number of lines, however short
_FILTER_CHUNK = 256 * 1024

_BLOCK = 4096
"""Minimum bytes per write of a buffered writer, which can cut a line anywhere."""
_LONGEST_PROMPT = 4096
_LOOKS_LIKE_A_PROMPT = b":", b"?", b">", b")", b"]", b"$", b"#"
_MORE_PATIENT = 4

_logger = get_logger(__name__)


class Tail:
    """A followed file, which must exist.

    Args:
        path: the file.
        prefix: put before each line.
        line_filter: also receives lines that contain one of its texts.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, prefix: bytes, line_filter: LineFilter | None = None) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._prefix = prefix
        self._between = b"\n" + prefix
        self._filtered = None if line_filter is None else FilteredStream(line_filter, prefix, self._fd)
        self._shown = 0  # everything before this offset was returned
        self._read = 0  # everything before this offset was searched for a newline
        self._end: int | None = None  # nothing behind this offset is read
        self._progress_bar_since: float | None = None  # when the unfinished line was first recognized as a progress bar
        self._prompt_since: float | None = None  # when the unfinished line last grew, if it must be shown
        self._patience = PROMPT_DELAY
        self._cut = False  # whether all that was read of the unfinished line was shown

    def chunks(self, now: float, buffer: bytearray) -> Iterator[Chunk]:
        """Yield the output that can be shown now, in chunks not much larger than `buffer`. Stop only after a chunk that
        ends a line.

        Args:
            now: seconds on the clock of `unfinished_deadline`.
            buffer: the buffer to read into. A chunk may refer to it, and is valid only until the next chunk.
        """
        size = self._size()
        if size < self._read:  # the file was truncated
            self._shown = self._read = 0
            self._begin_line()
            if self._filtered is not None:
                self._filtered.reset()
        grown = size - self._read
        if self._cut and grown and os.pread(self._fd, 1, self._read) == b"\n":  # it was already shown with a newline
            self._shown = self._read = self._read + 1
            self._begin_line()
            if self._filtered is not None:
                self._filtered.feed(b"\n")
        view = memoryview(buffer)
        while self._read < size and (got := os.preadv(self._fd, [view[: size - self._read]], self._read)):
            end = buffer.rfind(b"\n", 0, got) + 1
            if self._filtered is not None:
                self._filtered.feed(bytes(view[: end or got]))
            if not end:
                self._read += got
                self._cut = False
                if self._progress_bar_since is None and buffer.find(b"\r", 0, got) >= 0:
                    self._progress_bar_since = now
                is_prompt = grown < _BLOCK or buffer[:got].rstrip().endswith(_LOOKS_LIKE_A_PROMPT)
                is_short = self._read - self._shown <= _LONGEST_PROMPT
                self._prompt_since = now if is_prompt and is_short and self._progress_bar_since is None else None
                continue
            yield from self._unfinished_line(self._read, len(buffer))
            parts: list[Buffer] = [] if self._shown < self._read else [self._prefix]
            self._shown = self._read = self._read + end
            self._begin_line()
            parts += self._long_lines(buffer, end) or self._short_lines(buffer, end, got)
            yield Chunk(parts, ends=True)

    def relabel(self, prefix: bytes) -> None:
        """Start lines that are not shown yet with another prefix; from any thread."""
        self._prefix, self._between = prefix, b"\n" + prefix

    def has_unread(self) -> bool:
        """Whether the file contains bytes that `chunks` has not read."""
        return self._size() != self._read

    def end(self) -> None:
        """Show nothing written from now on: the worker is dead. Call `finish` once nothing is unread."""
        self._end = os.fstat(self._fd).st_size

    @property
    def ended(self) -> bool:
        return self._end is not None

    def unfinished_deadline(self) -> float | None:
        """When to show an unfinished line with `unfinished_line`; None if there is none."""
        if self._progress_bar_since is not None:
            return self._progress_bar_since + PROGRESS_BAR_DELAY
        return None if self._prompt_since is None else self._prompt_since + self._patience

    def unfinished_line(self) -> bytes:
        """Take the part of an unfinished line to show now, as a line."""
        is_bar = self._progress_bar_since is not None
        self._progress_bar_since = self._prompt_since = None
        shown = os.pread(self._fd, _PROGRESS_BAR, self._shown)[: self._read - self._shown]
        if is_bar:
            shown = shown[: shown.rfind(b"\r") + 1]
        else:
            self._patience *= _MORE_PATIENT
            self._cut = True
        self._shown += len(shown)
        return self._prefix + shown + b"\n" if shown else b""

    def finish(self, now: float, buffer: bytearray) -> Iterator[Chunk]:
        """Yield all remaining output, including a last line without newline, which gets one; see `chunks`."""
        yield from self.chunks(now, buffer)
        if self._shown < self._read:
            yield from self._unfinished_line(self._read, len(buffer))
            self._shown = self._read
            yield Chunk([b"\n"], ends=True)
        if self._filtered is not None:
            self._filtered.finish()

    def close(self) -> None:
        """Never raises. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _begin_line(self) -> None:
        self._progress_bar_since = self._prompt_since = None
        self._patience, self._cut = PROMPT_DELAY, False

    def _size(self) -> int:
        size = os.fstat(self._fd).st_size
        return size if self._end is None else min(size, self._end)

    def _unfinished_line(self, until: int, most: int) -> Iterator[Chunk]:
        at = self._shown
        if at < until:
            yield Chunk([self._prefix], ends=False)
        while at < until and (part := os.pread(self._fd, min(most, until - at), at)):
            at += len(part)
            yield Chunk([part], ends=False)

    def _long_lines(self, buffer: bytearray, end: int) -> list[Buffer]:
        """The lines up to `end` in the buffer, with the prefix between them; empty if they are short."""
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


class LineFilter:
    """A filter's file and texts. Shared by the streams of all workers, in one thread.

    Args:
        path: the file; it is created or truncated.
        texts: a line that contains any of these matches.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, texts: Sequence[str]) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._texts = tuple(map(os.fsencode, texts))
        self.overlap = max((len(text) for text in self._texts), default=1) - 1
        """Bytes of one chunk to search again with the next one."""

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
    """Filters one followed file; pass its bytes to `feed` in order.

    Args:
        line_filter: receives matching lines.
        prefix: put before each of them.
        fd: the file, for lines that turn out to match after most of the line has passed.
    """

    def __init__(self, line_filter: LineFilter, prefix: bytes, fd: int) -> None:
        self._filter = line_filter
        self._prefix = prefix
        self._fd = fd
        self.reset()

    def reset(self) -> None:
        """Start over: the file was truncated."""
        self._begin = 0  # where the unfinished line starts
        self._seen = 0
        self._matched = False  # whether that line contains a text
        self._last = b""  # its last bytes, which might contain the start of a text

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
        """End at the end of the file; a last line gets a newline."""
        if self._begin < self._seen:
            self._end_line(b"\n")
            self._begin = self._seen

    def _whole_lines(self, data: bytes) -> None:
        self._seen += len(data)
        if self._filter.matches(data):  # rare, so most lines are not split
            lines = data[:-1].split(b"\n")
            self._filter.write(b"".join(self._prefix + line + b"\n" for line in lines if self._filter.matches(line)))

    def _append_part(self, part: bytes) -> None:
        self._seen += len(part)
        if not self._matched:
            joint = self._last + part
            self._matched = self._filter.matches(joint)
            self._last = joint[len(joint) - self._filter.overlap :] if self._filter.overlap < len(joint) else joint

    def _end_line(self, end: bytes = b"") -> None:
        """Copy a line that arrived in pieces, if it matches."""
        if not self._matched:
            return
        self._filter.write(self._prefix)
        at = self._begin
        while at < self._seen and (part := os.pread(self._fd, min(_FILTER_CHUNK, self._seen - at), at)):
            at += len(part)
            self._filter.write(part)
        self._filter.write(end)
