"""The processes that have asked for timers, each by a pidfd, so that a pid that is reused means no other process.

Laws:

1. Only processes that `may_kill` allows are admitted.
2. A process is checked once, at its first request; those that have ended or have no timer are released when there are
   many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from rallypoint.base.log import get_logger
from rallypoint.base.process_table import read_stat
from rallypoint.workers.process import ChildProcess

log = get_logger(__name__)

LIMIT = 256
"""Processes that have timers at one time: workers, and what they have started."""
_CLEAN_UP_AT = 32
_REFUSALS = 10
"""How many refused processes are named in the log, so that nobody can fill it."""
_MAX_DEPTH = 64


class TimedProcess(ChildProcess):
    """A process that has a timer. How it ended is reported to its parent, and not to us."""

    def _collect_exit(self) -> None:
        self._end(None)


class TimerClients:
    """The one owner of these processes.

    Args:
        may_kill: whether the process of a pid belongs to this job.
        needed: whether the process of a pid has a timer, or is being ended.
        on_gone: called with a pid whose process is found to have ended.
    """

    def __init__(
        self, may_kill: Callable[[int], bool], needed: Callable[[int], bool], on_gone: Callable[[int], None]
    ) -> None:
        self._may_kill = may_kill
        self._needed = needed
        self._on_gone = on_gone
        self._processes: dict[int, TimedProcess] = {}
        self._refusals = 0

    def __len__(self) -> int:
        return len(self._processes)

    def running(self, pid: int) -> TimedProcess | None:
        """An admitted process; None if it has ended."""
        process = self._processes.get(pid)
        return process if process is not None and process.poll() is None else None

    def admit(self, pid: int) -> bool:
        """Admit a process that sets a timer. Returns whether that timer can be enforced."""
        if pid in self._processes:
            if self.running(pid):
                return True
            self._release(pid)
            self._on_gone(pid)
        if len(self._processes) >= _CLEAN_UP_AT:
            self._drop_ended()
        if len(self._processes) >= LIMIT:
            return self._refuse(f"more than {LIMIT} processes have timers; the one of process {pid} is not enforced")
        return self._open(pid)

    def close(self) -> None:
        """Release all. Idempotent."""
        for pid in list(self._processes):
            self._release(pid)

    def _open(self, pid: int) -> bool:
        try:
            self._processes[pid] = process = TimedProcess(pid, os.pidfd_open(pid))
        except ProcessLookupError:  # it has ended, and its timers with it
            return False
        except OSError as error:
            return self._refuse(f"the timer of process {pid} is not enforced: {error.strerror}")
        # The pidfd is opened before the check, so that the process that was checked is the one that is killed.
        if not self._may_kill(pid) or process.poll() is not None:
            self._release(pid)
            return self._refuse(f"process {pid} sets a timer and does not belong to this job; it is left alone")
        return True

    def _release(self, pid: int) -> None:
        self._processes.pop(pid).release()

    def _drop_ended(self) -> None:
        for pid in list(self._processes):
            if not self.running(pid):
                self._release(pid)
                self._on_gone(pid)
            elif not self._needed(pid):
                self._release(pid)

    def _refuse(self, why: str) -> bool:
        self._refusals += 1
        if self._refusals <= _REFUSALS:
            log.warning("%s", why)
        return False


def is_descendant(pid: int, roots: Collection[int]) -> bool:
    """Whether a process is one of `roots`, has been started below one, or is in a session that one leads."""
    at = pid
    for _ in range(_MAX_DEPTH):
        if at in roots:
            return True
        stat = read_stat(at)
        if stat is None or stat.parent <= 0:
            return False
        if stat.session in roots:
            return True
        at = stat.parent
    return False
