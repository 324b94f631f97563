"""The kernel's news of changed files (inotify(7)), through the C library. Imported only when something is followed."""

from __future__ import annotations

import ctypes
import os
import struct

WRITTEN = 0x00000002
"""News of a file: it was written to (IN_MODIFY)."""
CREATED = 0x00000100 | 0x00000080
"""News of a folder: something was made in it, or moved into it (IN_CREATE, IN_MOVED_TO)."""
_IN_Q_OVERFLOW = 0x00004000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows


class Inotify:
    """Tells which of some files were written to, or in which of some folders something was made.

    Raises:
        OSError: this user has too many of these already, or the kernel has none.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._fd

    def watch(self, path: str, news: int = WRITTEN) -> int:
        """From now on tell of `news` of `path`, under the number returned.

        Args:
            path: of a file or folder.
            news: `WRITTEN` or `CREATED`.

        Raises:
            OSError: it is not there, or this user watches too many.
        """
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(path), news)
        return self._checked(number, f"inotify_add_watch on {path!r}")

    def changed(self) -> set[int] | None:
        """Numbers of those that there is news of since the last call; None if there was too much news to keep."""
        try:
            news = os.read(self._fd, 64 * 1024)
        except BlockingIOError:
            return set()
        numbers, at = set(), 0
        while at < len(news):
            number, mask, _, length = _EVENT.unpack_from(news, at)
            if mask & _IN_Q_OVERFLOW:
                return None
            numbers.add(number)
            at += _EVENT.size + length
        return numbers

    def close(self) -> None:
        """Give the descriptor back. Call it once."""
        os.close(self._fd)

    @staticmethod
    def _checked(result: int, what: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")
        return result
