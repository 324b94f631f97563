"""What workers do besides writing output, as far as /proc shows it: files that grow, and children that compute."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.process_table import descendants, process_table
from rallypoint.base.procfs import read_text
from rallypoint.workers.stop import WriteProgress, write_progress

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_BUSY = 0.5
"""The number of processors in use from which on children count as busy: a logger or a monitor uses less."""


class Activity(NamedTuple):
    """`grown` changes when a worker, or a process below one, has written as much to a file as only a save writes, and
    when it begins or ends to announce a save. `is_busy`: processes below the workers compute.
    """

    grown: int = 0
    is_busy: bool = False


class ActivityProbe:
    """Looks at some workers again and again. It touches no file system but /proc, and may be used on any one thread.

    Args:
        pids: of the workers. Another process in the place of one that has ended would only be read.
        clock: CLOCK_MONOTONIC, except in tests.
    """

    def __init__(self, pids: Collection[int], clock: Clock = SYSTEM_CLOCK) -> None:
        self.pids = frozenset(pids)
        self._clock = clock
        self._writes: dict[int, WriteProgress] = {}
        self._ticks: dict[int, int] = {}
        self._looked_at = clock.monotonic()
        self._last = Activity()

    def look(self) -> Activity:
        """The present activity. `is_busy` is about the time since the last look."""
        with suppress(OSError):  # no descriptor is free: nothing new is known
            self._last = self._look()
        return self._last

    def _look(self) -> Activity:
        table = process_table()
        now = self._clock.monotonic()
        parents = {pid: stat.parent for pid, stat in table.items()}
        below = set[int]().union(*(descendants(pid, parents) for pid in self.pids)) - self.pids
        writes = {pid: write_progress(pid) for pid in (*self.pids, *below)}
        grown = any(found.has_grown(self._writes[pid]) for pid, found in writes.items() if pid in self._writes)
        # What a worker itself uses says nothing, since one that waits in a collective may spin; what its ended children
        # have used says that they have run.
        ticks = {pid: ticks_of(pid)[1] for pid in self.pids} | {pid: sum(ticks_of(pid)) for pid in below}
        used = sum(max(0, number - self._ticks[pid]) for pid, number in ticks.items() if pid in self._ticks)
        is_busy = used > _BUSY * _TICKS_A_SECOND * (now - self._looked_at)
        self._writes, self._ticks, self._looked_at = writes, ticks, now
        return Activity(self._last.grown + grown, is_busy)


def ticks_of(pid: int) -> tuple[int, int]:
    """The processor time of a process, and that of its children that have ended; zero if it has ended itself."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])) if len(fields) > 14 else (0, 0)
