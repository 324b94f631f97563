"""The file timer as its server sees it: requests come in through a pipe, and whose timer runs out is ended.

Laws:

1. Nothing here blocks and nothing has a thread: a loop waits on `fds` until `wake_at` and calls `step`.
2. All that was in the pipe when a step began is taken in before that step judges anybody: a release that was written
   in time counts, however late the loop comes.
3. A process that is being ended is told of once, and heard no more.
4. What a client writes costs a log line at most, and a bounded number of those.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name
from rallypoint.watchdog.clients import TimerClients
from rallypoint.watchdog.escalation import TimerEscalation, has_ended
from rallypoint.watchdog.fifo import NamedPipe
from rallypoint.watchdog.requests import FileTimerRequest, RequestReader
from rallypoint.watchdog.table import Timer, TimerTable

log = get_logger(__name__)

STARTED, STOPPED, EXPIRED, KILLED = "watchdog started", "watchdog stopped", "timer expired", "kill worker process"
"""The names of what the watchdog tells of (contract section 5.11)."""

_MAX_WARNINGS = 10

Report = Callable[[str, FileTimerRequest | None], None]


class TimerExpiry(NamedTuple):
    """A timer of a process has run out.

    `signal` is what the process named to be sent; 0 if it only wants to be told of, and then nothing is done to it.
    `seconds` is how long the timer ran.
    """

    pid: int
    scope: str
    seconds: float
    signal: int

    @property
    def why(self) -> str:
        """The cause of an end in a few words."""
        return f"its timer {self.scope!r} of {self.seconds:.1f} s ran out"


class Watchdog:
    """The server of one pipe."""

    def __init__(
        self,
        path: str,
        may_kill: Callable[[int], bool],
        *,
        run_id: str = "",
        grace: float = 30.0,
        report: Report | None = None,
        clock: Clock = SYSTEM_CLOCK,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Make the pipe.

        Args:
            path: of the pipe.
            may_kill: whether the process of a pid is ours to kill; asked once for each, while it runs.
            run_id: of the job, for the log.
            grace: seconds that a signal which is not SIGKILL leaves a process.
            report: hears the names above, with the timer if there is one.
            clock: on which `wake_at` tells the time.
            wall: gives epoch seconds, as the clients' clocks do.

        Raises:
            UserError: the pipe cannot be made; says why.
        """
        self._fifo = NamedPipe(path)
        self._timers: TimerTable[FileTimerRequest] = TimerTable()
        self._escalations: dict[int, TimerEscalation] = {}
        self._clients = TimerClients(may_kill, self._is_needed, self._on_gone)
        self._run_id = run_id
        self._grace_period = grace
        self._report = report
        self._clock = clock
        self._wall = wall
        self._requests = RequestReader()
        self._warnings = 0
        self._enforcing = True
        self.client_seen = False
        """Whether any request has come."""
        self._report_event(STARTED)

    @property
    def path(self) -> str:
        """Of the pipe; workers find it in their environment."""
        return self._fifo.path

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        if self._fifo.fileno() < 0:
            return []
        return [self._fifo.fileno(), *(fd for each in self._escalations.values() for fd in each.fds())]

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the clock; infinite for never."""
        due = self._timers.due if self._enforcing else math.inf
        return min([due, *(each.wake_at() for each in self._escalations.values())])

    def step(self) -> list[TimerExpiry]:
        """Do what is due. Returns the timers that have run out, each once, the first of each process first."""
        if self._fifo.fileno() < 0:
            return []
        now = self._clock.monotonic()
        self._escalations = {pid: each for pid, each in self._escalations.items() if not each.step(now)}
        self._read_requests()
        return self._enforce(now) if self._enforcing else []

    def stop_enforcing(self) -> None:
        """The workers are being stopped: from now on requests are taken in and nobody is judged any more."""
        self._enforcing = False

    def close(self) -> None:
        """Remove the pipe and let go of everything. Idempotent."""
        if self._fifo.fileno() < 0:
            return
        self._fifo.close()
        self._clients.close()
        self._escalations.clear()
        self._enforcing = False
        self._report_event(STOPPED)

    # Inside

    def _read_requests(self) -> None:
        requests, complaints = self._requests.feed(self._fifo.read())
        now, wall = self._clock.monotonic(), self._wall()
        for request in requests:
            self.client_seen = True
            wanted = request.expiration_time < 0 or self._admitted(request.worker_pid)
            if wanted and not self._timers.register(request, now, wall):
                complaints.append(f"too many timers; {request.scope_id[:80]!r} is not enforced")
        for complaint in complaints[: max(0, _MAX_WARNINGS - self._warnings)]:
            log.warning("the watchdog's pipe: %s", complaint)
        self._warnings += len(complaints)

    def _report_event(self, name: str, request: FileTimerRequest | None = None) -> None:
        if self._report is not None:
            try:
                self._report(name, request)
            except Exception:  # whatever a user's handler does, workers that are late are ended
                log.exception("the watchdog's %r could not be reported", name)

    def _admitted(self, pid: int) -> bool:
        return pid not in self._escalations and self._clients.admit(pid)

    def _is_needed(self, pid: int) -> bool:
        return pid in self._escalations or self._timers.has_timer(pid)

    def _on_gone(self, pid: int) -> None:
        self._timers.drop_worker(pid)
        self._escalations.pop(pid, None)

    def _enforce(self, now: float) -> list[TimerExpiry]:
        if now < self._timers.due:
            return []
        expiries: list[TimerExpiry] = []
        for pid, timers in self._timers.expired(now).items():
            expiries += self._expire(pid, timers, now)
        return expiries

    def _expire(self, pid: int, timers: list[Timer[FileTimerRequest]], now: float) -> list[TimerExpiry]:
        pidfd = self._clients.pidfd(pid)
        if pidfd is None or has_ended(pidfd):
            self._timers.drop_worker(pid)
            return []
        scopes = [each.request.scope_id for each in timers]
        log.warning("Timers expired for run:[%s], process %d: %s", self._run_id, pid, scopes)
        for each in timers:
            self._report_event(EXPIRED, each.request)
        deadly = next((each for each in timers if each.request.signal > 0), None)
        if deadly is None:
            self._timers.drop(timers)
            return [_expiry(each) for each in timers]
        number = deadly.request.signal
        log.error("Reaping worker_pid=[%d] by %s: %s", pid, signal_name(number), _expiry(deadly).why)
        self._escalations[pid] = TimerEscalation(pid, pidfd, number, self._grace_period, now)
        self._timers.drop_worker(pid)
        self._report_event(KILLED, deadly.request)
        return [_expiry(deadly), *(_expiry(each) for each in timers if each is not deadly)]


def _expiry(timer: Timer[FileTimerRequest]) -> TimerExpiry:
    request = timer.request
    return TimerExpiry(request.worker_pid, request.scope_id, timer.seconds, request.signal)
