"""Whether a process is in the middle of writing a file, as far as /proc shows, so that no signal of ours interrupts it.

Laws:

1. No file system but /proc is touched: one that hangs must not hang the agent. So the evidence is the position in an
   open file, and what the process has written at all; not the file.
2. A file counts if it is open for writing and can be a checkpoint: it is named, is no device, no shared memory, not the
   standard output, and is not opened to append, as logs are.
3. It is being written if it moves. At first it has `DETECTION_TIME` seconds for that, and `LOCK_DETECTION_TIME` where
   all that is open looks like a lock file; after each move `QUIET_TIME` seconds go by until the process counts as done,
   since a checkpoint is often several files, one after another.
4. A process that announces it (`rallypoint.notices.saving`) counts as long as it does.
"""

from __future__ import annotations

import os

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.procfs import read_text
from rallypoint.notices import SAVING

DETECTION_TIME = 0.25
"""Seconds in which a file that is open must move. The kernel may hold up a writer for 0.2 s."""
LOCK_DETECTION_TIME = 0.05
"""The same for a file that is locked and at its beginning: a lock file, or one of HDF5, which moves no position."""
QUIET_TIME = 1.0
"""Seconds without a move after which nothing more is expected."""
_MIN_PROGRESS = 64 << 10
"""Bytes that make a move: less, within `QUIET_TIME`, is no checkpoint but a log."""

_SAVING_MARK = f"/memfd:{SAVING} (deleted)"
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_DELETED = " (deleted)"


class WriteProgress(NamedTuple):
    """The progress of a process's writes: `positions` in its open files, by descriptor and path, and bytes written.

    `announced` is whether it announces that it is saving, `locks` whether all of the files look like lock files.
    """

    positions: dict[tuple[int, str], int]
    written: int
    announced: bool = False
    locks: bool = False

    def moved_from(self, before: WriteProgress) -> bool:
        """Whether a file was opened or closed since, or written to."""
        now, then = self.positions, before.positions
        if now.keys() != then.keys():
            return True
        steps = [now[each] - then[each] for each in now]
        return bool(steps) and (
            self.written - before.written >= _MIN_PROGRESS or any(not 0 <= step < _MIN_PROGRESS for step in steps)
        )


class WriteDetector:
    """Checks one process again and again.

    Args:
        pid: of the process. Another process in its place would only be read.
        clock: on which `DETECTION_TIME` and `QUIET_TIME` are counted.
    """

    def __init__(self, pid: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._pid = pid
        self._clock = clock
        self._last_progress: WriteProgress | None = None
        self._until = 0.0
        self.certain = False
        """Whether it has been found to write, and not only to hold a file open."""
        self.what = "a checkpoint"
        """The name of what it writes, for a message."""

    def check(self) -> bool:
        now, found = self._clock.monotonic(), write_progress(self._pid)
        if self._last_progress is None:
            self._last_progress = found
            self._until = now if not found.positions else now + (LOCK_DETECTION_TIME if found.locks else DETECTION_TIME)
        elif found.moved_from(self._last_progress):
            self.certain = True
            self._last_progress = found
            self._until = now + QUIET_TIME
        self.certain |= found.announced
        if found.positions:
            self.what = ", ".join(sorted({path for _, path in found.positions}))
        return found.announced or now < self._until


def write_progress(pid: int) -> WriteProgress:
    """The present progress of a process's writes; empty if it has ended or cannot be read."""
    targets = _open_files(pid)
    output = {targets.get(1), targets.get(2)}
    found = {
        (fd, path): place
        for fd, path in targets.items()
        if fd > 2 and _is_named(path) and path not in output and (place := _file_position(pid, fd)) is not None
    }
    positions = {each: place.position for each, place in found.items()}
    locks = bool(found) and all(place.locked and place.position == 0 for place in found.values())
    return WriteProgress(positions, _written(pid) if positions else 0, _SAVING_MARK in targets.values(), locks)


def _open_files(pid: int) -> dict[int, str]:
    """Descriptor to what it refers to. There may be hundreds, for each of several workers, while a restart waits."""
    found: dict[int, str] = {}
    try:
        folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return found
    try:
        for name in os.listdir(folder):
            try:
                found[int(name)] = os.readlink(name, dir_fd=folder)
            except OSError:  # closed since
                continue
    except OSError:  # the process has ended
        pass
    finally:
        os.close(folder)
    return found


def _is_named(path: str) -> bool:
    return path.startswith("/") and not path.startswith(_NO_FILES) and not path.endswith(_DELETED)


class _FilePosition(NamedTuple):
    position: int
    locked: bool


def _file_position(pid: int, fd: int) -> _FilePosition | None:
    """The position of a descriptor in its file, and whether it holds a lock; None if it is not writable, or appends."""
    try:
        if not os.lstat(f"/proc/{pid}/fd/{fd}").st_mode & 0o200:
            return None
        fields = _fields(f"/proc/{pid}/fdinfo/{fd}")
        return None if int(fields["flags"], 8) & os.O_APPEND else _FilePosition(int(fields["pos"]), "lock" in fields)
    except (OSError, KeyError, ValueError):
        return None


def _written(pid: int) -> int:
    """Bytes for which the process has made pages dirty: the progress of a single long `write` shows nowhere else."""
    try:
        return int(_fields(f"/proc/{pid}/io")["write_bytes"])
    except (KeyError, ValueError):
        return 0


def _fields(path: str) -> dict[str, str]:
    lines = (line.partition(":") for line in read_text(path).splitlines())
    return {name: value for name, colon, value in lines if colon}
