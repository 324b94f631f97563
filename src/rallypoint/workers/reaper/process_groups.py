"""Processes below the reaper, on a system without subreapers, pidfds and /proc: the process group of each worker.

A worker leads its process group, as it leads its session; what it spawns is in that group until it leaves it. Laws:

1. A child that has ended is reaped at once, and then the only writing end of its pipe is closed, whose other end the
   agent has instead of a pidfd.
2. A process that has left its worker's group (a daemon does) is not found: nothing shows which worker started it.
3. A group is forgotten when it was found empty, since its number may be reused from then on.
"""

from __future__ import annotations

import posix
import time

from rallypoint.workers.reaper.process_setup import SIGCONT, SIGKILL, SIGTERM
from rallypoint.workers.reaper.process_tree import ProcessTree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

FDS = "/dev/fd"
"""A folder with the numbers of this process's descriptors."""


class ProcessGroups(ProcessTree):
    """Replaces `ProcessTree` on such systems; see there."""

    def __init__(self, wake: int) -> None:
        super().__init__(wake)
        self._pipes: dict[int, int] = {}
        """The writing end of each worker's pipe, until that is reaped."""
        self._groups: set[int] = set()
        """Groups that exist or may exist."""
        self._asked: set[int] = set()
        """Groups to which the sweep has sent SIGTERM."""
        self._stuck_groups: set[int] = set()

    def open_descriptor(self, pid: int) -> int:
        self._groups.add(pid)
        reading, self._pipes[pid] = posix.pipe()
        return reading

    def watch_orphan(self, pid: int, excluded: bool) -> bool:
        """Return False: no process can be adopted here."""
        return False

    def _forget(self, pid: int) -> None:
        pipe = self._pipes.pop(pid, -1)
        if pipe >= 0:
            posix.close(pipe)
        if not _signal_group(pid, 0):
            self._groups.discard(pid)

    def begin_sweep(self, seconds: float, spared: Collection[int] = ()) -> None:
        super().begin_sweep(seconds, spared)
        self._asked.clear()

    def sweep(self) -> bool:
        self.reap()
        kills = time.monotonic() >= self._kill_at
        for group in self._groups - self._excluded - self._spared:
            if not self._send(group, kills) and group not in self.started:
                self._groups.discard(group)
        return bool(self._groups - self._excluded - self._spared - self._stuck_groups)

    def give_up(self) -> None:
        self._stuck_groups = set(self._groups)

    def _send(self, group: int, kills: bool) -> bool:
        """Send a group the signal that is due; returns whether the group exists."""
        if kills:
            return _signal_group(group, SIGKILL)
        if group in self._asked:
            return _signal_group(group, 0)
        self._asked.add(group)
        return _signal_group(group, SIGTERM) and _signal_group(group, SIGCONT)


def _signal_group(group: int, number: int) -> bool:
    """Whether there is a process in it that may be sent this: on macOS, one that has ended may not."""
    try:
        posix.killpg(group, number)
    except OSError:
        return False
    return True
