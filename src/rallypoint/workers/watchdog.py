"""Watches workers for more than their exits: timers that they set through a named pipe, and whether they are stuck in
the kernel (contract sections 5.11 and 5.12).

Laws:

1. Nothing here blocks or has a thread: a loop waits on `fds` until `wake_at` and calls `step`.
2. A step first reads everything that was in the pipe when it began, and only then expires timers. So a release written
   in time counts, however late the loop is.
3. A request's wall-clock time is converted to the monotonic clock once, when the request arrives. Later changes to the
   wall clock move no timer.
4. Only processes that `may_kill` permits are ended, each through its handle. The handle is opened before `may_kill` is
   called, so a reused pid cannot hit another process. A process that is being ended is reported once, and its requests
   are ignored.
5. A client's requests cause a limited number of log lines.
6. A worker is stuck if it stays in one uninterruptible sleep (state D) across polls. A process that reads from a slow
   disk is healthy, although most polls find it in state D. As in torch, the main thread is polled.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from signal import SIGABRT, SIGKILL
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import user_error
from rallypoint.base.kernel import set_pipe_size
from rallypoint.base.log import get_logger
from rallypoint.base.open_process import open_process
from rallypoint.base.process_table import read_stat
from rallypoint.base.procfs import has_signal_handler, read_text
from rallypoint.base.signals import signal_name
from rallypoint.workers.process import ChildProcess
from rallypoint.workers.reaper.client import ExitStatus
from rallypoint.workers.stop import STACKS_TIMEOUT, NoSweep, Stop
from rallypoint.workers.timers import FileTimerRequest, RequestReader

log = get_logger(__name__)

ENABLE_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
UNINTERRUPTIBLE_VARIABLE = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"

STARTED, STOPPED, EXPIRED, KILLED = "watchdog started", "watchdog stopped", "timer expired", "kill worker process"
"""Names of the watchdog's reports (contract section 5.11)."""

_MAX_WARNINGS = 10
_PIPE_SIZE = 256 * 1024
"""Bytes that may wait in the pipe while the agent is busy; a client that writes more gets an error."""
_MAX_DEPTH = 64
_MIN_POLLS = 4
"""Minimum number of polls that must see one sleep before it counts."""
_SHORTEST, _LONGEST = 0.05, 1.0
"""Seconds between polls."""

Report = Callable[[str, FileTimerRequest | None], None]


class WorkerMonitor:
    """Watches the workers of one start, from before they start until they end.

    Nothing is enforced before `watch` or after `stop_enforcing`. Requests are read until `close`, so that a worker that
    is being stopped still finds its pipe.

    Args:
        path: the watchdog's pipe; None for no watchdog.
        stuck_after: seconds in uninterruptible sleep that make a worker unhealthy; 0 or less to check nothing.
        run_id, grace, report, clock: see `Watchdog`.

    Raises:
        UserError: the pipe cannot be created; the message says why.
    """

    def __init__(
        self,
        path: str | None,
        stuck_after: float,
        *,
        run_id: str = "",
        grace: float = 30.0,
        report: Report | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._pids: Collection[int] = ()
        self._expiry_reasons: dict[int, str] = {}
        self._stuck: dict[int, StuckProcess] = {}
        self._stuck_watch = SleepMonitor(stuck_after) if stuck_after > 0 else None
        self._watchdog: Watchdog | None = None
        if path is not None:
            ours = lambda pid: is_descendant(pid, self._pids)  # noqa: E731
            self._watchdog = Watchdog(path, ours, run_id=run_id, grace=grace, report=report, clock=clock)

    @property
    def environment(self) -> dict[str, str]:
        return {} if self._watchdog is None else {FILE_VARIABLE: self._watchdog.path}

    @property
    def files(self) -> list[str]:
        """Files that `close` removes, and that the reaper must remove if this process is killed."""
        return [] if self._watchdog is None else [self._watchdog.path]

    def watch(self, pids: Collection[int]) -> None:
        self._pids = tuple(pids)

    def fds(self) -> list[int]:
        return [] if self._watchdog is None or not self._pids else self._watchdog.fds()

    def wake_at(self) -> float:
        if not self._pids:
            return math.inf
        watched = (self._watchdog, self._stuck_watch)
        return min([monitor.wake_at() for monitor in watched if monitor is not None], default=math.inf)

    def step(self) -> None:
        """Do what is due; see `expiry_reason` and `stuck` for the results."""
        if not self._pids:
            return
        if self._watchdog is not None:
            for expiry in self._watchdog.step():
                if expiry.signal > 0:
                    self._expiry_reasons.setdefault(expiry.pid, expiry.why)
        if self._stuck_watch is not None:
            for stuck in self._stuck_watch.step(self._clock.monotonic(), self._pids):
                self._stuck[stuck.pid] = stuck

    def expiry_reason(self, pid: int) -> str:
        """Say in a few words why the watchdog ended a process; empty if it did not."""
        return self._expiry_reasons.get(pid, "")

    @property
    def stuck(self) -> dict[int, StuckProcess]:
        """Workers found stuck in the kernel, by pid."""
        return dict(self._stuck)

    def stop_enforcing(self) -> None:
        """Enforce nothing from now on: the workers are being stopped."""
        self._stuck_watch = None
        if self._watchdog is not None:
            self._watchdog.stop_enforcing()

    def close(self) -> None:
        self.stop_enforcing()
        self._pids = ()
        if self._watchdog is not None:
            self._watchdog.close()


def monitor_for(
    environment: Mapping[str, str],
    folder: str,
    *,
    stuck_after: float | None = None,
    run_id: str = "",
    grace: float = 30.0,
    report: Report | None = None,
) -> WorkerMonitor | None:
    """Create the monitor that an agent's environment requests; None if it requests none.

    Args:
        environment: the agent's own environment.
        folder: for temporary files.
        stuck_after: seconds in uninterruptible sleep that make a worker unhealthy; None for the environment's value.
        run_id, grace, report: see `WorkerMonitor`.

    Raises:
        UserError: the pipe cannot be created; the message says why.
    """
    path = None
    if environment.get(ENABLE_VARIABLE) == "1":
        path = environment.get(FILE_VARIABLE) or os.path.join(folder, f"watchdog_timer_{uuid.uuid4()}")
        log.info("Starting a FileTimerServer with %s ...", path)
    seconds = uninterruptible_timeout(environment) if stuck_after is None else stuck_after
    if path is None and seconds <= 0:
        return None
    return WorkerMonitor(path, seconds, run_id=run_id, grace=grace, report=report)


def uninterruptible_timeout(environment: Mapping[str, str]) -> float:
    """Read the variable: seconds in uninterruptible sleep that make a worker unhealthy; 0 if off or invalid."""
    try:
        seconds = float(environment.get(UNINTERRUPTIBLE_VARIABLE, "0"))
    except ValueError:
        log.warning(
            "%s=%r is not a number of seconds, so this check is off",
            UNINTERRUPTIBLE_VARIABLE,
            environment[UNINTERRUPTIBLE_VARIABLE],
        )
        return 0.0
    return seconds if 0 < seconds < math.inf else 0.0


# Timers


class TimerExpiry(NamedTuple):
    """A process's timer expired `seconds` after its request was read.

    `signal` is the signal for the process; 0 only reports the expiry.
    """

    pid: int
    scope: str
    seconds: float
    signal: int

    @property
    def why(self) -> str:
        return f"its timer {self.scope!r} of {self.seconds:.1f} s ran out"


class _Timer(NamedTuple):
    request: FileTimerRequest
    due: float
    """Seconds on the monotonic clock."""
    expiry: TimerExpiry


class _TimedProcess(ChildProcess):
    """A process that set a timer. Its parent, not we, gets its exit status."""

    def _exit_status(self) -> ExitStatus:
        return ExitStatus(final=True, code=None)


class Watchdog:
    """The server of one pipe.

    Args:
        path: the path of the pipe; replaces a file with that name.
        may_kill: whether the process with a pid belongs to this job; called once per process, while it is running.
        run_id: the job's id, for the log.
        grace: seconds from a signal other than SIGKILL to SIGKILL.
        report: called with one of the names above, and the timer if there is one.
        clock: the clock of `wake_at`.
        wall: returns epoch seconds, which clients use for timers.

    Raises:
        UserError: the pipe cannot be created; the message says why.
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
        self._may_kill = may_kill
        self._run_id = run_id
        self._grace_period = grace
        self._report = report
        self._clock = clock
        self._wall = wall
        self._requests = RequestReader()
        self._timers: dict[int, dict[str, _Timer]] = {}
        """Timers by pid and name."""
        self._processes: dict[int, _TimedProcess] = {}
        """Processes that set timers and may be killed; ended processes are removed when another one is admitted."""
        self._stops: dict[int, Stop] = {}
        self._warnings = 0
        self._enforcing = True
        self.client_seen = False
        """Whether any request arrived."""
        self._report_event(STARTED)

    def fds(self) -> list[int]:
        if self._fifo.fd < 0:
            return []
        return [self._fifo.fd, *(fd for stop in self._stops.values() for fd in stop.fds())]

    def wake_at(self) -> float:
        due = [timer.due for own in self._timers.values() for timer in own.values()] if self._enforcing else []
        return min([*due, *(stop.wake_at() for stop in self._stops.values())], default=math.inf)

    def step(self) -> list[TimerExpiry]:
        """Do what is due. Returns each expired timer once; per process, first the timer that ends it."""
        if self._fifo.fd < 0:
            return []
        self._stops = {pid: stop for pid, stop in self._stops.items() if not stop.step()}
        now = self._clock.monotonic()
        self._read_requests()
        return [expiry for pid in list(self._timers) for expiry in self._expire(pid, now)] if self._enforcing else []

    def stop_enforcing(self) -> None:
        """Keep reading requests, but let no timer expire from now on: the workers are being stopped."""
        self._enforcing = False

    def close(self) -> None:
        if self._fifo.fd < 0:
            return
        self._fifo.close()
        for process in self._processes.values():
            process.release()
        self._processes.clear()
        self._stops.clear()
        self._enforcing = False
        self._report_event(STOPPED)

    # Requests

    def _read_requests(self) -> None:
        requests, complaints = self._requests.feed(self._fifo.read())
        now, wall = self._clock.monotonic(), self._wall()
        for complaint in complaints:
            if self._may_warn():
                log.warning("the watchdog's pipe: %s", complaint)
        for request in requests:
            self.client_seen = True
            pid, seconds = request.worker_pid, request.expiration_time - wall
            if request.expiration_time < 0:
                self._timers.get(pid, {}).pop(request.scope_id, None)
            elif pid not in self._stops and self._admit(pid):
                # A request might be read after its timer expired.
                expiry = TimerExpiry(pid, request.scope_id, max(0.0, seconds), request.signal)
                self._timers.setdefault(pid, {})[request.scope_id] = _Timer(request, now + seconds, expiry)

    def _admit(self, pid: int) -> bool:
        """Whether a process that sets a timer is running and belongs to this job."""
        process = self._processes.get(pid)
        if process is not None and process.poll() is None:
            return True
        for ended in [pid for pid, process in self._processes.items() if process.poll() is not None]:
            self._processes.pop(ended).release()
            self._timers.pop(ended, None)
        try:
            process = _TimedProcess(open_process(pid))
        except ProcessLookupError:  # it ended, and so did its timers
            return False
        except OSError as error:
            if self._may_warn():
                log.warning("the timer of process %d is not enforced: %s", pid, error.strerror)
            return False
        if self._may_kill(pid) and process.poll() is None:
            self._processes[pid] = process
            return True
        process.release()
        if self._may_warn():
            log.warning("process %d set a timer but does not belong to this job, so the timer is ignored", pid)
        return False

    def _may_warn(self) -> bool:
        self._warnings += 1
        return self._warnings <= _MAX_WARNINGS

    # Expiry

    def _expire(self, pid: int, now: float) -> list[TimerExpiry]:
        """End a process if one of its timers has expired."""
        own = self._timers[pid]
        late = sorted((timer for timer in own.values() if timer.due <= now), key=lambda timer: timer.due)
        if not late:
            return []
        process = self._processes.get(pid)
        if process is None or process.poll() is not None:
            del self._timers[pid]
            return []
        scopes = [timer.expiry.scope for timer in late]
        log.warning("Timers expired for run:[%s], process %d: %s", self._run_id, pid, scopes)
        for timer in late:
            self._report_event(EXPIRED, timer.request)
        deadly = next((timer for timer in late if timer.expiry.signal > 0), None)
        if deadly is None:
            for scope in scopes:
                del own[scope]
            return [timer.expiry for timer in late]
        number, grace = deadly.expiry.signal, self._grace_period
        log.error("Reaping worker_pid=[%d] by %s: %s", pid, signal_name(number), deadly.expiry.why)
        if number == SIGKILL and has_signal_handler(
            pid, SIGABRT
        ):  # faulthandler installs one, and shows the stacks of all threads
            number, grace = SIGABRT, STACKS_TIMEOUT
        self._stops[pid] = Stop({pid: process}, NoSweep(), number, grace, clock=self._clock)
        del self._timers[pid]
        self._report_event(KILLED, deadly.request)
        return [deadly.expiry, *(timer.expiry for timer in late if timer is not deadly)]

    def _report_event(self, name: str, request: FileTimerRequest | None = None) -> None:
        if self._report is not None:
            try:
                self._report(name, request)
            except Exception:  # a user's handler must not keep timers from expiring
                log.exception("the watchdog event %r could not be reported", name)


class _NamedPipe:
    """A named pipe that is created, read without blocking, and removed.

    Also open for writing here, so that it neither ends nor becomes readable when a client closes its end.
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
                f"the watchdog's pipe {path!r} cannot be created: {why}; choose another path", error
            ) from None
        self._size = set_pipe_size(self.fd, _PIPE_SIZE)
        made = os.fstat(self.fd)
        self._identity = made.st_dev, made.st_ino

    def read(self) -> bytes:
        """Read everything that is in the pipe now, and not much more, however fast a client writes."""
        parts, left = [], self._size
        with contextlib.suppress(BlockingIOError):
            while left > 0:
                parts.append(os.read(self.fd, left))
                left -= len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)
        with contextlib.suppress(OSError):
            now = os.stat(self._path, follow_symlinks=False)
            if (now.st_dev, now.st_ino) == self._identity:
                os.unlink(self._path)


def is_descendant(pid: int, roots: Collection[int]) -> bool:
    """Whether a process is one of `roots`, a descendant of one, or in a session led by one."""
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


# Uninterruptible sleep


class UninterruptibleSleep(NamedTuple):
    """One uninterruptible sleep of one process.

    `started` (see `ProcessStat`) and `switches`, the number of its context switches, distinguish it from all others.
    `where` is the kernel function in which it sleeps; empty if unknown.
    """

    started: int
    switches: int
    where: str


class StuckProcess(NamedTuple):
    """A process that does not return from the kernel."""

    pid: int
    seconds: float
    where: str

    @property
    def why(self) -> str:
        inside = f" in {self.where}" if self.where else ""
        return (
            f"it is in uninterruptible sleep (state D){inside} for {self.seconds:.1f} s: the kernel waits for a disk, "
            "a network file system or a device, and as a rule not even SIGKILL ends it before that answers"
        )


class _SleepRecord(NamedTuple):
    """A sleep, when it started in seconds on the monotonic clock, and how many polls saw it."""

    sleep: UninterruptibleSleep
    since: float
    times: int


class SleepTracker:
    """Tracks which processes have slept since when; `minimum` seconds in one sleep make a process stuck. Pure."""

    def __init__(self, minimum: float) -> None:
        self._minimum = minimum
        self._since: dict[int, _SleepRecord] = {}

    def update(
        self, now: float, sleeps: Mapping[int, UninterruptibleSleep]
    ) -> tuple[list[StuckProcess], list[StuckProcess]]:
        """Process a poll's result at `now`, in seconds on the monotonic clock: the sleeps by pid.

        Returns:
            Processes whose sleep was seen for the second time, and processes that are stuck.
        """
        again, stuck, since = [], [], {}
        for pid, sleep in sleeps.items():
            previous = self._since.get(pid)
            if previous is None or previous.sleep[:2] != sleep[:2]:
                since[pid] = _SleepRecord(sleep, now, 1)
                continue
            since[pid] = seen = _SleepRecord(sleep, previous.since, previous.times + 1)
            found = StuckProcess(pid, now - seen.since, sleep.where)
            if seen.times == 2:
                again.append(found)
            if found.seconds >= self._minimum:
                stuck.append(found)
        self._since = since
        return again, stuck


class SleepMonitor:
    """Polls workers, because the kernel does not notify of a process's state. For `minimum` see `SleepTracker`."""

    def __init__(self, minimum: float) -> None:
        self._sleepers = SleepTracker(minimum)
        self._every = min(max(minimum / _MIN_POLLS, _SHORTEST), _LONGEST)
        self._poll_at = -math.inf

    def wake_at(self) -> float:
        """When to poll next, on the monotonic clock."""
        return self._poll_at

    def step(self, now: float, pids: Collection[int]) -> list[StuckProcess]:
        """Poll the workers if it is time. Returns those that are stuck in the kernel."""
        if now < self._poll_at:
            return []
        self._poll_at = now + self._every
        sleeps = {pid: sleep for pid in pids if (sleep := uninterruptible_sleep_of(pid)) is not None}
        again, stuck = self._sleepers.update(now, sleeps)
        for process in again:
            log.warning(
                "Process %d is in uninterruptible sleep (state D) in %s", process.pid, process.where or "the kernel"
            )
        for process in stuck:
            log.error("Process %d is unhealthy: %s", process.pid, process.why)
        return stuck


def uninterruptible_sleep_of(pid: int) -> UninterruptibleSleep | None:
    """The uninterruptible sleep of a process's main thread; None if it is in none or does not exist."""
    stat = read_stat(pid)
    if stat is None or stat.state != "D":
        return None
    lines = read_text(f"/proc/{pid}/status").splitlines()
    try:
        switches = sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)
    except (IndexError, ValueError):
        return None
    return UninterruptibleSleep(stat.started, switches, read_text(f"/proc/{pid}/wchan", 64).strip("0\n"))
