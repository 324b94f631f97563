"""Workers that are stuck in the kernel: in uninterruptible sleep (state D) for too long (contract section 5.12).

A process that reads from a slow disk is in state D whenever one looks, and is well. Stuck is one that has not been
switched to between looks: it is in the one and same sleep. The main thread is looked at, as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from rallypoint.base.log import get_logger
from rallypoint.base.procfs import read_stat

log = get_logger(__name__)

_LOOKS = 4
"""How often at least a sleep is seen before it counts."""
_SHORTEST, _LONGEST = 0.05, 1.0
"""Seconds between looks."""


class Sleep(NamedTuple):
    """One uninterruptible sleep of one process, told from any other by these."""

    started: int
    """When the process was, see `ProcessStat`."""
    switches: int
    """How often it had been switched away from."""
    where: str
    """The kernel's function that it sleeps in; empty if the kernel does not say."""


class Stuck(NamedTuple):
    """A process that does not come back from the kernel."""

    pid: int
    seconds: float
    where: str

    @property
    def why(self) -> str:
        """The cause in a few words."""
        inside = f" in {self.where}" if self.where else ""
        return (
            f"it is in uninterruptible sleep (state D){inside} for {self.seconds:.1f} s: the kernel waits for a disk, "
            "a network file system or a device, and as a rule not even SIGKILL ends it before that answers"
        )


class _Seen(NamedTuple):
    """A sleep, since when, in seconds on the monotonic clock, and how many times it was seen."""

    sleep: Sleep
    since: float
    times: int


class Sleepers:
    """Who sleeps since when. Pure."""

    def __init__(self, minimum: float) -> None:
        """Args: `minimum`: seconds of one sleep that make a process stuck."""
        self._minimum = minimum
        self._since: dict[int, _Seen] = {}

    def look(self, now: float, sleeps: Mapping[int, Sleep]) -> tuple[list[Stuck], list[Stuck]]:
        """Take in what all processes do now.

        Args:
            now: seconds on the monotonic clock.
            sleeps: by pid, those that are in an uninterruptible sleep.

        Returns:
            Those whose sleep is seen the second time, and those that are stuck.
        """
        again, stuck, since = [], [], {}
        for pid, sleep in sleeps.items():
            former = self._since.get(pid)
            if former is None or former.sleep[:2] != sleep[:2]:
                since[pid] = _Seen(sleep, now, 1)
                continue
            since[pid] = seen = _Seen(sleep, former.since, former.times + 1)
            found = Stuck(pid, now - seen.since, sleep.where)
            if seen.times == 2:
                again.append(found)
            if found.seconds >= self._minimum:
                stuck.append(found)
        self._since = since
        return again, stuck


class StuckWatch:
    """Looks at workers every so often: nothing tells of a state of a process, so this is the one thing that polls."""

    def __init__(self, minimum: float) -> None:
        """Args: `minimum`: seconds of one sleep that make a worker stuck."""
        self._sleepers = Sleepers(minimum)
        self._every = min(max(minimum / _LOOKS, _SHORTEST), _LONGEST)
        self._look_at = -math.inf

    def wake_at(self) -> float:
        """When to look next, on the monotonic clock."""
        return self._look_at

    def step(self, now: float, pids: Collection[int]) -> list[Stuck]:
        """Look at the workers if it is time. Returns those that are stuck."""
        if now < self._look_at:
            return []
        self._look_at = now + self._every
        sleeps = {pid: sleep for pid in pids if (sleep := sleep_of(pid)) is not None}
        again, stuck = self._sleepers.look(now, sleeps)
        for each in again:
            log.warning("Process %d is in uninterruptible sleep (state D) in %s", each.pid, each.where or "the kernel")
        for each in stuck:
            log.error("Process %d is unhealthy: %s", each.pid, each.why)
        return stuck


def sleep_of(pid: int) -> Sleep | None:
    """The uninterruptible sleep that a process's main thread is in; None if it is in none, or is not there."""
    stat = read_stat(pid)
    if stat is None or stat.state != "D":
        return None
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            switches = sum(int(line.split()[1]) for line in file if "ctxt_switches:" in line)
    except (OSError, ValueError):
        return None
    where = ""
    try:
        with open(f"/proc/{pid}/wchan", encoding="utf-8", errors="replace") as file:
            where = file.read(64).strip("0\n")
    except OSError:
        pass
    return Sleep(stat.started, switches, where)
