"""All worker processes of one start on one node, as one thing (contract sections 6.1 and 6.2).

Laws:

1. A context is closed when all its processes, and whatever they have spawned, are gone, not before: a `close` that an
   exception cuts short (a ^C) has sent SIGKILL to all of them at least, and the next `close` finishes.
2. From the moment that stopping begins, nobody is found to have failed: those who end then were asked to.
3. If the guardian is lost, the workers that were not known to have ended have failed; they are killed with all that can
   be found, as far as the guardian's keeper has not done that already.
"""

from __future__ import annotations

import math
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.base.log import get_logger
from rallypoint.base.poll import until_readable
from rallypoint.base.signals import exit_codes_of
from rallypoint.logs.outputs import Outputs
from rallypoint.logs.specs import LogsDest, LogsSpecs
from rallypoint.workers.escalation import Escalation, StopInProgress, SweepInProgress, run_to_end
from rallypoint.workers.process import ChildProcess, WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.sweep import Sweep, kill_trees

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.failures.out_of_memory import OomKills
    from rallypoint.workers.preload.manager import PreloadManager

log = get_logger(__name__)


@dataclass
class RunProcsResult:
    """How the processes ended, by local rank.

    `failures` holds those that failed by themselves; `stdouts` and `stderrs` are paths, empty where there is no file.
    """

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether any process failed."""
        return bool(self.failures)


class ProcessOptions(NamedTuple):
    """What a job may want of its processes beyond what all have: see `start_processes`."""

    numa_options: NumaOptions | None = None
    stdout_filters: Sequence[str] | None = None
    stderr_filters: Sequence[str] | None = None

    def cpus(self, workers: int) -> Sequence[Collection[int]]:
        """The processors of each worker, none named for all. Raises UserError if there are none for one."""
        found = None
        if self.numa_options is not None:
            from rallypoint.base.topology import worker_cpus

            found = worker_cpus(self.numa_options, workers, os.environ)
        return [()] * workers if found is None else found


class PContext(ABC):
    """Processes that start, are watched and end together. Used once: start, watch, close."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
    ) -> None:
        """Decide on the files; nothing is started yet.

        Args:
            name: what messages call the group.
            entrypoint: what runs.
            args: local rank to its arguments.
            envs: local rank to what is added to the agent's environment.
            logs_specs: where output goes.
            log_line_prefixes: local rank to what stands before each teed line.

        Raises:
            UserError: `args` or `envs` are not for just the local ranks 0 to n-1.
        """
        self.nprocs = len(args)
        _check_ranks("args", args, self.nprocs)
        _check_ranks("envs", envs, self.nprocs)
        self.name = name
        self.entrypoint = entrypoint
        self.args = {rank: tuple(each) for rank, each in args.items()}
        self.envs = {rank: dict(each) for rank, each in envs.items()}
        self.dest: LogsDest = logs_specs.reify(self.envs)
        self.prefixes = dict(log_line_prefixes or {})
        self.stdouts = self.dest.stdouts
        self.stderrs = self.dest.stderrs
        self.error_files = self.dest.error_files

    @abstractmethod
    def start(self) -> None:
        """Start all. If one cannot be started, those that were are ended, and the error goes on."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Local rank to process id."""

    @abstractmethod
    def exit_fds(self) -> list[int]:
        """Descriptors of processes that had not ended at the last `poll`; readable once they have."""

    @abstractmethod
    def poll(self) -> RunProcsResult | None:
        """Look, without waiting: None while all is well, else how it ended. Stops nothing.

        After `close` it tells what was known before; `return_values` holds those that had succeeded or did so still.
        """

    @property
    def stopped(self) -> tuple[int, ...]:
        """Local ranks that were sent a signal to stop while they still ran; none for contexts that do not tell."""
        return ()

    @property
    def succeeded(self) -> tuple[int, ...]:
        """Local ranks that have succeeded without being asked to stop; none for contexts that do not tell."""
        return ()

    @property
    def running(self) -> tuple[int, ...]:
        """Local ranks that have not ended; all for contexts that do not tell."""
        return tuple(range(self.nprocs))

    @property
    def ended_in_order(self) -> bool:
        """Whether all processes have ended with success or by SIGTERM; False for contexts that do not tell."""
        return False

    @property
    def must_be_polled(self) -> bool:
        """Whether the end of a process can come that no descriptor tells of (see `WorkerProcess.held`)."""
        return False

    def forward_signal(self, number: int) -> None:
        """Send each process that runs a signal that means something to it; nothing where that cannot be done."""
        return

    def announce_stacks(self, pid: int) -> None:
        """A process is about to write the stacks of its threads: say whose they are. Does nothing here."""
        return

    @abstractmethod
    def begin_close(
        self,
        death_sig: signal.Signals | None = None,
        timeout: float = 30,
        limit: float = 0.0,
        *,
        sent: bool = False,
    ) -> StopInProgress:
        """Begin to do what `close` does, and return what sees it through. If it has begun, the same again.

        Args:
            death_sig: the signal that asks; SIGTERM if not given.
            timeout: seconds between it and SIGKILL.
            limit: seconds for which one that writes a file is spared, if that is more.
            sent: whether somebody else sees to it that the processes get the signal.
        """

    def shorten_close(self, until: float) -> None:
        """If stopping has begun: from this moment on, on the monotonic clock, no process has time left."""
        return

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30, *, sent: bool = False) -> None:
        """Stop what still runs, carry all output through, and let go of everything. Idempotent.

        Args:
            death_sig: the signal that asks; SIGTERM if not given. SIGKILL also hurries a stop that has begun.
            timeout: seconds between it and SIGKILL.
            sent: whether somebody else sees to it that the processes get the signal.
        """
        stopping = self.begin_close(death_sig, timeout, sent=sent)
        if death_sig == signal.SIGKILL:
            stopping.kill_now()
        try:
            run_to_end(stopping)
        except BaseException:
            stopping.kill_now()
            raise

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all have succeeded or one has failed, and stop the others then.

        Args:
            timeout: seconds; 0 looks once, negative waits for ever.
            period: seconds between looks where a debugger holds a process; else exits wake us by themselves.

        Returns:
            None if the time is up and all is well.
        """
        deadline = Deadline(float("inf") if timeout < 0 else SYSTEM_CLOCK.monotonic() + timeout, SYSTEM_CLOCK)
        while (result := self.poll()) is None and not deadline.expired:
            remaining = min(deadline.remaining(), period) if self.must_be_polled else deadline.remaining()
            self._sleep(remaining)
        if result is not None:
            self.close()
        return result

    def _sleep(self, seconds: float) -> None:
        """Wait so long for something that `poll` may tell."""
        until_readable(self.exit_fds(), seconds)


class LocalProcessesContext(PContext):
    """What all contexts of ours share, however they start each of their workers.

    Args:
        guardian: what starts the workers; None for one of this context's own, which ends with it.
        extras: what else is wanted of them.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        guardian: ReaperClient | None = None,
        extras: ProcessOptions | None = None,
    ) -> None:
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes)
        self._reaper = guardian
        self._owns_reaper = guardian is None
        self._options = extras or ProcessOptions()
        self._processes: dict[int, ChildProcess] = {}
        self._outputs: Outputs | None = None
        self._failures: dict[int, ProcessFailure] = {}
        self._oom_kills: OomKills | None = None
        self._closing: _ContextClose | None = None
        self._closed = False

    @abstractmethod
    def _start_one(self, rank: int, stdout: int | None, stderr: int | None, cpus: Collection[int]) -> ChildProcess:
        """Start the worker of a local rank with these descriptors, None for ours, on these processors."""

    def _prepare(self) -> None:
        """Make ready what `_start_one` needs."""
        self._reaper = self._reaper or ReaperClient()

    def _sweep(self) -> SweepInProgress | None:
        """What ends all that the workers are and have left; None if nothing was ever started."""
        return None if self._reaper is None else Sweep(self._reaper, list(self._processes.values()))

    def _failure_reason(self, rank: int, exitcode: int) -> str:
        """Why a worker has failed, where its exit code does not tell; empty if it does, and for one that has not."""
        return ""

    def _value(self, rank: int) -> Any:
        """What a worker that has succeeded has returned."""
        return None

    def start(self) -> None:
        """Start all. If one cannot be started, those that were are ended, and the error goes on."""
        if self._outputs is not None:
            raise ValueError(f"the processes of {self.name!r} have been started before; make a new context")
        try:
            self._prepare()
            self._outputs = outputs = Outputs(
                self.dest,
                self.nprocs,
                self.prefixes,
                stdout_filters=self._options.stdout_filters,
                stderr_filters=self._options.stderr_filters,
            )
            cpus = self._options.cpus(self.nprocs)
            for rank in range(self.nprocs):
                self._processes[rank] = process = self._start_one(rank, *outputs.stdio(rank), cpus[rank])
                process.on_stacks = partial(self.announce_stacks, process.pid)
                outputs.started(rank)
            from rallypoint.failures.out_of_memory import OomKills

            self._oom_kills = OomKills()
        except BaseException:
            self.close(signal.SIGKILL)
            raise

    def pids(self) -> dict[int, int]:
        """Local rank to process id."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def exit_fds(self) -> list[int]:
        """Descriptors of processes that had not ended at the last `poll`, and of their guardian."""
        waited = [] if self._closed else [each for each in self._processes.values() if not each.seen_ended]
        running = [each.fileno() for each in waited if not each.held_by_debugger]
        if waited and self._reaper is not None:  # also one that is lost: the next `poll` shall come at once
            running.append(self._reaper.fileno())
        return running

    def poll(self) -> RunProcsResult | None:
        """Look, without waiting: None while all is well, else how it ended. Stops nothing."""
        # One look for all questions: who ended between two would be a failure to neither, and a success to none.
        exitcodes = {rank: process.poll() for rank, process in self._processes.items()}
        if self._closing is None:
            self._record_failures(exitcodes)
        if self._failures:
            return RunProcsResult({}, dict(self._failures), self.stdouts, self.stderrs)
        if None in exitcodes.values() and not self._closed:
            return None
        succeeded = [rank for rank, exitcode in exitcodes.items() if exitcode == 0]
        values = {rank: self._value(rank) for rank in succeeded}
        return RunProcsResult(values, {}, self.stdouts, self.stderrs)

    @property
    def stopped(self) -> tuple[int, ...]:
        """Local ranks that were sent a signal to stop while they still ran."""
        return tuple(rank for rank, process in self._processes.items() if process.signalled)

    @property
    def succeeded(self) -> tuple[int, ...]:
        """Local ranks that have succeeded without being asked to stop."""
        well = (rank for rank, process in self._processes.items() if process.poll() == 0 and not process.signalled)
        return tuple(rank for rank in well if rank not in self._failures)

    @property
    def running(self) -> tuple[int, ...]:
        """Local ranks that have not ended."""
        return () if self._closed else tuple(rank for rank, each in self._processes.items() if each.poll() is None)

    @property
    def ended_in_order(self) -> bool:
        """Whether all processes have ended with success or by SIGTERM."""
        return all(each.poll() in (0, *exit_codes_of(signal.SIGTERM)) for each in self._processes.values())

    @property
    def must_be_polled(self) -> bool:
        """Whether a debugger holds a process that has ended."""
        return not self._closed and any(
            each.held_by_debugger and not each.seen_ended for each in self._processes.values()
        )

    def forward_signal(self, number: int) -> None:
        """Send each process that runs a signal that means something to it."""
        for process in self._processes.values():
            process.forward_signal(number)

    def announce_stacks(self, pid: int) -> None:
        """A process is about to write the stacks of its threads: say whose they are, there or before each line."""
        rank = next((rank for rank, each in self._processes.items() if each.pid == pid), None)
        if rank is None or self._outputs is None:
            return
        own = self.envs[rank].get("RANK")
        name = f"{f'local rank {rank}' if own is None else f'rank {own}'} on {os.uname().nodename}"
        path = self._outputs.log_of(rank)
        log.warning("the stacks of %s (pid %d) %s", name, pid, f"are in {os.path.abspath(path)}" if path else "follow")
        self._outputs.label(rank, f"[{name}] ")

    def _record_failures(self, exitcodes: Mapping[int, int | None]) -> None:
        """Remember who has failed by itself. The exits of those whom the ladder stops are never looked at here."""
        orphans = self._orphans()
        for rank, process in self._processes.items():
            exitcode = -signal.SIGKILL if rank in orphans else exitcodes[rank]
            if exitcode is None or rank in self._failures:
                continue
            fault = self._failure_reason(rank, exitcode)
            if rank in orphans and self._reaper is not None:
                fault = self._reaper.lost_reason
            if exitcode or fault:
                self._failures[rank] = self._failure(rank, process.pid, exitcode)
                self._failures[rank].set_reason(fault)

    def _orphans(self) -> list[int]:
        """Local ranks of those who ran when the guardian was lost; they have been killed."""
        if self._reaper is None or not self._reaper.lost:
            return []
        orphans = [rank for rank, each in self._processes.items() if each.poll() is None or each.orphaned]
        if orphans and not self._failures:
            log.error("%s", self._reaper.lost_reason)
            kill_trees(self._processes.values())
        return orphans

    def _failure(self, rank: int, pid: int, exitcode: int) -> ProcessFailure:
        from rallypoint.failures.failure import ProcessFailure

        assert self._outputs is not None
        failure = ProcessFailure(
            rank,
            pid,
            exitcode,
            self.error_files.get(rank, ""),
            last_lines=self._outputs.last_lines(rank),
            log=self._outputs.log_of(rank),
        )
        if exitcode:
            from rallypoint.failures.system_diagnosis import explain_signal

            ended = [each for each in self._processes.values() if each.poll() == -signal.SIGKILL]
            explain_signal(failure, self._oom_kills, sum(not each.signalled for each in ended))
        return failure

    def begin_close(
        self,
        death_sig: signal.Signals | None = None,
        timeout: float = 30,
        limit: float = 0.0,
        *,
        sent: bool = False,
    ) -> StopInProgress:
        """Begin to stop what still runs, and return what sees it through. If it has begun, the same again."""
        if self._closing is None:
            sweep = self._sweep()
            processes = list(self._processes.values())
            number = death_sig or signal.SIGTERM
            ladder = None if sweep is None else Escalation(processes, sweep, number, timeout, limit, sent=sent)
            self._closing = _ContextClose(ladder, self._finish)
        return self._closing

    def shorten_close(self, until: float) -> None:
        """If stopping has begun: from this moment on, on the monotonic clock, no process has time left."""
        if self._closing is not None:
            self._closing.shorten(until)

    def _finish(self) -> None:
        """Carry all output through, and let go of everything."""
        if self._outputs is not None:
            self._outputs.close()
        for process in self._processes.values():
            process.release()
        if self._owns_reaper and self._reaper is not None:
            self._reaper.close()
        self._closed = True


class SubprocessContext(LocalProcessesContext):
    """Workers that are commands."""

    preload: PreloadManager | None = None
    """What they are forked from, as far as they can be; None if they all start cold."""

    def _start_one(self, rank: int, stdout: int | None, stderr: int | None, cpus: Collection[int]) -> ChildProcess:
        assert self._reaper is not None
        argv = [str(self.entrypoint), *map(str, self.args[rank])]
        environ = {**os.environ, **self.envs[rank]}
        started = None if self.preload is None else self.preload.start(argv, environ, stdout, stderr, cpus)
        return WorkerProcess(self._reaper, argv, environ, stdout, stderr, cpus, started=started)


class _ContextClose:
    """The ladder, and what is to be done once it is done."""

    def __init__(self, ladder: Escalation | None, finish: Callable[[], None]) -> None:
        self._escalation = ladder
        self._finish = finish
        self._done = False

    def fds(self) -> list[int]:
        """See `StopInProgress`."""
        return [] if self._escalation is None else self._escalation.fds()

    def wake_at(self) -> float:
        """See `StopInProgress`."""
        return math.inf if self._escalation is None else self._escalation.wake_at()

    def step(self) -> bool:
        """See `StopInProgress`; the step that ends the last worker also carries its output through."""
        if not self._done and (self._escalation is None or self._escalation.step()):
            self._finish()
            self._done = True
        return self._done

    def shorten(self, until: float) -> None:
        """From this moment on nobody has time left."""
        if self._escalation is not None:
            self._escalation.shorten(until)

    def kill_now(self) -> None:
        """See `StopInProgress`."""
        if self._escalation is not None and not self._done:
            self._escalation.kill_now()


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: Sequence[str] | None = None,
    duplicate_stderr_filters: Sequence[str] | None = None,
    *,
    guardian: ReaperClient | None = None,
    made: Callable[[], None] | None = None,
    warm: PreloadManager | None = None,
) -> PContext:
    """Start one process for each local rank (contract section 6.1).

    Args:
        name: what messages call the group.
        entrypoint: a program to run, or a function to call.
        args: local rank to its arguments; those of a program are made strings by `str`.
        envs: local rank to what is added to the agent's environment.
        logs_specs: where output goes.
        log_line_prefixes: local rank to what stands before each teed line.
        start_method: how functions are started; of no matter to programs.
        numa_options: which processors each is bound to; None for any.
        duplicate_stdout_filters: texts; teed lines of standard output that hold one also go to a file of their own.
        duplicate_stderr_filters: the same for standard error.
        guardian: the process that starts them; None for one that ends with the context.
        made: called when the folders have been made, and no process has been started yet.
        warm: what programs are forked from, as far as they can be, below the same guardian; None for cold starts.

    Raises:
        UserError: the ranks of `args` or `envs` are not 0 to n-1, the program cannot be run, or the function or its
            arguments cannot be handed to a process.
        ReaperLost: the guardian has ended.
    """
    extras = ProcessOptions(numa_options, duplicate_stdout_filters, duplicate_stderr_filters)
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, logs_specs, log_line_prefixes, guardian, extras)
        context.preload = warm
    else:
        from rallypoint.workers.functions.context import MultiprocessContext

        context = MultiprocessContext(
            name, entrypoint, args, envs, start_method, logs_specs, log_line_prefixes, *extras, guardian=guardian
        )
    if made is not None:
        made()
    context.start()
    return context


def _check_ranks(what: str, mapping: Mapping[int, object], nprocs: int) -> None:
    if set(mapping) != set(range(nprocs)):
        from rallypoint.base.errors import user_error

        ranks = f"{what} are for the local ranks {sorted(mapping)}; they must be for 0 to {nprocs - 1}"
        raise user_error(ranks, RuntimeError)
