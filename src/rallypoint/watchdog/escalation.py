"""One process whose timer ran out, on its way to its end.

    ASKED     it has been sent the signal that it named itself, if that is not SIGKILL. `grace` seconds
    SHOWING   it catches SIGABRT (Python's faulthandler does) and has been sent it, so that the stacks of all its
              threads are in its standard error. `STACKS_TIMEOUT` seconds
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

STACKS_TIMEOUT = 1.0
"""Seconds in which a process that was sent SIGABRT may write its stacks."""
KILL_TIMEOUT = 10.0
"""Seconds after SIGKILL until a process counts as stuck in the kernel."""


class _TimerStage(Enum):
    SIGNALLED = "asked"
    STACKS = "showing"
    KILLED = "killed"
    DONE = "done"


class TimerEscalation:
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
        self._grace_period = grace
        self._stage = _TimerStage.SIGNALLED
        self._until = now + grace
        if number == signal.SIGKILL:
            self._request_stacks(now)
        else:
            self._send(number)

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        return [] if self._stage is _TimerStage.DONE else [self._pidfd]

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the monotonic clock; infinite when done."""
        return math.inf if self._stage is _TimerStage.DONE else self._until

    def step(self, now: float) -> bool:
        """Do what is due. Returns whether there is nothing more to do."""
        if self._stage is _TimerStage.DONE:
            return True
        if has_ended(self._pidfd):
            self._stage = _TimerStage.DONE
        elif now >= self._until:
            self._next_stage(now)
        return self._stage is _TimerStage.DONE

    def _next_stage(self, now: float) -> None:
        if self._stage is _TimerStage.SIGNALLED:
            log.warning("Process %d did not end within %.0f s; sending SIGKILL", self.pid, self._grace_period)
            self._request_stacks(now)
        elif self._stage is _TimerStage.STACKS:
            self._kill(now)
        else:
            log.error("Process %d does not end even on SIGKILL; it may be stuck in the kernel", self.pid)
            self._stage = _TimerStage.DONE

    def _request_stacks(self, now: float) -> None:
        if not catches(self.pid, signal.SIGABRT):
            self._kill(now)
            return
        self._stage, self._until = _TimerStage.STACKS, now + STACKS_TIMEOUT
        self._send(signal.SIGABRT)

    def _kill(self, now: float) -> None:
        self._stage, self._until = _TimerStage.KILLED, now + KILL_TIMEOUT
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, number)


def has_ended(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
