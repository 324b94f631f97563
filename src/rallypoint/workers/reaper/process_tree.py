"""The processes below one process: finding, killing and reaping them.

Laws:

1. A child that has ended is reaped at once.
2. A process is killed by its pidfd, once it is known that this still refers to the one that was found.
3. A sweep kills nothing that is started after it was begun, and a process that has survived SIGKILL once is not waited
   for again. It may begin with one SIGTERM to each process.
4. An excluded process, with all below it, is spared by every sweep, but not by `end`.
5. A process that one sweep spares is spared with all that is below it or in the session that it leads.
"""

from __future__ import annotations

import posix
import select
import time

from rallypoint.base.process_table import ProcessStat, descendants, process_table, read_stat, signal_process
from rallypoint.workers.reaper.process_setup import SIGCONT, SIGKILL, SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

SWEEP_INTERVAL = 0.05
"""Seconds between two passes of a sweep, in addition to those at each end of a child."""
LAST_TIMEOUT = 10.0
"""Seconds that reaper and supervisor wait, before they end, for processes that do not even end on SIGKILL."""


class ProcessTree:
    """The processes below this process.

    Args:
        wake: the reading end of the pipe that is readable when children have ended.
    """

    def __init__(self, wake: int) -> None:
        self.wake = wake
        self.started: set[int] = set()
        """Children whose exit codes matter, until they are reaped."""
        self.exits: dict[int, int] = {}
        """Exit codes of those that were reaped, -N for a signal."""
        self._kill_at = 0.0
        self._terminated: set[tuple[int, int]] = set()
        self._stuck: set[tuple[int, int]] = set()
        self._excluded: set[int] = set()
        self._spared: set[int] = set()
        """Children that the sweep that was begun last spares."""

    def exclude(self, pid: int) -> None:
        """Spare this child, and what is below it, in every sweep from now on."""
        self._excluded.add(pid)

    def watch_orphan(self, pid: int, excluded: bool) -> bool:
        """Adopt a process that is below us, and will be a child of ours. Returns whether it exists.

        Args:
            pid: its pid.
            excluded: whether sweeps spare it, and its exit code does not matter; if not, that matters from now on.
        """
        if read_stat(pid) is None:
            return False
        if excluded:
            self._excluded.add(pid)
        else:
            self._excluded.discard(pid)
            self.started.add(pid)
        return True

    def reap(self) -> bool:
        """Reap all children that have ended; returns whether there are others."""
        try:  # noqa: SIM105 - contextlib is not built in
            posix.read(self.wake, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._excluded.discard(pid)
            self._spared.discard(pid)
            if pid in self.started:
                self.started.discard(pid)
                self.exits[pid] = posix.waitstatus_to_exitcode(status)

    def begin_sweep(self, seconds: float, spared: Collection[int] = ()) -> None:
        """Let `sweep` send SIGTERM to all that is below, except the spared, and SIGKILL after this many seconds."""
        self._kill_at = time.monotonic() + seconds
        self._spared = self.started.intersection(spared)
        self._terminated.clear()

    def sweep(self) -> bool:
        """Make one pass: signal all that is below. Returns whether anything was found, apart from the stuck."""
        if not self.reap() or self._only_excluded():  # without other children nothing is below us
            return False
        try:
            victims = self._own_descendants({pid: each for pid, each in process_table().items() if not each.ended})
            kills = time.monotonic() >= self._kill_at
            for each in victims:
                if kills:
                    _send(each, SIGKILL)
                elif each.key not in self._terminated:
                    self._terminated.add(each.key)
                    _send(each, SIGTERM, SIGCONT)  # one that is stopped handles it only when it continues
            if any(each.key not in self._stuck for each in victims):
                return True
            return self.reap() and self._has_other_children()
        except OSError:  # no descriptor is free, say: try again
            return True

    def give_up(self) -> None:
        """Never wait again for what is left now."""
        try:
            self._stuck = {each.key for each in self._own_descendants(process_table())}
        except OSError:
            return

    def end(self, seconds: float) -> None:
        """Kill all, and wait this long for what does not end at once."""
        until = time.monotonic() + seconds
        self._excluded.clear()
        self.begin_sweep(0.0)
        poller = select.poll()
        poller.register(self.wake, select.POLLIN)
        while self.sweep() and time.monotonic() < until:
            poller.poll(SWEEP_INTERVAL * 1000)

    def _own_descendants(self, found: dict[int, ProcessStat]) -> list[ProcessStat]:
        """Our descendants that are not excluded. An adopted process may be below an excluded one for a moment."""
        me = posix.getpid()
        parents = {pid: me if pid in self.started else each.parent for pid, each in found.items()}
        spared = self._excluded | self._spared
        if self._spared:
            spared |= {pid for pid, each in found.items() if each.session in self._spared}
        return [found[pid] for pid in descendants(me, parents, spared)]

    def _has_other_children(self) -> bool:
        """Whether there is a child that is neither stuck nor excluded, given that there is a child."""
        spared = self._excluded | self._spared
        if not self._stuck and not spared:
            return True
        me = posix.getpid()
        return any(
            (each.parent == me or pid in self.started)
            and pid not in spared
            and each.session not in self._spared
            and each.key not in self._stuck
            for pid, each in process_table().items()
        )

    def _only_excluded(self) -> bool:
        """Whether the kernel's list of our children, where it has one, names only those that are spared.

        The list is exact: from that of a process with one thread, only that thread's own `waitpid` takes any.
        """
        spared = self._excluded | self._spared
        if not spared or self.started - spared:
            return False
        me = posix.getpid()
        try:
            fd = posix.open(f"/proc/self/task/{me}/children", posix.O_RDONLY | posix.O_CLOEXEC)
        except OSError:
            return False
        try:
            return set(map(int, posix.read(fd, 4096).split())) <= spared
        except OSError:
            return False
        finally:
            posix.close(fd)


def _send(stat: ProcessStat, *numbers: int) -> None:
    fd = signal_process(stat, *numbers)
    if fd is not None:
        posix.close(fd)
