"""The stop ladder: ask, give time, show the stacks, then end all that is left (contract section 5.6).

    ASKED     the signal has gone to each worker itself, not to what it has started: a data loader that hears SIGTERM
              too takes away what its trainer needs to save. `grace` seconds
    SHOWING   who did not end and catches SIGABRT (Python's faulthandler does) has been sent it, so that the stacks of
              all its threads are in its standard error. `SHOW_TIME` seconds
    KILLED    SIGKILL to all that is left: workers, and whatever they have spawned, wherever it went
    DONE      nothing is left, or what is left does not end even on SIGKILL

Laws:

1. Nothing here blocks: a loop waits on `fds` until `wake_at` and calls `step`.
2. KILLED is never left out: what lingers after its worker's end is killed as soon as all workers have ended, without a
   grace of its own.
3. Whatever the sweep comes to, the workers are sent SIGKILL.
4. What was given up once costs no later stop its grace, and no sweep goes on that was given up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from signal import SIGABRT, SIGKILL
from typing import Protocol

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger
from rallypoint.base.procfs import catches
from rallypoint.base.signals import signal_name
from rallypoint.base.waiting import until_readable

log = get_logger(__name__)

SHOW_TIME = 1.0
"""Seconds in which a worker that was sent SIGABRT may write its stacks."""
_HELD = 0.1
"""Seconds between looks at a worker that has ended and is held by a debugger: nothing tells when that lets go."""


class Stopping(Protocol):
    """A stop that was begun, driven to its end by whoever waits for other things too. Nothing here blocks."""

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        ...

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the monotonic clock; infinite for never."""
        ...

    def step(self) -> bool:
        """Do what is due. Returns whether all workers, and whatever they have spawned, are gone."""
        ...

    def hurry(self) -> None:
        """Give no more time: SIGKILL to all that is left."""
        ...


class Stoppable(Protocol):
    """What the ladder needs of a worker."""

    pid: int
    held: bool
    """Whether it has ended and a debugger holds it still: its descriptor is readable, and it counts as running."""

    def fileno(self) -> int:
        """Becomes readable when the worker has ended."""
        ...

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to it alone."""
        ...


class Sweeping(Protocol):
    """What ends all that workers are and have left."""

    @property
    def helpless(self) -> bool:
        """Whether it can no longer find all, so that there is no time to lose."""
        ...

    def begin(self) -> None:
        """Begin to kill."""
        ...

    def fds(self) -> list[int]:
        """Descriptors that become readable when `helpless` or `done` may have changed."""
        ...

    @property
    def heard(self) -> bool:
        """Whether it is known already that it is done, so that no descriptor will tell of it any more."""
        ...

    def done(self) -> bool:
        """Whether nothing is left of what could be found."""
        ...

    def give_up(self) -> list[int]:
        """Wait no longer for what is left, now or in a later sweep. Returns its pids, for a message."""
        ...


class _Rung(Enum):
    ASKED = "asked"
    SHOWING = "showing"
    KILLED = "killed"
    DONE = "done"


class Ladder:
    """One stop of some workers. The signal goes out when the ladder is made.

    Args:
        processes: some of which may have ended already.
        sweep: what ends all that they have left.
        death_sig: the signal that asks.
        grace: seconds between asking and the next rung; also, but one at least, between SIGKILL and giving up.
        clock: on which `wake_at` tells the time.
    """

    def __init__(
        self,
        processes: Sequence[Stoppable],
        sweep: Sweeping,
        death_sig: int,
        grace: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._running = [each for each in processes if each.poll() is None]
        self._sweep = sweep
        self._grace = grace
        self._clock = clock
        self._rung = _Rung.ASKED
        self._until = clock.monotonic() + grace
        self.stuck: list[Stoppable] = []
        """When done: those that even SIGKILL has not ended."""
        for each in self._running:
            log.warning("Sending process %d closing signal %s", each.pid, signal_name(death_sig))
            if death_sig != SIGKILL:
                each.signal(death_sig)
        if death_sig == SIGKILL or not self._running:
            self._kill()

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        if self._rung is _Rung.DONE:
            return []
        return [*(each.fileno() for each in self._running if not each.held), *self._sweep.fds()]

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the clock; infinite when done."""
        if self._rung is _Rung.KILLED and self._sweep.heard and not self._running:
            return 0.0
        if self._rung is _Rung.DONE:
            return math.inf
        if any(each.held for each in self._running):
            return min(self._until, self._clock.monotonic() + _HELD)
        return self._until

    def step(self) -> bool:
        """Do what is due. Returns whether the stop is done."""
        self._running = [each for each in self._running if each.poll() is None]
        late = self._clock.monotonic() >= self._until
        if self._rung in (_Rung.ASKED, _Rung.SHOWING) and (not self._running or self._sweep.helpless):
            self._kill()
        elif self._rung is _Rung.ASKED and late:
            self._show()
        elif self._rung is _Rung.SHOWING and late:
            self._kill()
        if self._rung is _Rung.KILLED:
            if self._sweep.done() and not self._running:
                self._rung = _Rung.DONE
            elif self._clock.monotonic() >= self._until:
                self._give_up()
        return self._rung is _Rung.DONE

    def hurry(self) -> None:
        """Give no more time: SIGKILL to all that is left."""
        if self._rung in (_Rung.ASKED, _Rung.SHOWING):
            self._kill()

    def _show(self) -> None:
        for each in self._running:
            log.warning("Process %d did not end within %.0f s; sending SIGKILL", each.pid, self._grace)
        able = [each for each in self._running if catches(each.pid, SIGABRT)]
        if not able:
            self._kill()
            return
        self._rung = _Rung.SHOWING
        self._until = self._clock.monotonic() + SHOW_TIME
        for each in able:
            each.signal(SIGABRT)

    def _kill(self) -> None:
        # The workers after the rest: what a dead worker has left is harder to find. The rung last, so that whoever
        # is cut short in here can begin again.
        self._until = self._clock.monotonic() + max(self._grace, 1.0)
        try:
            self._sweep.begin()
        finally:
            for each in self._running:
                each.signal(SIGKILL)
        self._rung = _Rung.KILLED

    def _give_up(self) -> None:
        self._rung = _Rung.DONE
        self.stuck = self._running
        for pid in sorted({each.pid for each in self._running} | set(self._sweep.give_up())):
            log.error("Process %d does not end even on SIGKILL; it may be stuck in the kernel", pid)


def drive(stopping: Stopping, clock: Clock = SYSTEM_CLOCK) -> None:
    """See a stop through to its end, where there is nothing else to wait for."""
    while not stopping.step():
        until_readable(stopping.fds(), stopping.wake_at() - clock.monotonic())
