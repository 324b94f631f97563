"""The stop of a round after which some workers go on in their processes.

    RELEASING workers that can go on were told to leave the round, and have `timeout` seconds to leave their function;
    all others are ended meanwhile, by an `Escalation` of their own. Those that have not left in time are ended too:
    stacks, SIGKILL SWEEPING no worker is in the old round any more: what the ended ones have left is ended, as by any
    other stop DONE

Laws:

1. Nothing here blocks: see `StopInProgress`.
2. It waits for those that were told to leave no longer than `timeout`, and for their stacks; for one that is writing a
   file as long as any stop does, `limit` seconds. It does not wait once `kill_now` was called, after which no worker
   goes on.
3. Workers that go on are spared, with all that they have started: see `reaper.process_tree`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from signal import SIGABRT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger
from rallypoint.base.procfs import catches
from rallypoint.workers.escalation import (
    STACKS_TIMEOUT,
    Escalation,
    NoSweep,
    StopInProgress,
    StoppableProcess,
    SweepInProgress,
)
from rallypoint.workers.resumable import POLL, LeavingWorkers

if TYPE_CHECKING:
    from rallypoint.workers.open_writes import WriteDetector

log = get_logger(__name__)


class Release:
    """One such stop; the workers have been told already.

    Args:
        leaving: the workers that were told to leave.
        processes: of all workers, by local rank; some may have ended already.
        others: ends those that were not told, and sweeps nothing.
        sweep: makes the sweep that ends all that workers have left, except those with the given local ranks, which go
            on.
        timeout: seconds within which those that were told have to leave.
        limit: seconds for which a worker that is writing a file is spared, if that is more than `timeout`; also, but at
            least one, between SIGKILL and giving up.
        finish: called once with the local ranks of those that go on.
        clock: of `wake_at`.
    """

    def __init__(
        self,
        leaving: LeavingWorkers,
        processes: Mapping[int, StoppableProcess],
        others: StopInProgress,
        sweep: Callable[[Sequence[int]], SweepInProgress],
        timeout: float,
        limit: float,
        finish: Callable[[Sequence[int]], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._leaving = leaving
        self._waiting = {rank: processes[rank] for rank in sorted(leaving.told)}
        """Workers that were told to leave, and have neither left nor ended."""
        self._left: dict[int, StoppableProcess] = {}
        self._stops: list[StopInProgress] = [others]
        self._make_sweep = sweep
        self._sweep: Escalation | None = None
        self._limit = limit
        self._timeout = timeout
        self._until = clock.monotonic() + timeout
        self._deferred_until = clock.monotonic() + limit
        self._writing: dict[int, WriteDetector] = {}
        """Detectors for late workers, which may be writing."""
        self._late: list[tuple[float, Escalation]] = []
        """End those that have not left in time, at these times: after they have written their stacks."""
        self._finish = finish
        self._finished = False
        self._clock = clock

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        stops = self._stops if self._sweep is None else [self._sweep]
        fds = [fd for each in stops for fd in each.fds()]
        if self._waiting:
            running = (each.fileno() for each in self._waiting.values() if not each.held_by_debugger)
            fds += [*self._leaving.fds(), *running]
        return fds

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the clock; infinite when done."""
        if self._finished:
            return math.inf
        if self._sweep is not None:
            return self._sweep.wake_at()
        times = [*(kill_at for kill_at, _ in self._late), *(each.wake_at() for each in self._stops)]
        if self._waiting:
            times.append(self._until)
            if self._leaving.must_be_polled or any(each.held_by_debugger for each in self._waiting.values()):
                times.append(self._clock.monotonic() + POLL)
        return min(times, default=0.0) if self._stops or self._waiting else 0.0

    def step(self) -> bool:
        """Do what is due. Returns whether neither a worker nor anything it has left is in the old round any more."""
        if self._finished:
            return True
        if self._waiting:
            self._look()
        now = self._clock.monotonic()
        if self._waiting and now >= self._until:
            self._end_late(now)
        for kill_at, late in self._late:
            if now >= kill_at:
                late.kill_now()
        self._late = [entry for entry in self._late if now < entry[0]]
        self._stops = [each for each in self._stops if not each.step()]
        if self._sweep is None and not self._stops and not self._waiting:
            self._leaving.close()
            spared = sorted(rank for rank, each in self._left.items() if each.poll() is None)
            self._sweep = Escalation([], self._make_sweep(spared), SIGTERM, 0.0, self._limit, self._clock)
        if self._sweep is not None and self._sweep.step():
            self._finished = True
            self._finish(sorted(rank for rank, each in self._left.items() if each.poll() is None))
        return self._finished

    def shorten(self, until: float) -> None:
        """Give workers no longer than until this moment on the clock to leave, and others to end."""
        self._until, self._deferred_until = min(self._until, until), min(self._deferred_until, until)
        for each in self._stops:
            if isinstance(each, Escalation):
                each.shorten(until)

    def keep_nobody(self, number: int, grace: float) -> None:
        """Let no worker go on: all are stopped by this signal, with so many seconds after it."""
        if self._finished:
            return
        told = [*self._waiting.values(), *self._left.values()]
        self._waiting, self._left = {}, {}
        self._leaving.close()
        self._stops.append(Escalation(told, NoSweep(), number, grace, self._limit, self._clock))
        self._sweep = None  # what they leave must be ended too

    def kill_now(self) -> None:
        """Give no more time, and let no worker go on: SIGKILL to all that is left."""
        if self._finished:
            return
        for each in (*self._waiting.values(), *self._left.values()):
            each.signal(SIGKILL)
        killed = [*self._waiting.values(), *self._left.values()]
        self._waiting, self._left = {}, {}
        for stop in self._stops:
            stop.kill_now()
        self._late = []
        self._leaving.close()
        self._sweep = Escalation(killed, self._make_sweep(()), SIGKILL, 0.0, self._limit, self._clock)

    def close(self) -> None:
        """Give up the stop: all are ended from elsewhere."""
        self._leaving.close()

    def _look(self) -> None:
        left = self._leaving.left()
        for rank, process in list(self._waiting.items()):
            if process.poll() is not None:
                del self._waiting[rank]
            elif rank in left:
                self._left[rank] = self._waiting.pop(rank)

    def _is_writing(self, rank: int, pid: int) -> bool:
        from rallypoint.workers.open_writes import WriteDetector

        detector = self._writing.setdefault(rank, WriteDetector(pid, self._clock))
        was_certain = detector.certain
        writes = detector.check()
        if detector.certain and not was_certain:
            left = self._deferred_until - self._clock.monotonic()
            log.warning("worker %d is writing %s; it has %.0f s more to come out", pid, detector.what, left)
        return writes

    def _end_late(self, now: float) -> None:
        """End those that have not left in time, and are not writing a file."""
        late, self._waiting = self._waiting, {}
        if now < self._deferred_until:
            self._waiting = {rank: each for rank, each in late.items() if self._is_writing(rank, each.pid)}
            late = {rank: each for rank, each in late.items() if rank not in self._waiting}
            self._until = now + POLL
        for rank, process in late.items():
            log.warning(
                "worker %d (local rank %d) has not come out of its function within %g s: it is ended and started anew",
                *(process.pid, rank, self._timeout),
            )
        able = [each for each in late.values() if catches(each.pid, SIGABRT)]
        others = [each for each in late.values() if each not in able]
        if others:
            self._stops.append(Escalation(others, NoSweep(), SIGKILL, 0.0, self._limit, self._clock))
        if able:
            stop = Escalation(able, NoSweep(), SIGABRT, 2 * STACKS_TIMEOUT, self._limit, self._clock)
            self._stops.append(stop)
            self._late.append((now + STACKS_TIMEOUT, stop))
