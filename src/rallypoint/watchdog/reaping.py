"""One process whose timer ran out, on its way to its end.

    ASKED     it has been sent the signal that it named itself, if that is not SIGKILL. `grace` seconds
    SHOWING   it catches SIGABRT (Python's faulthandler does) and has been sent it, so that the stacks of all its
              threads are in its standard error. `SHOW_TIME` seconds
    KILLED    SIGKILL. `PATIENCE` seconds
    DONE      it is gone, or does not end even on SIGKILL

Laws:

1. Nothing here blocks: a loop waits on `fds` until `wake_at` and calls `step`.
2. Signals go through the pidfd that was opened when the process asked for its timer, so no other process is meant.
"""

from __future__ import annotations

import contextlib
import math
import select
import signal
from enum import Enum

from rallypoint.base.log import get_logger
from rallypoint.base.procfs import catches

log = get_logger(__name__)

SHOW_TIME = 1.0
"""Seconds in which a process that was sent SIGABRT may write its stacks."""
PATIENCE = 10.0
"""Seconds after SIGKILL until a process counts as stuck in the kernel."""


class _Rung(Enum):
    ASKED = "asked"
    SHOWING = "showing"
    KILLED = "killed"
    DONE = "done"


class Reaping:
    """The end of one process. The first signal goes out when this is made.

    Args:
        pid: the process.
        pidfd: a descriptor for it, which stays its owner's.
        number: the signal that its timer names.
        grace: seconds that any signal but SIGKILL leaves it.
        now: seconds on the monotonic clock.
    """

    def __init__(self, pid: int, pidfd: int, number: int, grace: float, now: float) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._grace = grace
        self._rung = _Rung.ASKED
        self._until = now + grace
        if number == signal.SIGKILL:
            self._show(now)
        else:
            self._send(number)

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        return [] if self._rung is _Rung.DONE else [self._pidfd]

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the monotonic clock; infinite when done."""
        return math.inf if self._rung is _Rung.DONE else self._until

    def step(self, now: float) -> bool:
        """Do what is due. Returns whether there is nothing more to do."""
        if self._rung is _Rung.DONE:
            return True
        if ended(self._pidfd):
            self._rung = _Rung.DONE
        elif now >= self._until:
            self._climb(now)
        return self._rung is _Rung.DONE

    def _climb(self, now: float) -> None:
        if self._rung is _Rung.ASKED:
            log.warning("Process %d did not end within %.0f s; sending SIGKILL", self.pid, self._grace)
            self._show(now)
        elif self._rung is _Rung.SHOWING:
            self._kill(now)
        else:
            log.error("Process %d does not end even on SIGKILL; it may be stuck in the kernel", self.pid)
            self._rung = _Rung.DONE

    def _show(self, now: float) -> None:
        if not catches(self.pid, signal.SIGABRT):
            self._kill(now)
            return
        self._rung, self._until = _Rung.SHOWING, now + SHOW_TIME
        self._send(signal.SIGABRT)

    def _kill(self, now: float) -> None:
        self._rung, self._until = _Rung.KILLED, now + PATIENCE
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, number)


def ended(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
