"""Processes that are left after all workers ended, such as a profiler's exporter or a tracker's helper.

If a worker succeeded, the sweep waits for its leftovers while they are busy: a successful job is not complete before
its last trace is written.

Laws:

1. This module reads only /proc, and only processes below the reaper. It sends no signals.
2. A process is busy if it uses the processor, reads or writes, or has a file open for writing that might be more than a
   log (as in `workers.stop`). The sweep waits for no other process: a `sleep` would delay each job for the whole time.
3. If nothing is left, two small files in /proc show that, and nothing more is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.log import get_logger, printable
from rallypoint.base.process_table import ProcessStat, descendants, process_table
from rallypoint.base.procfs import read_text
from rallypoint.workers.stop import write_progress

log = get_logger(__name__)

LOOK_INTERVAL = 0.25
"""Seconds between looks, and until the first verdict on a process."""
BUSY_TIME = 1.0
"""Seconds for which a process counts as busy after its last activity."""
WARN_AFTER = 2.0
"""Seconds until the log says what the sweep waits for."""
_MIN_TICKS = 1
"""Minimum clock ticks (10 ms) of processor time between looks that count as activity."""
_MIN_BYTES = 4096
"""Minimum bytes read and written between looks that count as activity; a log line is smaller."""


class Leftovers:
    """Some workers' leftovers, and how long a sweep waits for them.

    Args:
        reaper: the reaper's pid, which is its supervisor's pid.
        excluded: pids below the reaper that are in no round.
        ranks: global ranks by worker pid.
        waited: the global ranks whose leftovers the sweep waits for.
        seconds: the maximum time to wait.
        clock: the clock of `wake_at`.
    """

    def __init__(
        self,
        reaper: int,
        excluded: Collection[int],
        ranks: Mapping[int, int],
        waited: Collection[int],
        seconds: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._reaper, self._excluded, self._ranks, self._waited = reaper, excluded, ranks, waited
        self._seconds, self._clock = seconds, clock
        self._began = self.until = self._look_at = math.inf
        self._seen: dict[tuple[int, int], _Activity] = {}
        self._left: list[Left] = []
        self._is_told = self._over = False

    def wake_at(self) -> float:
        return min(self._look_at, self.until)

    def shorten(self, until: float) -> None:
        """Wait no longer than until this time."""
        self.until = min(self.until, until)
        self._seconds = min(self._seconds, max(0.0, until - self._clock.monotonic()))

    def are_busy(self) -> bool:
        """Whether the sweep must wait for leftovers. Once false, it stays false."""
        now = self._clock.monotonic()
        if self._over:
            return False
        if self._began == math.inf:
            self._began, self.until = now, min(self.until, now + self._seconds)
        elif now < self.wake_at():
            return True
        self._left = self._look(now)
        busy = [left for left in self._left if left.is_busy]
        self._look_at = now + LOOK_INTERVAL
        self._over = not busy or now >= self.until
        if self._over:
            self._tell_ended(now)
        elif now - self._began >= WARN_AFTER and not self._is_told:
            self._is_told = True
            what = ", ".join(left.text for left in busy)
            log.warning("waiting for %s; ending it in %.0f s (--leftover-timeout)", what, self.until - now)
        return not self._over

    def _tell_ended(self, now: float) -> None:
        for left in self._left:
            say = log.warning if left.is_busy else log.info
            say("ended %s after %.0f s", left.text, now - self._began)

    def _look(self, now: float) -> list[Left]:
        """The leftovers: the topmost process of each tree."""
        if not _has_children(self._reaper):
            return []
        try:
            table = process_table()
        except OSError:  # such as no free descriptor
            return []
        below = descendants(self._reaper, {pid: stat.parent for pid, stat in table.items()}, self._excluded)
        stats = [
            table[pid]
            for pid in below
            if not table[pid].ended and table[pid].session != self._reaper and pid not in self._ranks
        ]
        known, self._seen = self._seen, {}
        trees: dict[int, list[ProcessStat]] = {}
        for stat in stats:
            trees.setdefault(_top(stat.pid, table, {stat.pid for stat in stats}), []).append(stat)
        found = []
        for top, members in sorted(trees.items()):
            rank = next((rank for rank in (self._rank_of(stat) for stat in members) if rank is not None), None)
            # Examine all of them: a process whose activity was not tracked would look busy.
            active = [self._is_active(stat, known, now) for stat in members]
            waited = rank in self._waited if rank is not None else len(self._waited) == len(self._ranks)
            found.append(Left(_described(top, rank, len(members) - 1), waited and any(active)))
        return found

    def _is_active(self, stat: ProcessStat, known: Mapping[tuple[int, int], _Activity], now: float) -> bool:
        ticks, moved = _ticks(stat.pid), _moved(stat.pid)
        before = known.get(stat.key)
        if before is None:
            until = now + LOOK_INTERVAL / 2  # until the next look
        elif ticks - before.ticks >= _MIN_TICKS or moved - before.moved >= _MIN_BYTES:
            until = now + BUSY_TIME
        else:
            until = before.until
        self._seen[stat.key] = _Activity(ticks, moved, until)
        return now < until or bool(write_progress(stat.pid).positions)

    def _rank_of(self, stat: ProcessStat) -> int | None:
        """The rank whose session or environment the process has; None if it has neither."""
        if stat.session in self._ranks:
            return self._ranks[stat.session]
        variables = read_text(f"/proc/{stat.pid}/environ", 1 << 17).split("\0")
        text = next((variable[5:] for variable in variables if variable.startswith("RANK=")), "")
        return int(text) if text.isascii() and text.isdigit() and int(text) in self._ranks.values() else None


class Left(NamedTuple):
    """A leftover process, with those below it. `is_busy`: it is active, so the sweep waits for it."""

    text: str
    is_busy: bool


class _Activity(NamedTuple):
    """A process's processor time and bytes since its start, and until when it counts as busy."""

    ticks: int
    moved: int
    until: float


def _has_children(reaper: int) -> bool:
    """Whether anything is below the reaper's two own processes; True if the kernel has no list of children."""
    try:
        for inner in _children(reaper):
            if _children(inner):
                return True
    except OSError:
        return True
    return False


def _children(pid: int) -> list[int]:
    fd = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [int(text) for text in os.read(fd, 4096).split()]
    finally:
        os.close(fd)


def _top(pid: int, table: Mapping[int, ProcessStat], among: Collection[int]) -> int:
    while table[pid].parent in among:
        pid = table[pid].parent
    return pid


def _ticks(pid: int) -> int:
    text = read_text(f"/proc/{pid}/stat")
    fields = text[text.rfind(")") + 2 :].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _moved(pid: int) -> int:
    lines = (line.partition(": ") for line in read_text(f"/proc/{pid}/io").splitlines())
    return sum(int(value) for name, _, value in lines if name in ("rchar", "wchar") and value.isdigit())


def _described(pid: int, rank: int | None, others: int) -> str:
    """`wandb-service (pid 4711), which rank 0 left running`."""
    words = read_text(f"/proc/{pid}/cmdline", 4096).split("\0")
    name = os.path.basename(words[0]) or read_text(f"/proc/{pid}/comm", 64).strip() or "a process"
    if name.startswith("python"):
        name = _program(words[1:]) or name
    more = f" and {others} below it" if others else ""
    who = "a worker" if rank is None else f"rank {rank}"
    return f"{printable(name)} (pid {pid}{more}), which {who} left running"


def _program(words: Iterable[str]) -> str:
    """The script or module that an interpreter runs; empty for a program text (`-c`)."""
    words = iter(words)
    for word in words:
        if word == "-m":
            return next(words, "")
        if word == "-c":
            return ""
        if not word.startswith("-"):
            return os.path.basename(word)
    return ""
