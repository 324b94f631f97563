"""The named pipe that requests come through: made, read without blocking, and removed.

Laws:

1. It is held open for writing too, so that it neither ends nor turns readable when a client has closed its end.
2. `read` gives all that was in the pipe when it was called, and not much more, however fast a client writes.
3. Only the pipe that was made here is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

_READ_SIZE = 256 * 1024
"""Bytes that may wait while the agent is busy; what does not fit is an error in the client."""


class NamedPipe:
    """A named pipe of our own."""

    def __init__(self, path: str) -> None:
        """Make it, in the place of a file of that name.

        Args:
            path: where; the folder exists.

        Raises:
            UserError: it cannot be made there; says why.
        """
        self.path = path
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.mkfifo(path, 0o600)
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            why = error.strerror or str(error)
            from rallypoint.base.user_errors import user_error

            text = f"the pipe {path!r} of the watchdog cannot be made: {why}; name another place"
            raise user_error(text, error) from None
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _READ_SIZE)
        self._read_size = fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ)
        made = os.fstat(self._fd)
        self._made = made.st_dev, made.st_ino

    def fileno(self) -> int:
        """Readable when there is something to read."""
        return self._fd

    def read(self) -> bytes:
        """What has come; empty if nothing has."""
        parts, room = [], self._read_size
        with contextlib.suppress(BlockingIOError):
            while room > 0:
                parts.append(os.read(self._fd, room))
                room -= len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """Remove it and give the descriptor back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        os.close(fd)
        with contextlib.suppress(OSError):
            now = os.stat(self.path, follow_symlinks=False)
            if (now.st_dev, now.st_ino) == self._made:
                os.unlink(self.path)
