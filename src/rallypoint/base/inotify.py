"""The kernel's notifications of changed files (inotify(7)), through the C library. Imported only when needed."""

from __future__ import annotations

import ctypes
import os
import struct

WRITTEN = 0x00000002
"""A file was written to (IN_MODIFY)."""
CREATED = 0x00000100 | 0x00000080
"""An entry was created in a folder or moved into it (IN_CREATE, IN_MOVED_TO)."""
_IN_Q_OVERFLOW = 0x00004000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows

_libc = ctypes.CDLL(
    None, use_errno=True
)  # import here: loading it in one thread while another forks may make the child hang
_init, _add, _remove = _libc.inotify_init1, _libc.inotify_add_watch, _libc.inotify_rm_watch


class Inotify:
    """Watches files for writes, and folders for new entries. Raises OSError if this user already has too many of these
    objects, or if the kernel has no inotify.
    """

    def __init__(self) -> None:
        self._fd = self._checked(_init(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")

    def fileno(self) -> int:
        return self._fd

    def watch(self, path: str, events: int = WRITTEN) -> int:
        """Watch the file or folder `path` for `events` (`WRITTEN` or `CREATED`); returns the watch's number. Raises
        OSError if `path` does not exist, or if this user watches too many.
        """
        return self._checked(_add(self._fd, os.fsencode(path), events), f"inotify_add_watch on {path!r}")

    def unwatch(self, number: int) -> None:
        """End a watch. Does nothing if the watch ended when its file disappeared."""
        _remove(self._fd, number)

    def changed(self) -> set[int] | None:
        """The numbers of watches with events since the last call; None if the kernel dropped some events."""
        try:
            data = os.read(self._fd, 64 * 1024)
        except BlockingIOError:
            return set()
        numbers, at = set(), 0
        while at < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, at)
            if mask & _IN_Q_OVERFLOW:
                return None
            numbers.add(number)
            at += _EVENT.size + length
        return numbers

    def close(self) -> None:
        os.close(self._fd)

    @staticmethod
    def _checked(result: int, what: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")
        return result
