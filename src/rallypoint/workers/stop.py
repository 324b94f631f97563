"""How the workers of one start end (contract section 5.6): one stop, in which each worker has its own stage.

    stage      on entry                                            for               then
    ---------  --------------------------------------------------  ----------------  --------------------------------
    LEAVING    it was asked to leave its round                     `leaving_time`    STACKS; WAITING once it has left
    WAITING    it waits for the next round, with its descendants   no limit          SIGNALLED by `stop_held`
    SIGNALLED  the signal, to the worker itself, not to its        `grace`           STACKS
               descendants: a data loader that gets SIGTERM too
               takes away what its trainer needs to save
    STACKS     SIGABRT, if the worker catches it: Python's         `STACKS_TIMEOUT`  KILLED
               faulthandler writes the stacks of all threads
    KILLED     SIGKILL                                             `KILL_TIMEOUT`    the sweep does not wait for it

A worker that ended has no stage.

When no worker has time left, the sweep ends everything that workers spawned, in any session: with SIGTERM, and after
`SWEEP_GRACE_PERIOD` seconds with SIGKILL. If the stop permits it, the sweep first waits for busy leftovers of the
workers (`leftovers`). Then the stop is complete, even if some processes survive SIGKILL.

Laws:

1. Nothing here blocks: a loop waits on `fds` until `wake_at` and calls `step`.
2. The sweep is never skipped. It begins with SIGTERM unless no time is left, and takes no time if nothing is left. It
   spares waiting workers and their descendants.
3. Whatever happens to the sweep, the workers receive SIGKILL.
4. A process that was given up does not use up a later stop's grace period. A sweep that was given up never continues.
5. A worker that is writing a file is not interrupted. A signal that would end it at once waits until the worker is
   done, as does the next stage after the grace period or the time to leave, but for at most `limit` seconds. All others
   are signalled without delay.
6. A worker that ends while waiting is no longer held. The stop is then incomplete until its leftovers are gone.
7. Only processes that are known to be ours are killed: the reaper's descendants, or, without the reaper, the
   descendants of running workers and the sessions that these lead. In the second case, a process that already left both
   is not found.

Whether a process is writing a file, as far as /proc shows:

1. No file system except /proc is touched: one that hangs must not hang the agent. So the evidence is not the file, but
   the position in an open file and the number of bytes that the process has written.
2. A file counts if it is open for writing and can be a checkpoint: it has a name, is no device, no shared memory and
   not the standard output, and is not opened for appending, as logs are.
3. A file is being written if its position moves. The process has `DETECTION_TIME` seconds for the first move, or
   `LOCK_DETECTION_TIME` if all its open files look like lock files. `QUIET_TIME` seconds after the last move it counts
   as done, since a checkpoint often consists of several files, written one after another.
4. A process that announces a save (`rallypoint.notices.saving`) counts as long as it does.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from signal import SIGABRT, SIGCONT, SIGKILL, SIGTERM

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.kernel import readable, until_readable
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple, Protocol
from rallypoint.base.log import get_logger
from rallypoint.base.open_process import open_process
from rallypoint.base.process_handle import ProcessHandle
from rallypoint.base.process_table import ProcessStat, process_table, signal_process
from rallypoint.base.procfs import has_signal_handler, is_ended_by, read_text
from rallypoint.base.signals import signal_name
from rallypoint.notices import SAVING
from rallypoint.workers.process import ChildProcess, poll_all
from rallypoint.workers.reaper.client import ReaperClient, ReaperLost

if TYPE_CHECKING:

    class StoppableProcess(Protocol):
        """The part of a `ChildProcess` that a stop uses."""

        pid: int
        held_by_debugger: bool
        signalled: bool
        exitcode: int | None

        @property
        def program_pid(self) -> int: ...

        def fileno(self) -> int: ...

        def poll(self) -> int | None: ...

        def signal(self, number: int) -> None: ...

    class LeftProcesses(Protocol):
        """Processes left by workers that all ended (`leftovers.Leftovers`)."""

        def are_busy(self) -> bool: ...

        def wake_at(self) -> float: ...

        def shorten(self, until: float) -> None: ...

    class LeavingWorkers(Protocol):
        """Workers that were asked to leave their round: `told` and `left` are local ranks."""

        told: frozenset[int]

        def left(self) -> set[int]: ...

        def fds(self) -> list[int]: ...

        @property
        def must_be_polled(self) -> bool: ...

        def close(self) -> None: ...


log = get_logger(__name__)

STACKS_TIMEOUT = 1.0
"""Seconds that a worker gets after SIGABRT to write its stacks."""
KILL_TIMEOUT = 1.0
"""Seconds that a worker gets to end after SIGKILL, before the sweep begins without waiting for it."""
SWEEP_GRACE_PERIOD = 1.0
"""Seconds between SIGTERM and SIGKILL for the processes that workers left behind."""
_KILL_TREES_TIMEOUT = 1.0
"""Seconds to end the process trees of workers whose reaper is lost."""
_POLL_INTERVAL = 0.05
"""Seconds between checks of a worker that might be writing, or that a debugger holds: these do not wake us."""
_WARN_AFTER = 2.0
"""Seconds until the log names workers that have not ended; each interval is twice the previous one."""
DETECTION_TIME = 0.25
"""Seconds in which the position of an open file must move. The kernel may delay a writer for 0.2 s."""
LOCK_DETECTION_TIME = 0.05
"""The same for a locked file at position 0: a lock file or an HDF5 file, whose position does not move."""
QUIET_TIME = 1.0
"""Seconds without a move until a process counts as done."""
_MIN_PROGRESS = 64 << 10
"""Minimum bytes for a move: fewer, within `QUIET_TIME`, are a log and not a checkpoint."""

_SAVING_MARK = f"/memfd:{SAVING} (deleted)"
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_DELETED = " (deleted)"


class NoSweep:
    """A sweep ends everything that workers left behind. This one ends nothing: nothing was started, or something else
    ends it."""

    @property
    def cannot_find_all(self) -> bool:
        """Whether the sweep can no longer find all processes, so that no time must be lost."""
        return False

    def begin(self, seconds: float = 0.0, spared: Collection[int] = ()) -> None:
        """Begin to end all processes; replaces an earlier sweep.

        Args:
            seconds: between SIGTERM and SIGKILL; 0 for SIGKILL at once.
            spared: pids of waiting workers.
        """

    def fds(self) -> list[int]:
        """Descriptors that become readable when `cannot_find_all` or `done` might change; none if done."""
        return []

    def done(self) -> bool:
        """Whether everything that could be found is gone."""
        return True

    def give_up(self) -> list[int]:
        """Stop waiting for the processes that are left, now and in later sweeps. Returns their pids, for a message."""
        return []


class Stage(Enum):
    LEAVING = "leaving"
    WAITING = "waiting"
    SIGNALLED = "signalled"
    STACKS = "stacks"
    KILLED = "killed"


_BEFORE_THE_SWEEP = (Stage.LEAVING, Stage.SIGNALLED, Stage.STACKS)


class _Worker:
    def __init__(self, rank: int, process: StoppableProcess, clock: Clock, until: float) -> None:
        self.rank = rank
        self.process = process
        self.stage = Stage.LEAVING
        self.since, self.until = clock.monotonic(), until
        """When the worker was signalled or asked to leave, and when its stage ends."""
        self.is_sent = True
        """Whether the worker was sent its stage's signal; not while it is writing."""
        self._clock = clock
        self._detector = WriteDetector(process.program_pid, clock)
        self.is_logged = False
        """Whether the log says that the worker is writing."""

    @property
    def writing(self) -> WriteDetector:
        """Detects writes by the worker's program, or, after that ended, by the command that wraps it."""
        if (pid := self.process.program_pid) != self._detector.pid:
            self._detector = WriteDetector(pid, self._clock)
        return self._detector


class Stop:
    """One stop of some workers. Creating a `Stop` sends the signal, except to workers that law 5 spares.

    Args:
        processes: by local rank; some may already have ended.
        sweep: ends everything that they left behind.
        death_sig: the first signal.
        grace: seconds between this signal and the next stage.
        limit: seconds for which a worker that is writing a file is spared, at least `grace`. Also the seconds from the
            sweep's SIGKILL until it gives up, at least one.
        clock: the clock of `wake_at`.
        sent: whether another process sends the signal.
        leaving: workers that were asked to leave their round instead; None for none.
        leaving_time: seconds within which they must leave.
        finish: called each time the stop is complete; `held` then lists the waiting workers.
        leftovers: what the sweep waits for after all workers end; None for nothing.
    """

    def __init__(
        self,
        processes: Mapping[int, StoppableProcess],
        sweep: NoSweep,
        death_sig: int,
        grace: float,
        limit: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
        *,
        sent: bool = False,
        leaving: LeavingWorkers | None = None,
        leaving_time: float = 0.0,
        finish: Callable[[], None] = lambda: None,
        leftovers: LeftProcesses | None = None,
    ) -> None:
        now = clock.monotonic()
        self._leftovers = leftovers
        self._sweep = sweep
        self._limit = max(limit, grace)
        self._clock = clock
        self._leaving = leaving
        self._leaving_time = leaving_time
        self._finish = finish
        self._spared_until = now + self._limit
        self._warn_at, self._warn_every = now + _WARN_AFTER, _WARN_AFTER
        self._sweep_until: float | None = None
        """When to give up the sweep; None before it begins."""
        self._terminates_rest = False
        """Whether the sweep sends SIGTERM before it kills."""
        self._others: set[int] = set()
        """Pids of other stops' workers, which no sweep signals."""
        self.done = False
        """Whether the stop is complete, as of the last `step`."""
        self.over = False
        """Whether the stop was complete once: no worker is in the round any more."""
        poll_all(processes.values())
        running = ((rank, process) for rank, process in processes.items() if process.exitcode is None)
        self._workers = [_Worker(rank, process, clock, now + leaving_time) for rank, process in running]
        told = frozenset[int]() if leaving is None else leaving.told
        self._signal_all([worker for worker in self._workers if worker.rank not in told], death_sig, grace, sent)
        if not self._workers and self._sweep_until is None:
            self._sweep_leftovers()

    # Interface to the loop

    def fds(self) -> list[int]:
        """Descriptors that become readable when work is due."""
        shown = [worker for worker in self._workers if not worker.process.held_by_debugger]
        # Until all workers outside WAITING end, nothing is due, so one descriptor is enough to wake us.
        last = [worker for worker in shown if worker.stage is not Stage.WAITING][-1:]
        fds = [worker.process.fileno() for worker in shown if worker.stage is Stage.WAITING or worker in last]
        if self._leaving is not None and self._in(Stage.LEAVING):
            fds += self._leaving.fds()
        return fds if self.done else [*fds, *self._sweep.fds()]

    def wake_at(self) -> float:
        """When work is due without an event, in seconds on the clock; infinite for never."""
        timed = self._in(*_BEFORE_THE_SWEEP, *((Stage.KILLED,) if self._sweep_until is None else ()))
        times = [worker.until for worker in timed]
        if self._sweep_until is not None and not self.done:
            unfinished = bool(self._in(Stage.KILLED) or self._sweep.fds())
            times.append(self._sweep_until if unfinished else 0.0)
        if any(worker.stage is Stage.SIGNALLED for worker in timed):
            times.append(self._warn_at)
        polled = self._leaving is not None and self._leaving.must_be_polled and bool(self._in(Stage.LEAVING))
        if polled or any(worker.process.held_by_debugger or not worker.is_sent for worker in self._workers):
            times.append(self._clock.monotonic() + _POLL_INTERVAL)
        if self._leftovers is not None and self._sweep_until is None and not self._workers:
            times.append(self._leftovers.wake_at())
        return min(times, default=math.inf if self.done else 0.0)

    def step(self) -> bool:
        """Do what is due. Returns whether the stop is complete; if a waiting worker ends, it no longer is."""
        self._look()
        now = self._clock.monotonic()
        if self._in(*_BEFORE_THE_SWEEP, Stage.KILLED) and self._sweep_until is None and self._sweep.cannot_find_all:
            self._kill_all()
        self._end_waits(now)
        if self._sweep_until is None and not self._in(*_BEFORE_THE_SWEEP):
            killed = self._in(Stage.KILLED)
            if not killed:
                self._sweep_leftovers()
            elif all(now >= worker.until for worker in killed):
                self._begin_sweep(0.0)
        if self._sweep_until is not None and not self.done:
            nothing_left = not self._in(Stage.KILLED) and self._sweep.done()
            if not nothing_left and self._clock.monotonic() >= self._sweep_until:
                self._give_up()
                nothing_left = True
            if nothing_left:
                self.over = True
                self._finish()
                self.done = True
        return self.done

    def shorten(self, until: float) -> None:
        """End each worker's time at this moment on the clock, if not earlier, even for workers that are writing."""
        self._spared_until = min(self._spared_until, until)
        for worker in self._in(Stage.LEAVING, Stage.SIGNALLED):
            worker.until = min(worker.until, until)
        if self._leftovers is not None:
            self._leftovers.shorten(until)

    def kill_now(self) -> None:
        """End all grace periods, and keep no worker: send SIGKILL to all that are left."""
        if self._in(*_BEFORE_THE_SWEEP, Stage.WAITING) or (not self.done and self._kills_later()):
            self._kill_all()

    def stop_held(self, number: int, grace: float, *, sent: bool = False) -> None:
        """Keep no worker: stop those that wait or were asked to leave with this signal and the later stages."""
        told = self._in(Stage.LEAVING, Stage.WAITING)
        if not told:
            return
        self._leave_no_more()
        # The stop may have been complete while these waited: their leftovers must be ended too.
        self.done, self._sweep_until = False, None
        now = self._clock.monotonic()
        self._warn_at, self._warn_every = now + _WARN_AFTER, _WARN_AFTER
        self._spared_until = now + max(self._limit, grace)
        self._signal_all(told, number, grace, sent)

    # Waiting workers

    def end_held(self, spared: Collection[int]) -> None:
        """Kill the waiting workers, within a second or two. `spared`: pids of other stops' workers, which this and
        later sweeps spare with their descendants."""
        self._others, self._limit = self._others | set(spared), 0.0
        self._kill_all()

    @property
    def held(self) -> tuple[int, ...]:
        """Local ranks of the workers that left their round and are waiting; none before the stop was complete once."""
        # As of the last `step`, even if one has ended since:
        #   1. `step` finds the stop complete, with rank 1 waiting; rank 1 is killed now;
        #   2. the owner asks which workers are waiting. If we polled here, the answer would be none, and the stop would
        #      be dropped;
        #   3. rank 1's children would never be swept. Instead its descriptor wakes the loop, and `step` sweeps them.
        # Handing over a worker that ended fails anyway (`WorkerChannel.enter`).
        return tuple(worker.rank for worker in self._in(Stage.WAITING) if self.over)

    def hand_over(self, rank: int) -> None:
        """Give up a waiting worker to another owner."""
        self._workers = [worker for worker in self._workers if worker.rank != rank]

    # Stages

    def _in(self, *stages: Stage) -> list[_Worker]:
        return [worker for worker in self._workers if worker.stage in stages]

    def _look(self) -> None:
        """Find the workers that ended, and those that left their round."""
        poll_all(worker.process for worker in self._workers)
        for worker in self._workers:
            if worker.stage is Stage.WAITING and worker.process.exitcode is not None:
                self._ended_while_waiting(worker)
        self._workers = [worker for worker in self._workers if worker.process.exitcode is None]
        if self._leaving is not None and (leaving := self._in(Stage.LEAVING)):
            left = self._leaving.left()
            for worker in leaving:
                if worker.rank in left:
                    worker.stage = Stage.WAITING
        if self._leaving is not None and not self._in(Stage.LEAVING):
            self._leave_no_more()

    def _ended_while_waiting(self, worker: _Worker) -> None:
        # Sweep once more, although no worker was in the round any more:
        #   1. the sweep spares the worker and all its descendants;
        #   2. it ends while waiting (for example, out of memory), and leaves its data loaders;
        #   3. the next sweep would come at the end of the next round. Until then they would occupy memory and devices.
        self._sweep_until = None
        if self.done:
            self.done = False
            pid, rank = worker.process.pid, worker.rank
            log.warning(
                "worker process %d (local rank %d) ended while it was waiting, so it is being restarted", pid, rank
            )

    def _leave_no_more(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.close()

    def _end_waits(self, now: float) -> None:
        """End the stages whose time is up."""
        for worker in self._in(Stage.LEAVING):
            if now >= worker.until and not self._waits_for_writes(worker, now):
                log.warning(
                    "worker process %d (local rank %d) did not leave its function within %g s, so it is being killed "
                    "and restarted",
                    *(worker.process.program_pid, worker.rank, self._leaving_time),
                )
                self._request_stacks(worker, now)
        self._end_grace(now)
        for worker in self._in(Stage.STACKS):
            if now >= worker.until:
                self._kill(worker, now)

    def _end_grace(self, now: float) -> None:
        signalled = self._in(Stage.SIGNALLED)
        done = [worker for worker in signalled if not worker.is_sent and not self._is_spared(worker, now)]
        for worker in done:
            worker.until = max(worker.until, now + KILL_TIMEOUT)
        self._send(done)
        due = [worker for worker in signalled if now >= worker.until]
        # Kill no worker while another one is spared, because it might be waiting for that one:
        #   1. rank 0 writes the checkpoint of all, and the others wait for it in a barrier;
        #   2. the time of the others ends first, and SIGKILL breaks the barrier;
        #   3. rank 0 fails in its collective, with half of the file written.
        if due and any(self._is_spared(worker, now) for worker in signalled):
            for worker in due:
                worker.until = now + _POLL_INTERVAL
            due = []
        for worker in due:
            log.warning(
                "Process %d did not end within %.0f s; sending SIGKILL", worker.process.program_pid, now - worker.since
            )
            self._request_stacks(worker, now)
        if signalled and now >= self._warn_at:
            self._log_remaining(now)

    def _log_remaining(self, now: float) -> None:
        self._warn_every *= 2
        self._warn_at = now + self._warn_every
        for worker in self._in(Stage.SIGNALLED):
            left = worker.until - now  # until the next stage, or the next check of a worker that is writing
            if worker.is_sent and left >= 1:
                log.warning(
                    "worker process %d has not ended; it will be sent SIGKILL in %.0f s",
                    worker.process.program_pid,
                    left,
                )

    def _signal_all(self, workers: Sequence[_Worker], number: int, grace: float, sent: bool = False) -> None:
        """Move workers to SIGNALLED, or to KILLED if the signal is SIGKILL."""
        self._death_sig, now = number, self._clock.monotonic()
        for worker in workers:
            worker.stage, worker.since, worker.until = Stage.SIGNALLED, now, now + grace
            worker.is_sent = (
                sent
                or number == SIGKILL
                or not (worker.writing.check() and is_ended_by(worker.process.program_pid, number))
            )
            worker.process.signalled |= sent
        if not sent:
            self._send([worker for worker in workers if worker.is_sent])
        if number == SIGKILL and not self._in(Stage.LEAVING):
            self._kill_all()
        elif number == SIGKILL:
            for worker in workers:
                self._kill(worker, now)

    def _send(self, workers: Sequence[_Worker]) -> None:
        """Send the signal, and log all lines at once: there may be hundreds while a restart waits."""
        if not workers:
            return
        name = signal_name(self._death_sig)
        log.warning(
            "%s", "\n".join(f"Sending process {worker.process.program_pid} closing signal {name}" for worker in workers)
        )
        for worker in workers:
            worker.is_sent = True
            if self._death_sig != SIGKILL:  # SIGKILL follows for all at once
                worker.process.signal(self._death_sig)

    def _request_stacks(self, worker: _Worker, now: float) -> None:
        if has_signal_handler(worker.process.program_pid, SIGABRT):
            worker.stage, worker.until = Stage.STACKS, now + STACKS_TIMEOUT
            worker.process.signal(SIGABRT)
        else:
            self._kill(worker, now)

    def _kill(self, worker: _Worker, now: float) -> None:
        """Kill a worker; its descendants are swept when it is gone."""
        worker.stage, worker.until, worker.is_sent = Stage.KILLED, now + KILL_TIMEOUT, True
        worker.process.signal(SIGKILL)

    # Workers that are writing a file

    def _waits_for_writes(self, worker: _Worker, now: float) -> bool:
        spared = self._is_spared(worker, now)
        if spared:
            worker.until = now + _POLL_INTERVAL
        return spared

    def _is_spared(self, worker: _Worker, now: float) -> bool:
        """Whether this worker must not be interrupted yet. Logs this once, when it is certain."""
        left = self._spared_until - now
        if left <= 0 or not worker.writing.check():
            return False
        if worker.writing.certain and not worker.is_logged:
            worker.is_logged = True
            pid, what = worker.process.program_pid, worker.writing.what
            if worker.stage is Stage.LEAVING:
                log.warning(
                    "worker process %d is writing %s; it has %.0f s more to leave its function", pid, what, left
                )
            else:
                log.warning(
                    "worker process %d is writing %s; it will be stopped when that is done, or in %.0f s",
                    pid,
                    what,
                    left,
                )
        return True

    # Sweep

    def _sweep_leftovers(self) -> None:
        """Begin the sweep, unless it waits for leftovers. All workers ended or are waiting."""
        if self._leftovers is None or self._sweep.cannot_find_all or not self._leftovers.are_busy():
            self._begin_sweep(SWEEP_GRACE_PERIOD)

    def _kills_later(self) -> bool:
        """Whether anything has time left: a sweep that began with SIGTERM, or one that has not begun."""
        return self._terminates_rest or self._sweep_until is None

    def _kill_all(self) -> None:
        """Send SIGKILL to all processes at once, to workers last."""
        # A dead worker's leftovers are harder to find if the reaper is lost and only /proc shows them:
        #   1. a worker starts a loader in its own session, and dies first;
        #   2. the loader then has another parent, and no worker leads its session;
        #   3. nothing shows that the loader is ours, and law 7 forbids guessing.
        self._leave_no_more()
        self.done = False
        until = self._clock.monotonic() + KILL_TIMEOUT
        for worker in self._workers:
            worker.stage, worker.until, worker.is_sent = Stage.KILLED, until, True
        try:
            self._begin_sweep(0.0)
        finally:
            for worker in self._workers:
                worker.process.signal(SIGKILL)

    def _begin_sweep(self, seconds: float) -> None:
        # Set the time last. If an exception (a ^C, a missing answer from the reaper) leaves it unset, the next step
        # begins the sweep again instead of waiting for one that never ran.
        until = self._clock.monotonic() + seconds + max(self._limit, 1.0)
        waiting = {worker.process.pid for worker in self._in(Stage.WAITING)}
        self._sweep.begin(seconds, waiting | self._others)
        self._sweep_until, self._terminates_rest = until, seconds > 0

    def _give_up(self) -> None:
        stuck = self._in(Stage.KILLED)
        self._workers = self._in(Stage.WAITING)
        for pid in sorted({worker.process.pid for worker in stuck} | set(self._sweep.give_up())):
            log.error("Process %d has not ended even after SIGKILL; it may be stuck in the kernel", pid)


def run_to_end(stopping: Stop, clock: Clock = SYSTEM_CLOCK) -> None:
    """Drive a stop to its end while waiting for nothing else."""
    while not stopping.step():
        until_readable(stopping.fds(), stopping.wake_at() - clock.monotonic())


class Sweep(NoSweep):
    """Sweeps below one reaper, one after another. If the reaper is lost, sweeps as far as /proc shows the processes.

    Args:
        reaper: the reaper above all these processes.
        processes: the workers.
    """

    def __init__(self, reaper: ReaperClient, processes: Collection[ChildProcess]) -> None:
        self._reaper = reaper
        self._processes = processes
        self._spared: set[int] = set()
        self._fd = -1
        """Readable when the sweep ends; -1 before it begins."""
        self._over = False

    @property
    def cannot_find_all(self) -> bool:
        return self._reaper.lost

    def begin(self, seconds: float = 0.0, spared: Collection[int] = ()) -> None:
        """Begin the sweep. If the reaper is lost, kill all processes that can be found before returning."""
        self._close()
        self._over, self._spared = False, set(spared)
        try:
            self._fd = self._reaper.begin_sweep(seconds, self._spared)
        except ReaperLost:
            self._sweep_by_procfs()

    def fds(self) -> list[int]:
        """Readable when the sweep is complete or the reaper is gone."""
        return [] if self._over else [fd for fd in (self._reaper.fileno(), self._fd) if fd >= 0]

    def done(self) -> bool:
        if not self._over and self._fd >= 0 and readable(self._fd):
            if os.read(self._fd, 1):
                self._over = True
                self._close()
            else:
                self._sweep_by_procfs()
        return self._over

    def give_up(self) -> list[int]:
        """Stop waiting. Returns the pids below the reaper that did not end."""
        if self._over:
            return []
        self._over = True
        self._reaper.give_up_sweep()
        self._close()
        # Exclude the session of the reaper and its supervisor: the processes that they start are in other sessions.
        spared = self._reaper.excluded | {stat.pid for stat in _descendants(self._spared)}
        return [
            stat.pid
            for stat in _descendants({self._reaper.pid})
            if not stat.ended and stat.session != self._reaper.pid and stat.pid not in spared
        ]

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _sweep_by_procfs(self) -> None:
        self._over = True
        self._close()
        kill_trees(self._processes)


def kill_trees(processes: Iterable[ChildProcess], unreaped: Collection[int] = (), seconds: float = 0.0) -> None:
    """Kill the running workers, their descendants, and the sessions that any of these lead.

    Args:
        processes: the workers.
        unreaped: pids of ended workers that are not reaped yet, so that their sessions are still ours.
        seconds: between SIGTERM and SIGKILL; waits no longer than needed. 0 for SIGKILL at once.
    """
    running = [process for process in processes if process.poll() is None]
    known = {
        stat.pid: stat for stat in _descendants({*(process.pid for process in running), *unreaped}) if not stat.ended
    }
    if seconds:
        _terminate(known.values(), seconds)
    for process in running:
        process.signal(SIGKILL)
    until = time.monotonic() + _KILL_TREES_TIMEOUT
    while known and time.monotonic() < until:
        for stat in known.values():
            signal_process(stat, SIGKILL)
        known.update((stat.pid, stat) for stat in _descendants(set(known)))
        known = {pid: stat for pid, stat in known.items() if stat.is_running()}
        os.sched_yield()


def _descendants(roots: set[int]) -> list[ProcessStat]:
    """These processes, their descendants, and the members of sessions that one of them leads."""
    stats = process_table().values()
    found = set(roots)
    while new := {
        stat.pid for stat in stats if stat.pid not in found and (stat.parent in found or stat.session in found)
    }:
        found |= new
    return [stat for stat in stats if stat.pid in found]


def open_found(stat: ProcessStat) -> ProcessHandle | None:
    """Open the handle of a process in the table; None if it ended or cannot be watched."""
    try:
        handle = open_process(stat.pid)
    except OSError:
        return None
    if stat.is_running():  # from now on the pid cannot be reused
        return handle
    handle.close()
    return None


def _terminate(stats: Iterable[ProcessStat], seconds: float) -> None:
    """Send SIGTERM, plus SIGCONT for stopped processes, and give them time to end."""
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        handles = [handle for stat in stats if (handle := open_found(stat)) is not None]
        for handle in handles:
            stack.callback(handle.close)
            with contextlib.suppress(OSError):
                handle.send_signal(SIGTERM)
                handle.send_signal(SIGCONT)
        for handle in handles:
            until_readable([handle.fileno()], deadline - time.monotonic())


# Detection of writes


class WriteProgress(NamedTuple):
    """Progress of a process's writes: `positions` in its open files, by descriptor and path, and bytes written.

    `announced`: whether it announces that it is saving; `locks`: whether all of the files look like lock files.
    """

    positions: dict[tuple[int, str], int]
    written: int
    announced: bool = False
    locks: bool = False

    def moved_from(self, before: WriteProgress) -> bool:
        """Whether a file was opened, closed or written to since then."""
        now, then = self.positions, before.positions
        if now.keys() != then.keys():
            return True
        steps = [now[key] - then[key] for key in now]
        return bool(steps) and (
            self.written - before.written >= _MIN_PROGRESS or any(not 0 <= step < _MIN_PROGRESS for step in steps)
        )

    def has_grown(self, before: WriteProgress) -> bool:
        """Whether a save began, ended, or wrote more to open files than anything but a save would.

        Unlike in `moved_from`, opening or closing a file does not count: a thread might do that forever.
        """
        if self.announced != before.announced:
            return True
        steps = [position - before.positions.get(key, 0) for key, position in self.positions.items()]
        return bool(steps) and max(self.written - before.written, *steps) >= _MIN_PROGRESS


class WriteDetector:
    """Repeatedly checks one process.

    Args:
        pid: its pid. A process that reuses the pid is only read.
        clock: measures `DETECTION_TIME` and `QUIET_TIME`.
    """

    def __init__(self, pid: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self.pid = pid
        self._clock = clock
        self._last_progress: WriteProgress | None = None
        self._until = 0.0
        self.certain = False
        """Whether the process was found writing, and not only with an open file."""
        self.what = "a checkpoint"
        """Name of the files that it writes, for a message."""

    def check(self) -> bool:
        now, found = self._clock.monotonic(), write_progress(self.pid)
        if self._last_progress is None:
            self._last_progress = found
            self._until = now if not found.positions else now + (LOCK_DETECTION_TIME if found.locks else DETECTION_TIME)
        elif found.moved_from(self._last_progress):
            self.certain = True
            self._last_progress = found
            self._until = now + QUIET_TIME
        self.certain |= found.announced
        if found.positions:
            self.what = ", ".join(sorted({path for _, path in found.positions}))
        return found.announced or now < self._until


def write_progress(pid: int) -> WriteProgress:
    """The current progress of a process's writes; empty if it ended or cannot be read."""
    targets = _open_files(pid)
    output = {targets.get(1), targets.get(2)}
    found = {
        (fd, path): place
        for fd, path in targets.items()
        if fd > 2 and _is_named(path) and path not in output and (place := _file_position(pid, fd)) is not None
    }
    positions = {key: position for key, (position, _) in found.items()}
    locks = bool(found) and all(locked and position == 0 for position, locked in found.values())
    return WriteProgress(positions, _written(pid) if positions else 0, _SAVING_MARK in targets.values(), locks)


def _open_files(pid: int) -> dict[int, str]:
    """Targets by descriptor. Each of several workers may have hundreds, while a restart waits."""
    found: dict[int, str] = {}
    try:
        folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return found
    try:
        for name in os.listdir(folder):
            try:
                found[int(name)] = os.readlink(name, dir_fd=folder)
            except OSError:  # closed meanwhile
                continue
    except OSError:  # the process ended
        pass
    finally:
        os.close(folder)
    return found


def _is_named(path: str) -> bool:
    return path.startswith("/") and not path.startswith(_NO_FILES) and not path.endswith(_DELETED)


def _file_position(pid: int, fd: int) -> tuple[int, bool] | None:
    """The position of a descriptor in its file, and whether the file is locked; None if read-only or append-only."""
    try:
        if not os.lstat(f"/proc/{pid}/fd/{fd}").st_mode & 0o200:
            return None
        fields = _fields(f"/proc/{pid}/fdinfo/{fd}")
        return None if int(fields["flags"], 8) & os.O_APPEND else (int(fields["pos"]), "lock" in fields)
    except (OSError, KeyError, ValueError):
        return None


def _written(pid: int) -> int:
    """Bytes of pages that the process made dirty: only this shows the progress of a single long `write`."""
    try:
        return int(_fields(f"/proc/{pid}/io")["write_bytes"])
    except (KeyError, ValueError):
        return 0


def _fields(path: str) -> dict[str, str]:
    lines = (line.partition(":") for line in read_text(path).splitlines())
    return {name: value for name, colon, value in lines if colon}
