"""Detects workers' activity besides their output from /proc: growing files, and computing child processes."""

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
"""Number of processors that child processes must use to count as busy: a logger or a monitor uses less."""


class Activity(NamedTuple):
    """`grown` changes when a worker or a process below it writes as much to a file as only a save does, or starts or
    stops to announce a save. `is_busy`: processes below the workers are computing."""

    grown: int = 0
    is_busy: bool = False


class ActivityProbe:
    """Looks at workers repeatedly. Uses no file system but /proc. For one thread, whichever it is.

    Args:
        pids: the workers' pids. A process with a reused pid would only be read.
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
        """The current activity. `is_busy` refers to the time since the last look."""
        with suppress(OSError):  # no descriptor is free, so there is no new information
            self._last = self._look()
        return self._last

    def _look(self) -> Activity:
        table = process_table()
        now = self._clock.monotonic()
        parents = {pid: stat.parent for pid, stat in table.items()}
        below = set[int]().union(*(descendants(pid, parents) for pid in self.pids)) - self.pids
        writes = {pid: write_progress(pid) for pid in (*self.pids, *below)}
        grown = any(found.has_grown(self._writes[pid]) for pid, found in writes.items() if pid in self._writes)
        # A worker's own processor time shows nothing, since it might be spinning in a collective. Its ended children's
        # time shows that they ran.
        ticks = {pid: ticks_of(pid)[1] for pid in self.pids} | {pid: sum(ticks_of(pid)) for pid in below}
        used = sum(max(0, number - self._ticks[pid]) for pid, number in ticks.items() if pid in self._ticks)
        is_busy = used > _BUSY * _TICKS_A_SECOND * (now - self._looked_at)
        self._writes, self._ticks, self._looked_at = writes, ticks, now
        return Activity(self._last.grown + grown, is_busy)


def ticks_of(pid: int) -> tuple[int, int]:
    """Processor time of a process and of its ended children; zero if it ended."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])) if len(fields) > 14 else (0, 0)
