"""The escalation by which workers end (contract section 5.6).

    SIGNALLED  the signal has gone to each worker itself, not to what it has started: a data loader that gets SIGTERM
               too takes away what its trainer needs to save. For the grace period
    STACKS     who did not end and catches SIGABRT (Python's faulthandler does) has been sent it, so that the stacks of
               all its threads are in its standard error. `STACKS_TIMEOUT` seconds
    KILLED SIGKILL has been sent to the workers that were left. `KILL_TIMEOUT` seconds
    SWEEPING   no worker is left: whatever they have spawned, in whatever session, is sent SIGTERM, and after
               `SWEEP_GRACE_PERIOD` seconds SIGKILL
    DONE       nothing is left, or what is left does not end even on SIGKILL

Laws:

1. Nothing here blocks: a loop waits on `fds` until `wake_at` and calls `step`.
2. SWEEPING is never left out. It begins with SIGTERM, unless there is no time, and takes none where nothing is left.
3. Whatever happens to the sweep, the workers are sent SIGKILL.
4. What was given up once costs no later stop its grace period, and no sweep goes on that was given up.
5. A worker that is found to be writing a file is not interrupted: a signal that would end it at once waits until it is
   done, and so does SIGKILL after another signal; but for `limit` seconds at most. The others are signalled without
   delay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from signal import SIGABRT, SIGKILL

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import TYPE_CHECKING, Protocol
from rallypoint.base.log import get_logger
from rallypoint.base.poll import until_readable
from rallypoint.base.procfs import catches, is_ended_by
from rallypoint.base.signals import signal_name

if TYPE_CHECKING:
    from rallypoint.workers.open_writes import WriteDetector

log = get_logger(__name__)

STACKS_TIMEOUT = 1.0
"""Seconds in which a worker that was sent SIGABRT may write its stacks."""
KILL_TIMEOUT = 1.0
"""Seconds in which a worker that was sent SIGKILL ends, before the sweep begins without waiting for it."""
SWEEP_GRACE_PERIOD = 1.0
"""Seconds between SIGTERM and SIGKILL for the processes that a worker has left."""
_POLL_INTERVAL = 0.05
"""Seconds between checks of a worker that may be writing, or that a debugger holds: nothing wakes us for these."""
_WARN_AFTER = 2.0
"""Seconds until the workers are logged that have not ended yet; each interval is twice the one before."""


class StopInProgress(Protocol):
    """A stop in progress, driven to its end by a loop that waits for other things too. Nothing here blocks."""

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the monotonic clock; infinite for never."""

    def step(self) -> bool:
        """Do what is due. Returns whether all workers, and whatever they have spawned, are gone."""

    def kill_now(self) -> None:
        """Give no more time: SIGKILL to all that is left."""


class StoppableProcess(Protocol):
    """The part of a worker that the escalation needs."""

    pid: int
    held_by_debugger: bool
    """Whether it has ended but a debugger still holds it: its descriptor is readable, and it counts as running."""
    signalled: bool
    """Whether it was sent a signal to end while it ran."""

    def fileno(self) -> int:
        """Becomes readable when the worker has ended."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def signal(self, number: int) -> None:
        """Send a signal to it alone."""


class SweepInProgress(Protocol):
    """Ends all workers and all that they have left."""

    @property
    def cannot_find_all(self) -> bool:
        """Whether it can no longer find all, so that there is no time to lose."""

    def begin(self, seconds: float) -> None:
        """Begin to end all, in place of any sweep before: SIGTERM, and SIGKILL after this many seconds."""

    def fds(self) -> list[int]:
        """Readable when `cannot_find_all` or `done` may have changed; none if it is done."""

    def done(self) -> bool:
        """Whether nothing is left of what could be found."""

    def give_up(self) -> list[int]:
        """Stop waiting for what is left, now and in later sweeps. Returns its pids, for a message."""


class NoSweep:
    """Ends nothing: nothing was started, or it is ended elsewhere."""

    cannot_find_all = False

    def begin(self, seconds: float) -> None: ...

    def fds(self) -> list[int]:
        return []

    def done(self) -> bool:
        return True

    def give_up(self) -> list[int]:
        return []


class _Stage(Enum):
    SIGNALLED = "signalled"
    STACKS = "stacks"
    KILLED = "killed"
    SWEEPING = "sweeping"
    DONE = "done"


_STAGES_OF_WORKERS = (_Stage.SIGNALLED, _Stage.STACKS, _Stage.KILLED)


class Escalation:
    """One stop of some workers. The signal goes out when this is made, but to those that law 5 spares.

    Args:
        processes: some of which may have ended already.
        sweep: ends all that they have left.
        death_sig: the first signal.
        grace: seconds between it and the next stage.
        limit: seconds for which a worker that is writing a file is spared, at least `grace`; also, but one at least,
            between SIGKILL and giving up.
        clock: of `wake_at`.
        sent: whether the signal is sent to the processes from elsewhere.
        finish: called once nothing is left.
    """

    def __init__(
        self,
        processes: Sequence[StoppableProcess],
        sweep: SweepInProgress,
        death_sig: int,
        grace: float,
        limit: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
        *,
        sent: bool = False,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._finish = finish
        self._finished = False
        self._running = [each for each in processes if each.poll() is None]
        self._sweep = sweep
        self._death_sig = death_sig
        self._limit = max(limit, grace)
        self._clock = clock
        self._stage = _Stage.SIGNALLED
        self._began = began = clock.monotonic()
        self._until = began + grace
        self._deferred_until = began + self._limit
        self._writing: dict[StoppableProcess, WriteDetector] = {}
        self._deferred: list[StoppableProcess] = []
        """Those that have not been sent the signal yet, because they are writing."""
        self._logged: list[StoppableProcess] = []
        """Those that were logged as writing."""
        self._warn_at, self._warn_every = began + _WARN_AFTER, _WARN_AFTER
        self._terminates_rest = False
        """Whether the sweep sends SIGTERM before it kills."""
        self.stuck: list[StoppableProcess] = []
        """When done: those that even SIGKILL has not ended."""
        for each in self._running:
            if sent:
                each.signalled = True
            else:
                self._signal_or_defer(each)
        if death_sig == SIGKILL:
            self._kill()
        elif not self._running:
            self._start_sweep(SWEEP_GRACE_PERIOD)

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        if self._stage is _Stage.DONE:
            return []
        return [*(each.fileno() for each in self._running if not each.held_by_debugger), *self._sweep.fds()]

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the clock; infinite when done."""
        if self._stage is _Stage.DONE:
            return math.inf if self._finished else 0.0
        if self._stage is _Stage.SWEEPING and not self._running and not self._sweep.fds():
            return 0.0
        signalled = self._stage is _Stage.SIGNALLED
        times = [self._until, *([self._warn_at] if signalled else [])]
        if (signalled and self._deferred) or any(each.held_by_debugger for each in self._running):
            times.append(self._clock.monotonic() + _POLL_INTERVAL)
        return min(times)

    def step(self) -> bool:
        """Do what is due. Returns whether the stop is done."""
        self._running = [each for each in self._running if each.poll() is None]
        if self._stage in _STAGES_OF_WORKERS:
            if not self._running:
                self._start_sweep(SWEEP_GRACE_PERIOD)
            elif self._sweep.cannot_find_all:
                self._kill()
        now = self._clock.monotonic()
        if self._stage is _Stage.SIGNALLED:
            self._wait(now)
        elif self._stage is _Stage.STACKS and now >= self._until:
            self._kill_workers()
        elif self._stage is _Stage.KILLED and now >= self._until:
            self._start_sweep(0.0)
        if self._stage is _Stage.SWEEPING:
            if self._sweep.done() and not self._running:
                self._stage = _Stage.DONE
            elif self._clock.monotonic() >= self._until:
                self._give_up()
        if self._stage is _Stage.DONE and not self._finished:
            self._finish()
            self._finished = True
        return self._finished

    def shorten(self, until: float) -> None:
        """The grace period, also of one that writes a file, ends at this moment on the clock, if not earlier."""
        self._deferred_until = min(self._deferred_until, until)
        if self._stage is _Stage.SIGNALLED:
            self._until = min(self._until, until)

    def kill_now(self) -> None:
        """Give no more time: SIGKILL to all that is left."""
        if self._stage in _STAGES_OF_WORKERS or (self._stage is _Stage.SWEEPING and self._terminates_rest):
            self._kill()

    # The signal

    def _signal_or_defer(self, process: StoppableProcess) -> None:
        if self._death_sig != SIGKILL and self._is_writing(process) and is_ended_by(process.pid, self._death_sig):
            self._deferred.append(process)
        else:
            self._signal(process)

    def _signal(self, process: StoppableProcess) -> None:
        log.warning("Sending process %d closing signal %s", process.pid, signal_name(self._death_sig))
        if self._death_sig != SIGKILL:
            process.signal(self._death_sig)

    def _wait(self, now: float) -> None:
        """The grace period."""
        self._deferred = [each for each in self._deferred if each in self._running]
        for each in list(self._deferred):
            if not self._is_deferred(each, now):
                self._deferred.remove(each)
                self._signal(each)
                self._until = max(self._until, now + KILL_TIMEOUT)
        if now >= self._until and not self._deferred:
            if any(self._is_deferred(each, now) for each in self._running):
                self._until = now + _POLL_INTERVAL
            else:
                self._request_stacks()
        if now >= self._warn_at:
            self._log_remaining(now)

    def _is_deferred(self, process: StoppableProcess, now: float) -> bool:
        """Whether this one must not be interrupted yet; logged once, when it is certain."""
        left = self._deferred_until - now
        if left <= 0 or not self._is_writing(process):
            return False
        if self._writing[process].certain and process not in self._logged:
            self._logged.append(process)
            what = self._writing[process].what
            log.warning(
                "worker %d is writing %s; it is stopped when that is done, or in %.0f s", process.pid, what, left
            )
        return True

    def _is_writing(self, process: StoppableProcess) -> bool:
        from rallypoint.workers.open_writes import WriteDetector

        return self._writing.setdefault(process, WriteDetector(process.pid, self._clock)).check()

    def _log_remaining(self, now: float) -> None:
        self._warn_every *= 2
        self._warn_at = now + self._warn_every
        left = self._until - now  # to the next stage, or to the next check of one that writes
        for each in self._running:
            if each not in self._deferred and left >= 1:
                log.warning("worker %d has not ended, SIGKILL in %.0f s", each.pid, left)

    # Ending

    def _request_stacks(self) -> None:
        seconds = self._clock.monotonic() - self._began
        for each in self._running:
            log.warning("Process %d did not end within %.0f s; sending SIGKILL", each.pid, seconds)
        able = [each for each in self._running if catches(each.pid, SIGABRT)]
        if not able:
            self._kill_workers()
            return
        self._stage = _Stage.STACKS
        self._until = self._clock.monotonic() + STACKS_TIMEOUT
        for each in able:
            each.signal(SIGABRT)

    def _kill_workers(self) -> None:
        """Send SIGKILL to those that did not end. What they have started is swept when they are gone."""
        self._until = self._clock.monotonic() + KILL_TIMEOUT
        for each in self._running:
            each.signal(SIGKILL)
        self._stage = _Stage.KILLED

    def _kill(self) -> None:
        """Send SIGKILL to all at once: to workers last, since what a dead worker has left is harder to find."""
        try:
            self._start_sweep(0.0)
        finally:
            for each in self._running:
                each.signal(SIGKILL)

    def _start_sweep(self, seconds: float) -> None:
        # The stage last, so that an exception in here lets the next call begin again.
        self._until = self._clock.monotonic() + seconds + max(self._limit, 1.0)
        self._sweep.begin(seconds)
        self._stage, self._terminates_rest = _Stage.SWEEPING, seconds > 0

    def _give_up(self) -> None:
        self._stage = _Stage.DONE
        self.stuck = self._running
        for pid in sorted({each.pid for each in self._running} | set(self._sweep.give_up())):
            log.error("Process %d does not end even on SIGKILL; it may be stuck in the kernel", pid)


def run_to_end(stopping: StopInProgress, clock: Clock = SYSTEM_CLOCK) -> None:
    """Drive a stop to its end, where there is nothing else to wait for."""
    while not stopping.step():
        until_readable(stopping.fds(), stopping.wake_at() - clock.monotonic())
