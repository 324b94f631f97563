"""Folders and files that other users of the machine cannot read, write or plant.

Laws:

1. A folder is private if `lstat` shows a directory that our user owns and others cannot access. Anything else with
   that name is refused and not touched.
2. A file is written under a new name, which cannot be a link, and then renamed.
3. A file that others could have planted is opened without following a link or waiting for a pipe. It must be a regular
   file that our own user or root owns.

Workers import this module too, so it imports little.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_private(folder: str) -> bool:
    """Whether a private folder with this name exists."""
    try:
        seen = os.lstat(folder)
    except (OSError, ValueError):
        return False
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and not seen.st_mode & _OTHERS


def make_private(folder: str) -> None:
    """Create a private folder, or accept an existing one.

    Raises:
        PermissionError: something else has its name, or others have access.
        OSError: the folder cannot be created.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not is_private(folder):
            raise PermissionError(errno.EPERM, "it is not a folder that only this user can access", folder) from None


def replace_file(path: str, data: bytes, *, mode: int = 0o600, sync: bool = False) -> None:
    """Write a file atomically; with `sync`, wait for the disk. Raises OSError."""
    new = f"{path}.{os.getpid()}.{os.urandom(8).hex()}"
    try:
        with open(os.open(new, _NEW, mode), "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(new)
        raise


def open_to_append(path: str) -> int:
    """Open or create a private file for appending lines; returns its descriptor.

    Raises:
        PermissionError: the file is a link, is not regular, or belongs to another user.
        OSError: the file cannot be opened.
    """
    return _open(path, _APPEND, (os.geteuid(),))


def open_regular(path: str) -> int:
    """Open a file that others could have planted, for reading; returns its descriptor.

    Raises:
        PermissionError: the file is a link, is not regular, or belongs to neither us nor root.
        OSError: the file cannot be opened.
    """
    return _open(path, _READ, (os.geteuid(), 0))


def _open(path: str, flags: int, owners: tuple[int, ...]) -> int:
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PermissionError(errno.EPERM, "it is a symbolic link", path) from None
    seen = os.fstat(fd)
    if stat.S_ISREG(seen.st_mode) and seen.st_uid in owners:
        return fd
    os.close(fd)
    what = (
        f"it belongs to another user (uid {seen.st_uid})" if stat.S_ISREG(seen.st_mode) else "it is not a regular file"
    )
    raise PermissionError(errno.EPERM, what, path)
