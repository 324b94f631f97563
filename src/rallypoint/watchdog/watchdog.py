"""The file timer's server: requests come in through a named pipe, and a process whose timer expires is ended.

Laws:

1. Nothing here blocks and nothing has a thread: a loop waits on `fds` until `wake_at` and calls `step`.
2. A step reads all that was in the pipe when it began before it expires any timer: a release that was written in time
   counts, however late the loop comes.
3. A process that is being ended is reported once, and its requests are ignored.
4. What a client writes costs a bounded number of log lines and no more.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from signal import SIGABRT, SIGKILL
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import user_error
from rallypoint.base.kernel import set_pipe_size
from rallypoint.base.log import get_logger
from rallypoint.base.procfs import catches
from rallypoint.base.signals import signal_name
from rallypoint.watchdog.clients import TimerClients
from rallypoint.watchdog.requests import FileTimerRequest, RequestReader
from rallypoint.watchdog.table import Timer, TimerTable
from rallypoint.workers.stop import STACKS_TIMEOUT, NoSweep, Stop

log = get_logger(__name__)

STARTED, STOPPED, EXPIRED, KILLED = "watchdog started", "watchdog stopped", "timer expired", "kill worker process"
"""The names of what the watchdog reports (contract section 5.11)."""

_MAX_WARNINGS = 10
_PIPE_SIZE = 256 * 1024
"""Bytes that may wait while the agent is busy; what does not fit is an error in the client."""

Report = Callable[[str, FileTimerRequest | None], None]


class TimerExpiry(NamedTuple):
    """A timer of a process has expired, `seconds` after its request was read.

    `signal` is what the process is sent; 0 if the expiry is only reported.
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
    """The server of one pipe.

    Args:
        path: of the pipe; a file of that name is replaced.
        may_kill: whether the process of a pid belongs to this job; asked once for each, while it runs.
        run_id: of the job, for the log.
        grace: seconds from a signal other than SIGKILL to SIGKILL.
        report: called with one of the names above, and the timer if there is one.
        clock: the clock of `wake_at`.
        wall: returns epoch seconds, by which clients set timers.

    Raises:
        UserError: the pipe cannot be made; says why.
    """

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
        self.path = path
        self._fifo = _NamedPipe(path)
        self._timers: TimerTable[FileTimerRequest] = TimerTable()
        self._stops: dict[int, Stop] = {}
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

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        if self._fifo.fd < 0:
            return []
        return [self._fifo.fd, *(fd for each in self._stops.values() for fd in each.fds())]

    def wake_at(self) -> float:
        """When there is something to do by itself, in seconds on the clock; infinite for never."""
        due = self._timers.due if self._enforcing else math.inf
        return min([due, *(each.wake_at() for each in self._stops.values())])

    def step(self) -> list[TimerExpiry]:
        """Do what is due. Returns the timers that have expired, each once, the first of each process first."""
        if self._fifo.fd < 0:
            return []
        self._stops = {pid: each for pid, each in self._stops.items() if not each.step()}
        now = self._clock.monotonic()
        self._read_requests()
        if not self._enforcing or now < self._timers.due:
            return []
        return [each for pid, timers in self._timers.expired(now).items() for each in self._expire(pid, timers)]

    def stop_enforcing(self) -> None:
        """The workers are being stopped: from now on requests are read and no timer expires."""
        self._enforcing = False

    def close(self) -> None:
        """Remove the pipe and release everything. Idempotent."""
        if self._fifo.fd < 0:
            return
        self._fifo.close()
        self._clients.close()
        self._stops.clear()
        self._enforcing = False
        self._report_event(STOPPED)

    # Inside

    def _read_requests(self) -> None:
        requests, complaints = self._requests.feed(self._fifo.read())
        now, wall = self._clock.monotonic(), self._wall()
        for request in requests:
            self.client_seen = True
            pid = request.worker_pid
            enforced = request.expiration_time < 0 or (pid not in self._stops and self._clients.admit(pid))
            if enforced and not self._timers.register(request, now, wall):
                complaints.append(f"too many timers; {request.scope_id[:80]!r} is not enforced")
        for complaint in complaints[: max(0, _MAX_WARNINGS - self._warnings)]:
            log.warning("the watchdog's pipe: %s", complaint)
        self._warnings += len(complaints)

    def _report_event(self, name: str, request: FileTimerRequest | None = None) -> None:
        if self._report is not None:
            try:
                self._report(name, request)
            except Exception:  # whatever a user's handler does, timers are enforced
                log.exception("the watchdog's %r could not be reported", name)

    def _is_needed(self, pid: int) -> bool:
        return pid in self._stops or self._timers.has_timer(pid)

    def _on_gone(self, pid: int) -> None:
        self._timers.drop_worker(pid)
        self._stops.pop(pid, None)

    def _expire(self, pid: int, timers: list[Timer[FileTimerRequest]]) -> list[TimerExpiry]:
        process = self._clients.running(pid)
        if process is None:
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
        number, grace = deadly.request.signal, self._grace_period
        log.error("Reaping worker_pid=[%d] by %s: %s", pid, signal_name(number), _expiry(deadly).why)
        if number == SIGKILL and catches(pid, SIGABRT):  # faulthandler does, and shows the stacks of all threads
            number, grace = SIGABRT, STACKS_TIMEOUT
        self._stops[pid] = Stop({pid: process}, NoSweep(), number, grace, clock=self._clock)
        self._timers.drop_worker(pid)
        self._report_event(KILLED, deadly.request)
        return [_expiry(deadly), *(_expiry(each) for each in timers if each is not deadly)]


def _expiry(timer: Timer[FileTimerRequest]) -> TimerExpiry:
    request = timer.request
    seconds = max(0.0, timer.seconds)  # a request may have been read when its time was over
    return TimerExpiry(request.worker_pid, request.scope_id, seconds, request.signal)


class _NamedPipe:
    """A named pipe that is made, read without blocking, and removed.

    It is held open for writing too, so that it neither ends nor turns readable when a client has closed its end.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.mkfifo(path, 0o600)
            self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            why = error.strerror or str(error)
            raise user_error(
                f"the pipe {path!r} of the watchdog cannot be made: {why}; name another place", error
            ) from None
        self._size = set_pipe_size(self.fd, _PIPE_SIZE)
        made = os.fstat(self.fd)
        self._identity = made.st_dev, made.st_ino

    def read(self) -> bytes:
        """All that was in the pipe at the call, and not much more, however fast a client writes."""
        parts, left = [], self._size
        with contextlib.suppress(BlockingIOError):
            while left > 0:
                parts.append(os.read(self.fd, left))
                left -= len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """Remove the pipe, unless another has taken its place, and close the descriptor. Call it once."""
        fd, self.fd = self.fd, -1
        os.close(fd)
        with contextlib.suppress(OSError):
            now = os.stat(self._path, follow_symlinks=False)
            if (now.st_dev, now.st_ino) == self._identity:
                os.unlink(self._path)
