"""The standard error of one worker on its way to the console, with its last lines kept for the report.

A pipe, or a raw pseudo-terminal where the console is a terminal, so that `isatty()` stays true for progress bars.
Reading is safe from any thread: whoever learns of a worker's death may read what it left before anyone else has.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

from rallypoint.logs.console import ConsoleStream

TAIL_SIZE = 64 * 1024
"""Bytes of a worker's standard error that are kept for the report."""

CAPACITY = 1024 * 1024
"""Bytes that a worker can write ahead of us, where the system allows it; also the most that a dead one leaves."""

_MAX_LINE = 4 * 1024
"""Bytes of a line that are kept for the report."""

_CHUNK = 64 * 1024
_READ_SLICE = 4 * _CHUNK  # read at once, so that one waking carries much of what a fast worker writes


class Relay:
    """The reading end of one worker's standard error.

    Args:
        show: where its bytes go; None if nobody shall see them.

    `worker_end` is the descriptor for the worker. Whoever hands it over closes it here afterwards.
    """

    def __init__(self, show: ConsoleStream | None) -> None:
        self.show = show
        self._fd, self.worker_end, self._terminal = _open_channel(show)
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._label = b""
        self._in_line = False
        """Whether what was read last has not ended its line."""
        self._last = bytearray()
        self._ended = False

    def fileno(self) -> int:
        """The descriptor to wait on; readable when the worker has written, or has closed its end."""
        return self._fd

    def read(self, limit: int = _READ_SLICE) -> bool:
        """Read what is there, at most about `limit` bytes. Returns whether there may ever be more."""
        with self._lock:
            while limit > 0 and not self._ended:
                try:
                    chunk = os.read(self._fd, _CHUNK)
                except BlockingIOError:
                    break
                except OSError:  # a pseudo-terminal says EIO where a pipe says end of file
                    chunk = b""
                self._ended = not chunk
                if chunk:
                    self._append_to_tail(chunk)
                    limit -= len(chunk)
            return not self._ended

    def take_pending(self) -> list[bytes]:
        """What has been read and not yet taken, for the console: parts, none of them empty."""
        with self._lock:
            taken, self._pending = self._pending, []
            return taken

    def label(self, label: bytes) -> None:
        """From now on have each line begin with this where it is shown; the first label counts."""
        with self._lock:
            if self._label or self.show is None:
                return
            self._label = label
            if self._in_line:
                self._pending.append(b"\n")
                self._in_line = False

    def last_lines(self) -> bytes:
        """The last bytes that the worker wrote, at most `TAIL_SIZE`, up to this moment; long lines without their
        middle."""
        self.read(CAPACITY)
        with self._lock:
            return without_long_middles(bytes(self._last))[-TAIL_SIZE:]

    def follow_window(self) -> None:
        """Give the pseudo-terminal the size that the console's window has now."""
        if self._terminal and self.show is not None and self.show.fd is not None:
            _copy_window_size(self.show.fd, self._fd)

    def close(self) -> None:
        """Close the reading end; what was kept stays readable. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
            self._ended = True

    def _append_to_tail(self, chunk: bytes) -> None:
        if self.show is not None:
            self._pending.append(self._labelled(chunk) if self._label else chunk)
            self._in_line = not chunk.endswith(b"\n")
        self._last += chunk
        if len(self._last) > 4 * TAIL_SIZE:  # rarely, since cutting the front costs a copy
            self._last[:] = without_long_middles(bytes(self._last))[-TAIL_SIZE:]

    def _labelled(self, chunk: bytes) -> bytes:
        inside, end = (chunk[:-1], b"\n") if chunk.endswith(b"\n") else (chunk, b"")
        return (b"" if self._in_line else self._label) + inside.replace(b"\n", b"\n" + self._label) + end


def without_long_middles(data: bytes) -> bytes:
    """More bytes than are `TAIL_SIZE` with the middle of very long lines taken out, so that one does not displace
    all."""
    if len(data) <= TAIL_SIZE:
        return data
    lines = data.split(b"\n")
    half = _MAX_LINE // 2
    return b"\n".join(line if len(line) <= _MAX_LINE else line[:half] + b"[...]" + line[-half:] for line in lines)


def _open_channel(show: ConsoleStream | None) -> tuple[int, int, bool]:
    """A non-blocking reading end, the worker's end, and whether they are a pseudo-terminal."""
    if show is not None and show.isatty():
        with contextlib.suppress(OSError):  # none left, or none in this container
            return _open_terminal(show)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reading, False)
    with contextlib.suppress(OSError):  # more than this user may have
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, CAPACITY)
    return reading, writing, False


def _open_terminal(show: ConsoleStream) -> tuple[int, int, bool]:
    import tty

    ours, workers = os.openpty()
    os.set_blocking(ours, False)
    tty.setraw(workers)  # the real terminal does what a terminal does with the bytes, once
    if show.fd is not None:
        _copy_window_size(show.fd, ours)
    return ours, workers, True


def _copy_window_size(source: int, target: int) -> None:
    import termios

    with contextlib.suppress(termios.error, OSError):
        size = termios.tcgetwinsize(source)
        if termios.tcgetwinsize(target) != size:
            termios.tcsetwinsize(target, size)
