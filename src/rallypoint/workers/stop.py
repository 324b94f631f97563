"""The stop ladder: ask all side by side, give them time, then end what is left (contract section 5.6)."""

from __future__ import annotations

import select
from collections.abc import Sequence
from signal import SIGKILL
from typing import Protocol

from rallypoint.base.clock import SYSTEM_CLOCK, Clock, Deadline
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name

log = get_logger(__name__)


class Stoppable(Protocol):
    """What the ladder needs of a process."""

    pid: int

    def fileno(self) -> int:
        """Becomes readable when the process has ended."""
        ...

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to it and its group."""
        ...


def stop_all(
    processes: Sequence[Stoppable], death_sig: int, timeout: float, clock: Clock = SYSTEM_CLOCK
) -> list[Stoppable]:
    """End the processes that still run, and wait until they have ended.

    Args:
        processes: some of which may have ended already.
        death_sig: the signal that asks.
        timeout: seconds between asking and SIGKILL, and again between SIGKILL and giving up.
        clock: on which to wait.

    Returns:
        Those that even SIGKILL has not ended in time (stuck in the kernel); normally none.
    """
    running = [each for each in processes if each.poll() is None]
    for each in running:
        log.warning("Sending process %d closing signal %s", each.pid, signal_name(death_sig))
        each.signal(death_sig)
    stubborn = _wait(running, Deadline.after(timeout, clock))
    for each in stubborn:
        if death_sig != SIGKILL:
            log.warning("Process %d did not end within %.0f s; sending SIGKILL", each.pid, timeout)
        each.signal(SIGKILL)
    stuck = _wait(stubborn, Deadline.after(max(timeout, 1.0), clock))
    for each in stuck:
        log.error("Process %d does not end even on SIGKILL; it may be stuck in the kernel", each.pid)
    return stuck


def _wait(processes: Sequence[Stoppable], deadline: Deadline) -> list[Stoppable]:
    """Those that still run when all have ended or the deadline has come."""
    running = {each.fileno(): each for each in processes if each.poll() is None}
    poller = select.poll()
    for fd in running:
        poller.register(fd, select.POLLIN)
    while running and not deadline.expired:
        poller.poll(deadline.remaining() * 1000 + 1)
        for fd, each in list(running.items()):
            if each.poll() is not None:
                poller.unregister(fd)
                del running[fd]
    return list(running.values())
