"""Workers that are stuck in the kernel: in uninterruptible sleep (state D) for too long (contract section 5.12).

A process that reads from a slow disk is in state D at most polls, and is healthy. It is stuck if it has not run between
polls: that is one and the same sleep. The main thread is polled, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from rallypoint.base.log import get_logger
from rallypoint.base.process_table import read_stat

log = get_logger(__name__)

_MIN_POLLS = 4
"""Polls of one sleep, at least, before it counts."""
_SHORTEST, _LONGEST = 0.05, 1.0
"""Seconds between polls."""


class UninterruptibleSleep(NamedTuple):
    """One uninterruptible sleep of one process.

    `started` (see `ProcessStat`) and `switches`, the number of its context switches, distinguish it from any other.
    `where` is the kernel's function that it sleeps in; empty if that is not known.
    """

    started: int
    switches: int
    where: str


class StuckProcess(NamedTuple):
    """A process that does not return from the kernel."""

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


class _SleepRecord(NamedTuple):
    """A sleep, since when, in seconds on the monotonic clock, and at how many polls it was seen."""

    sleep: UninterruptibleSleep
    since: float
    times: int


class SleepTracker:
    """Which processes sleep since when; `minimum` seconds of one sleep make a process stuck. Pure."""

    def __init__(self, minimum: float) -> None:
        self._minimum = minimum
        self._since: dict[int, _SleepRecord] = {}

    def update(
        self, now: float, sleeps: Mapping[int, UninterruptibleSleep]
    ) -> tuple[list[StuckProcess], list[StuckProcess]]:
        """Take the result of a poll at `now`, in seconds on the monotonic clock: by pid, the sleeps.

        Returns:
            Those whose sleep is seen the second time, and those that are stuck.
        """
        again, stuck, since = [], [], {}
        for pid, sleep in sleeps.items():
            previous = self._since.get(pid)
            if previous is None or previous.sleep[:2] != sleep[:2]:
                since[pid] = _SleepRecord(sleep, now, 1)
                continue
            since[pid] = seen = _SleepRecord(sleep, previous.since, previous.times + 1)
            found = StuckProcess(pid, now - seen.since, sleep.where)
            if seen.times == 2:
                again.append(found)
            if found.seconds >= self._minimum:
                stuck.append(found)
        self._since = since
        return again, stuck


class SleepMonitor:
    """Polls workers: the kernel has no notification of a process's state. For `minimum` see `SleepTracker`."""

    def __init__(self, minimum: float) -> None:
        self._sleepers = SleepTracker(minimum)
        self._every = min(max(minimum / _MIN_POLLS, _SHORTEST), _LONGEST)
        self._poll_at = -math.inf

    def wake_at(self) -> float:
        """When to poll next, on the monotonic clock."""
        return self._poll_at

    def step(self, now: float, pids: Collection[int]) -> list[StuckProcess]:
        """Poll the workers if it is time. Returns those that are stuck."""
        if now < self._poll_at:
            return []
        self._poll_at = now + self._every
        sleeps = {pid: sleep for pid in pids if (sleep := uninterruptible_sleep_of(pid)) is not None}
        again, stuck = self._sleepers.update(now, sleeps)
        for each in again:
            log.warning("Process %d is in uninterruptible sleep (state D) in %s", each.pid, each.where or "the kernel")
        for each in stuck:
            log.error("Process %d is unhealthy: %s", each.pid, each.why)
        return stuck


def uninterruptible_sleep_of(pid: int) -> UninterruptibleSleep | None:
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
    return UninterruptibleSleep(stat.started, switches, where)
