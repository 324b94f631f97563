"""The folders with agents' files for commands on this machine, one per user.

Laws:

1. A folder counts only if the user whose id is in its name owns it and nobody else has access. A file counts only if
   the same user owns it. If another user has taken a folder's name, use a second name.
2. Another user's folder cannot block a command: do not follow links, wait for pipes or enter file systems mounted
   there, and limit the number of files read.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice

from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import make_private
from rallypoint.workers.logs.specs import temporary_folder

_log = get_logger(__name__)

FOLDER = "RALLYPOINT_JOBS_DIR"
"""Names the parent of the users' folders."""
_SHARED = "/tmp"
_FOLDER_NAME = re.compile(r"rallypoint-([0-9]{1,10})(-[0-9a-f]{16})?")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_OF_ANOTHER = 1000
"""Maximum number of another user's files that root examines."""
_OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def _places() -> list[str]:
    """The possible parents of users' folders. An agent uses the first in which it can create its own. They do not
    depend on `TMPDIR`, which often differs between a job and its user's commands.
    """
    if given := os.environ.get(FOLDER, ""):
        return [given]
    with suppress(UserError):
        if (fallback := temporary_folder()) != _SHARED:
            return [_SHARED, fallback]
    return [_SHARED]


def make_folder() -> str:
    """Create this user's folder if needed, and return it. Raises OSError."""
    refusal: OSError | None = None
    for place in _places():
        usual = os.path.join(place, f"rallypoint-{os.geteuid()}")
        try:
            make_private(usual)
            if os.access(usual, os.W_OK):
                return usual
            refusal = refusal or OSError(errno.EROFS, os.strerror(errno.EROFS), usual)
            continue  # created when this was writable
        except OSError as error:
            refusal = refusal or error
        if os.path.lexists(usual):  # another user has taken the name
            with suppress(OSError):
                own = sorted(path for path, _ in _folders_at(place, os.geteuid()))
                if not own:
                    own = [f"{usual}-{os.urandom(8).hex()}"]
                    os.mkdir(own[0], 0o700)
                return own[0]
    assert refusal is not None
    raise refusal


def _folders_at(place: str, user: int | None) -> Iterator[tuple[str, int]]:
    """The folders of a user, or of all users (None), each with its owner."""
    us = os.geteuid()
    with suppress(OSError):
        with os.scandir(place) as entries:
            matches = [match for entry in entries if (match := _FOLDER_NAME.fullmatch(entry.name))]
        found = [(match[0], int(match[1])) for match in matches if user in {None, int(match[1])}]
        mounted = _mounts_below(place) if any(owner != us for _, owner in found) else set[str]()
        for name, owner in found:
            if owner == us or name not in mounted:
                with suppress(OSError):
                    path = os.path.join(place, name)
                    if _is_folder_of(os.lstat(path), owner):
                        yield path, owner


def _is_folder_of(seen: os.stat_result, owner: int) -> bool:
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == owner and not seen.st_mode & _OTHERS


def _mounts_below(place: str) -> set[str]:
    """The names below which a file system is mounted, possibly by another user's program that never answers. Raises
    OSError.
    """
    begin = os.path.realpath(place).rstrip("/") + "/"
    with open("/proc/self/mountinfo", errors="replace") as mounts:
        points = [line.split()[4] for line in mounts]
    return {point.removeprefix(begin).partition("/")[0] for point in points if point.startswith(begin)}


@contextmanager
def user_folders(user: int | None) -> Iterator[list[tuple[int, int]]]:
    """Descriptors of the folders of a user, or of all users (None), each with its owner."""
    opened: list[tuple[int, int]] = []
    try:
        for path, owner in (found for place in _places() for found in _folders_at(place, user)):
            with suppress(OSError):
                opened.append((os.open(path, _OPEN_FOLDER), owner))
        # Check again: the owner may have replaced it meanwhile.
        yield [(fd, owner) for fd, owner in opened if _is_folder_of(os.fstat(fd), owner)]
    finally:
        for fd, _ in opened:
            os.close(fd)


def names_in(folder: int, owner: int, form: re.Pattern[str]) -> list[str]:
    """The sorted names in a folder that match a form."""
    most = None if owner == os.geteuid() else _MOST_OF_ANOTHER
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, most)]
        if len(names) == most and next(entries, None) is not None:
            _log.warning("user id %d has more than %d job files; the rest were not read", owner, most)
        return sorted(name for name in names if form.fullmatch(name))
    return []


@contextmanager
def opened(folder: int, name: str, owner: int) -> Iterator[int]:
    """Open a file. Raises OSError if this fails, or if it is not a regular file that this user owns."""
    fd = os.open(name, _OPEN_FILE, dir_fd=folder)
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != owner:
            raise PermissionError(errno.EPERM, "it is not a regular file owned by the owner of its folder", name)
        yield fd
    finally:
        os.close(fd)
