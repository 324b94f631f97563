"""Ends workers and all that they have left: by their reaper, or, if that is lost, as far as /proc shows it.

Law: only processes that are known to be ours are killed. The reaper's descendants are; without it, those of workers
    that still run, and the sessions that these lead. A process that had left both before is not found then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence

from rallypoint.base.log import get_logger
from rallypoint.base.poll import readable, until_readable
from rallypoint.base.process_table import ProcessStat, process_table, signal_process
from rallypoint.workers.process import ChildProcess
from rallypoint.workers.reaper.client import ReaperClient, ReaperLost

log = get_logger(__name__)

_KILL_TREES_TIMEOUT = 1.0
"""Seconds for ending the trees of workers whose reaper is lost."""


class Sweep:
    """One sweep below one reaper; see `escalation.SweepInProgress`.

    Args:
        reaper: the reaper that all are below.
        processes: the workers that have ended, or must end.
        spared: pids of the workers that go on.
    """

    def __init__(self, reaper: ReaperClient, processes: Sequence[ChildProcess], spared: Collection[int] = ()) -> None:
        self._reaper = reaper
        self._processes = processes
        self._spared = set(spared)
        self._fd = -1
        """Readable when the sweep is over; -1 before it has begun."""
        self._over = False

    @property
    def cannot_find_all(self) -> bool:
        """Whether the reaper is lost."""
        return self._reaper.lost

    def begin(self, seconds: float = 0.0) -> None:
        """Begin the sweep; if the reaper is lost, all that can be found has been killed on return.

        Args:
            seconds: between SIGTERM and SIGKILL; 0 for SIGKILL at once.
        """
        self._close()
        try:
            self._fd = self._reaper.begin_sweep(seconds, self._spared)
        except ReaperLost:
            self._sweep_by_procfs()

    def fds(self) -> list[int]:
        """Readable when the sweep is done, or the reaper is gone."""
        return [] if self._over else [fd for fd in (self._reaper.fileno(), self._fd) if fd >= 0]

    def done(self) -> bool:
        """Whether nothing is left of what could be found."""
        if not self._over and self._fd >= 0 and readable(self._fd):
            if os.read(self._fd, 1):
                self._over = True
                self._close()
            else:
                self._sweep_by_procfs()
        return self._over

    def give_up(self) -> list[int]:
        """Stop waiting. Returns the pids below the reaper that have not ended."""
        if self._over:
            return []
        self._over = True
        self._reaper.give_up_sweep()
        self._close()
        # The session is that of the reaper and its supervisor; what they start is in others.
        spared = self._reaper.excluded | {stat.pid for stat in _descendants(self._spared)}
        return [
            stat.pid
            for stat in _descendants({self._reaper.pid})
            if not stat.ended and stat.session != self._reaper.pid and stat.pid not in spared
        ]

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _sweep_by_procfs(self) -> None:
        self._over = True
        self._close()
        kill_trees(self._processes)


def kill_trees(processes: Iterable[ChildProcess], unreaped: Collection[int] = (), seconds: float = 0.0) -> None:
    """Kill the workers that still run, their descendants, and the sessions that any of these lead.

    Args:
        processes: the workers.
        unreaped: pids of workers that have ended and have not been reaped, so that their sessions are still ours.
        seconds: between SIGTERM and SIGKILL; waits as long as needed. 0 for SIGKILL at once.
    """
    running = [each for each in processes if each.poll() is None]
    known = {stat.pid: stat for stat in _descendants({*(each.pid for each in running), *unreaped}) if not stat.ended}
    if seconds:
        _terminate(known.values(), seconds)
    for each in running:
        each.signal(signal.SIGKILL)
    until = time.monotonic() + _KILL_TREES_TIMEOUT
    while known and time.monotonic() < until:
        for stat in known.values():
            if (fd := signal_process(stat, signal.SIGKILL)) is not None:
                os.close(fd)
        known.update((stat.pid, stat) for stat in _descendants(set(known)))
        known = {pid: stat for pid, stat in known.items() if stat.is_running()}
        os.sched_yield()


def _descendants(roots: set[int]) -> list[ProcessStat]:
    """The descendants of these processes and members of sessions that one of them leads; the roots as well."""
    stats = process_table().values()
    found = set(roots)
    while new := {
        each.pid for each in stats if each.pid not in found and (each.parent in found or each.session in found)
    }:
        found |= new
    return [stat for stat in stats if stat.pid in found]


def _terminate(stats: Iterable[ProcessStat], seconds: float) -> None:
    """Send SIGTERM, and give time to act on it; send SIGCONT to those that were stopped."""
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        fds = [fd for each in stats if (fd := signal_process(each, signal.SIGTERM, signal.SIGCONT)) is not None]
        for fd in fds:
            stack.callback(os.close, fd)
        for fd in fds:
            until_readable([fd], deadline - time.monotonic())
