"""The standard error of one worker on its way to the console, whose end is kept for the report.

A pipe, or a raw pseudo-terminal if the console is a terminal, so that `isatty()` stays true for progress bars. Any
thread may read: one that learns of a worker's death can read the rest before any other has.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from rallypoint.base.kernel import set_pipe_size
from rallypoint.workers.logs.console import ConsoleStream

TAIL_SIZE = 64 * 1024
"""Bytes of a worker's standard error that are kept for the report."""

CAPACITY = 1024 * 1024
"""Size of the pipe, if the system allows it; also the most that a dead worker leaves unread."""

_MAX_LINE = 4 * 1024
"""Bytes of a line that are kept for the report."""

_CHUNK = 64 * 1024
_READ_SLICE = 4 * _CHUNK  # read at once, so that a fast worker wakes us less often


class Relay:
    """The reading end of one worker's standard error, shown on `stream` unless that is None.

    `worker_end` is the worker's descriptor; who hands it over closes it here.
    """

    def __init__(self, stream: ConsoleStream | None) -> None:
        self.stream = stream
        self._fd, self.worker_end, self._terminal = _open_channel(stream)
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._label = b""
        self._in_line = False  # whether what was read last has not ended its line
        self._last = bytearray()
        self._ended = False
        self.read_at: float | None = None
        """When the worker was last heard, on the monotonic clock."""

    def fileno(self) -> int:
        """Readable when the worker has written, or has closed its end."""
        return self._fd

    def read(self, limit: int = _READ_SLICE) -> bool:
        """Read what is there, about `limit` bytes at most. Returns whether there may be more, now or later."""
        with self._lock:
            while limit > 0 and not self._ended:
                try:
                    chunk = os.read(self._fd, _CHUNK)
                except BlockingIOError:
                    break
                except OSError:  # a pseudo-terminal's end of file is EIO
                    chunk = b""
                self._ended = not chunk
                if chunk:
                    self._append_to_tail(chunk)
                    limit -= len(chunk)
            return not self._ended

    def take_pending(self) -> list[bytes]:
        """What was read and not yet taken, for the console: parts, none of them empty."""
        with self._lock:
            taken, self._pending = self._pending, []
            return taken

    def label(self, label: bytes) -> None:
        """From now on, start each line with this where it is shown; the first label counts."""
        with self._lock:
            if self._label or self.stream is None:
                return
            self._label = label
            if self._in_line:
                self._pending.append(b"\n")
                self._in_line = False  # whether what was read last has not ended its line

    def last_lines(self) -> bytes:
        """The end of what the worker has written, at most `TAIL_SIZE`, long lines without their middle."""
        self.read(CAPACITY)
        with self._lock:
            return without_long_middles(bytes(self._last))[-TAIL_SIZE:]

    def follow_window(self) -> None:
        """Set the pseudo-terminal's size to that of the console's window."""
        if self._terminal and self.stream is not None and self.stream.fd is not None:
            _copy_window_size(self.stream.fd, self._fd)

    def close(self) -> None:
        """Close the reading end; `last_lines` stays available. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
            self._ended = True

    def _append_to_tail(self, chunk: bytes) -> None:
        if self.stream is not None:
            self._pending.append(self._labelled(chunk) if self._label else chunk)
            self._in_line = not chunk.endswith(b"\n")
        self.read_at = time.monotonic()
        self._last += chunk
        if len(self._last) > 4 * TAIL_SIZE:  # rarely, since it copies
            self._last[:] = without_long_middles(bytes(self._last))[-TAIL_SIZE:]

    def _labelled(self, chunk: bytes) -> bytes:
        inside, end = (chunk[:-1], b"\n") if chunk.endswith(b"\n") else (chunk, b"")
        return (b"" if self._in_line else self._label) + inside.replace(b"\n", b"\n" + self._label) + end


def without_long_middles(data: bytes) -> bytes:
    """The data, if more than `TAIL_SIZE`, with the middle of very long lines cut, so that one does not displace all."""
    if len(data) <= TAIL_SIZE:
        return data
    lines = data.split(b"\n")
    half = _MAX_LINE // 2
    return b"\n".join(line if len(line) <= _MAX_LINE else line[:half] + b"[...]" + line[-half:] for line in lines)


def _open_channel(stream: ConsoleStream | None) -> tuple[int, int, bool]:
    """A non-blocking reading end, the worker's end, and whether they are a pseudo-terminal."""
    if stream is not None and stream.isatty():
        with contextlib.suppress(OSError):  # none left, or none in this container
            return _open_terminal(stream)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    set_pipe_size(writing, CAPACITY)
    return reading, writing, False


def _open_terminal(stream: ConsoleStream) -> tuple[int, int, bool]:
    import tty

    ours, workers = os.openpty()
    os.set_blocking(ours, False)
    tty.setraw(workers)  # the real terminal does the processing
    if stream.fd is not None:
        _copy_window_size(stream.fd, ours)
    return ours, workers, True


def _copy_window_size(source: int, target: int) -> None:
    import termios

    with contextlib.suppress(termios.error, OSError):
        size = termios.tcgetwinsize(source)
        if termios.tcgetwinsize(target) != size:
            termios.tcsetwinsize(target, size)
