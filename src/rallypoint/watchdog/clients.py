"""The processes that have asked for timers, each by a pidfd, so that a pid that is used again means nobody else.

Laws:

1. Only whom `may_kill` allows is taken in.
2. A process is looked at once, when it asks first; those that have ended, or have no timer, are let go of when there
   are many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from rallypoint.base.log import get_logger
from rallypoint.base.procfs import read_stat
from rallypoint.watchdog.escalation import has_ended

log = get_logger(__name__)

LIMIT = 256
"""Processes that hold timers at one time: workers, and what they have started."""
_CLEAN_UP_AT = 32
_REFUSALS = 10
"""How many refused processes are named in the log; whoever writes rubbish shall not fill it."""
_MAX_DEPTH = 64


class TimerClients:
    """The one owner of their pidfds."""

    def __init__(
        self, may_kill: Callable[[int], bool], needed: Callable[[int], bool], gone: Callable[[int], None]
    ) -> None:
        """Nobody is known yet.

        Args:
            may_kill: whether the process of a pid is ours to kill.
            needed: whether the descriptor of a pid is needed still.
            gone: told of a pid whose process is found to have ended.
        """
        self._may_kill = may_kill
        self._needed = needed
        self._on_gone = gone
        self._pidfds: dict[int, int] = {}
        self._refusals = 0

    def __len__(self) -> int:
        return len(self._pidfds)

    def pidfd(self, pid: int) -> int | None:
        """The descriptor of a process that was admitted."""
        return self._pidfds.get(pid)

    def admit(self, pid: int) -> bool:
        """Take in who asks. Returns whether a timer of that process can be enforced."""
        if pid in self._pidfds:
            if not has_ended(self._pidfds[pid]):
                return True
            self._close_pidfd(pid)
            self._on_gone(pid)
        if len(self._pidfds) >= _CLEAN_UP_AT:
            self._drop_ended()
        if len(self._pidfds) >= LIMIT:
            return self._refuse(f"more than {LIMIT} processes have timers; the one of process {pid} is not enforced")
        return self._open(pid)

    def close(self) -> None:
        """Let go of all. Idempotent."""
        for pid in list(self._pidfds):
            self._close_pidfd(pid)

    def _open(self, pid: int) -> bool:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and its timers with it
            return False
        except OSError as error:
            return self._refuse(f"the timer of process {pid} is not enforced: {error.strerror}")
        self._pidfds[pid] = pidfd  # first, so that who is looked at cannot change any more
        if not self._may_kill(pid) or has_ended(pidfd):
            self._close_pidfd(pid)
            return self._refuse(f"process {pid} asks for a timer and is none of ours; it is left alone")
        return True

    def _close_pidfd(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            os.close(pidfd)

    def _drop_ended(self) -> None:
        for pid, pidfd in list(self._pidfds.items()):
            if has_ended(pidfd):
                self._close_pidfd(pid)
                self._on_gone(pid)
            elif not self._needed(pid):
                self._close_pidfd(pid)

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
