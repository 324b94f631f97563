"""Reads /proc/<pid>/stat for the whole program, finds descendants, and signals the processes found.

Law: use built-in modules only, since the reaper imports this file and must start fast (`workers.reaper.program`).
"""

from __future__ import annotations

import posix

from rallypoint.base.pidfds import HAS_PIDFDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection


_signal = __import__("_signal")
"""The C module behind `signal`: enums of all constants, which `signal` creates, cost 4 ms and 1 MB."""


class ProcessStat:
    __slots__ = ("ended", "group", "parent", "pid", "session", "started", "state")

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        self.pid = pid
        self.state = fields[0].decode()
        self.parent = int(fields[1])
        self.group = int(fields[2])
        self.session = int(fields[3])
        self.started = int(fields[19])
        """Clock ticks after boot. Together with the pid, they identify one process forever."""
        # A process whose first thread ended shows as a zombie while its other threads run.
        self.ended = self.state in "ZX" and int(fields[17]) <= 1

    @property
    def key(self) -> tuple[int, int]:
        """A value that no other process ever has."""
        return self.pid, self.started

    def is_running(self) -> bool:
        now = read_stat(self.pid)
        return now is not None and now.started == self.started and not now.ended


def signal_process(stat: ProcessStat, *numbers: int) -> None:
    """Send signals to a process, even if its pid might be reused. Does nothing if it has ended, or if we may not
    signal its user's processes.
    """
    fd = -1
    try:
        if HAS_PIDFDS:
            fd = posix.pidfd_open(stat.pid)
        if stat.is_running():  # the pid cannot be reused while the pidfd is open
            for number in numbers:
                if HAS_PIDFDS:
                    _signal.pidfd_send_signal(fd, number)
                else:
                    posix.kill(stat.pid, number)
    except OSError:
        pass
    finally:
        if fd >= 0:
            posix.close(fd)


def read_stat(pid: int) -> ProcessStat | None:
    """One process; None if missing or hidden from this user (`hidepid`)."""
    try:
        fd = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return None
    try:
        line = posix.read(fd, 1024)
    except OSError:
        return None
    finally:
        posix.close(fd)
    return parse_stat(pid, line)


def parse_stat(pid: int, line: bytes) -> ProcessStat | None:
    """Parse the `stat` file of a process; None if it is incomplete."""
    # The command name is in parentheses and can itself contain spaces and parentheses: split after the last one.
    fields = line[line.rfind(b")") + 2 :].split()
    return ProcessStat(pid, fields) if len(fields) >= 20 else None


def process_table() -> dict[int, ProcessStat]:
    """Every visible process, by pid. Raises OSError if /proc cannot be read (no free descriptor)."""
    pids = [int(name) for name in posix.listdir("/proc") if name.isdigit()]
    return {pid: stat for pid in pids if (stat := read_stat(pid)) is not None}


def descendants(root: int, parents: dict[int, int], but: Collection[int] = ()) -> set[int]:
    """The pids below `root`. `parents` maps each pid to its parent's. `but` and their descendants are left out."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    pids: set[int] = set()
    frontier = [root]
    while frontier:
        new = [pid for parent in frontier for pid in children.get(parent, ()) if pid not in pids and pid not in but]
        pids.update(new)
        frontier = new
    return pids - {root}
