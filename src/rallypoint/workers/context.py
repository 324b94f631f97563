"""All worker processes of one start on one node, as one object (contract sections 6.1 and 6.2).

Laws:

1. A context is closed only when all its processes, and everything that they spawned, are gone. If an exception (a ^C)
   cuts `close` short, all of them have at least received SIGKILL, and the next `close` finishes.
2. After stopping begins, no worker counts as failed: a worker that ends then was stopped.
3. If the reaper is lost, all workers whose end is unknown failed. They are killed with all processes that can be found,
   unless the reaper's supervisor already did that.
4. A worker that keeps its process is handed over, with its outputs, from one round's context to the next round's. It
   always belongs to one context, which treats it like workers that it started itself.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.base.kernel import until_readable
from rallypoint.base.light_dataclasses import dataclass, field
from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.base.signals import exit_codes_of
from rallypoint.workers.logs.outputs import WorkerConsole, WorkerOutput
from rallypoint.workers.logs.specs import LogsDest, LogsSpecs, link_log
from rallypoint.workers.process import AdoptedProcess, ChildProcess, poll_all, start_workers
from rallypoint.workers.reaper.client import Command, ReaperClient

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions
    from rallypoint.base.process_handle import ProcessHandle
    from rallypoint.failures.failure import OomKills, ProcessFailure
    from rallypoint.workers.logs.outputs import Merges, Relay
    from rallypoint.workers.stop import LeavingWorkers, NoSweep, Stop

    ChangeCommand = Callable[[int, Sequence[str]], "WorkerCommand | None"]
    """Called with a local rank and its command. Returns the command to start instead, or None for no change."""
    Fork = Callable[
        [Sequence[str], Mapping[str, str], int | None, int | None, Collection[int]],
        ProcessHandle | None,
    ]
    """Called with a command, its environment, descriptors 1 and 2 (None for ours), and processors. Forks this worker
    below its context's reaper, or returns None if it must be started normally. Raises as `ReaperClient.spawn` does."""

log = get_logger(__name__)


class macros:
    """Placeholders in worker arguments, replaced per worker (contract section 1.7)."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Sequence[Any], local_rank: str) -> list[Any]:
        """Substitute a worker's arguments: in each string, `${local_rank}` becomes `local_rank`.

        Other `${name}` and a lone `$` stay; `$$` becomes `$`.
        """
        found = list(args)
        for number, argument in enumerate(args):
            if isinstance(argument, str) and "$" in argument:
                from string import Template

                found[number] = Template(argument).safe_substitute(local_rank=local_rank)
        return found


@dataclass
class RunProcsResult:
    """How the processes ended, by local rank.

    `failures` contains the processes that failed on their own; `stdouts` and `stderrs` are paths, empty without a file.
    """

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return bool(self.failures)


class ProcessOptions(NamedTuple):
    """Options of a job's processes.

    `numa_options` binds each process to processors; None for no binding. Teed lines that contain a filter's text are
    also written to a separate file. `start_method` is how to start functions. `fork` is tried before starting a
    program.
    """

    numa_options: NumaOptions | None = None
    stdout_filters: Sequence[str] | None = None
    stderr_filters: Sequence[str] | None = None
    start_method: str = "spawn"
    fork: Fork | None = None
    command: ChangeCommand | None = None
    """Changes the command of a worker."""
    console: WorkerConsole | None = None
    """Shows their output; None for a console of their own, which ends with them."""
    merges: Merges | None = None
    """Creates the object that merges teed lines of several workers before the console shows them."""
    ignored_signals: Collection[int] = ()
    """Signals that the processes ignore until they install handlers."""
    waits_for_place: bool = False
    """Whether sweeps spare the processes: they are in no round until another context adopts them."""


class WorkerCommand(NamedTuple):
    """Command of a worker that is not forked, and the class of its process object."""

    argv: Sequence[str]
    process: Callable[[ReaperClient, ProcessHandle], ChildProcess] = AdoptedProcess


class WorkerStart(NamedTuple):
    """A worker to start: local rank, descriptors 1 and 2 (None for ours), and processors."""

    rank: int
    stdout: int | None
    stderr: int | None
    cpus: Collection[int]


class HeldWorker(NamedTuple):
    """A worker between two rounds. `environment` is the environment that the agent last set for it."""

    process: ChildProcess
    output: WorkerOutput
    environment: Mapping[str, str]


class PContext(ABC):
    """Processes that start, are watched and end together. Use it once: start, watch, close.

    Args:
        name: the group's name in messages.
        entrypoint: the program or function to run.
        args: arguments by local rank; a program's arguments become strings.
        envs: additions to the agent's environment by local rank.
        logs_specs: where to write output. The folders are created at once; nothing is started yet.
        log_line_prefixes: the prefix of each teed line by local rank; by default `[<name><local rank>]:`.
        reaper: starts the workers; None creates a reaper that ends with this context.
        options: additional options of the workers.

    Raises:
        UserError: the keys of `args` or `envs` are not exactly the local ranks 0 to n-1.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        reaper: ReaperClient | None = None,
        options: ProcessOptions | None = None,
    ) -> None:
        self.nprocs = len(args)
        for what, by_rank in (("args", args), ("envs", envs)):
            if set(by_rank) != set(range(self.nprocs)):
                from rallypoint.base.errors import user_error

                ranks = f"{what} are for the local ranks {sorted(by_rank)}; they must be for 0 to {self.nprocs - 1}"
                raise user_error(ranks, RuntimeError)
        self.name = name
        self.without_stacks: set[int] = set()
        """Local ranks that hang, and whose stacks are not collected yet: they write them when they are stopped."""
        self.entrypoint = entrypoint
        self.args = {rank: tuple(words) for rank, words in args.items()}
        self.envs = {rank: dict(variables) for rank, variables in envs.items()}
        self.dest: LogsDest = logs_specs.reify(self.envs)
        self.prefixes = {rank: f"[{name}{rank}]:" for rank in range(self.nprocs)} | dict(log_line_prefixes or {})
        self.stdouts = self.dest.stdouts
        self.stderrs = self.dest.stderrs
        self.error_files = self.dest.error_files
        self._reaper = reaper
        self._owns_reaper = reaper is None
        self._options = options or ProcessOptions()
        self._processes: dict[int, ChildProcess] = {}
        self._console = self._options.console or WorkerConsole()
        self._outputs: dict[int, WorkerOutput] = {}
        self._failures: dict[int, ProcessFailure] = {}
        self._oom_kills: OomKills | None = None
        self.stopping: Stop | None = None
        """The only stop of these workers, once it begins. It also includes the workers that keep their processes."""
        self._were_held: Collection[int] | None = None
        """Local ranks that were still waiting when all workers were stopped; None before. Others ended earlier."""
        self._polled_ended: Collection[int] = ()
        """Local ranks whose end `poll` reported. Any other end wakes the caller of `poll`, even one noticed before."""
        self._started = False
        self._closed = False

    # Differences between kinds of workers

    @abstractmethod
    def _start_each(self, starts: Sequence[WorkerStart]) -> Iterator[tuple[int, ChildProcess]]:
        """Start the workers with some local ranks, and yield each with its rank."""

    def _prepare(self) -> None:
        self._reaper = self._reaper or ReaperClient()
        self._reaper.ignored = self._options.ignored_signals

    def _sweep(self) -> NoSweep:
        """The sweep that ends everything that the workers left behind."""
        from rallypoint.workers.stop import NoSweep, Sweep

        if self._reaper is None or self._options.waits_for_place:
            return NoSweep()
        return Sweep(self._reaper, self._processes.values())

    def _failure_reason(self, rank: int, exitcode: int) -> str:
        """Why a worker failed, if its exit code does not show this; otherwise empty."""
        return ""

    def _value(self, rank: int) -> Any:
        """The return value of a worker that succeeded."""
        return None

    # Start

    def start(self) -> None:
        """Start all processes. If one cannot start, end those already started, and raise the error."""
        if self._started:
            raise ValueError(f"the processes of {self.name!r} have already been started; create a new context")
        self._started = True
        try:
            self._prepare()
            new = [rank for rank in range(self.nprocs) if rank not in self._processes]
            if new:
                self._start_new(new)
            for rank, process in self._processes.items():
                process.on_stacks = partial(self.announce_stacks, process.pid)
                process.stacks_wanted = partial(self.without_stacks.__contains__, rank)
            # Import now, while nobody waits, what the end of these workers needs. On a busy disk an import takes 20 ms,
            # and after an in-place upgrade the module might differ or be missing. The report is the last to be needed.
            import rallypoint.failures.explanation
            import rallypoint.failures.kinds
            import rallypoint.failures.report
            import rallypoint.failures.tracebacks
            import rallypoint.workers.leftovers
            import rallypoint.workers.logs.ends
            import rallypoint.workers.stop  # noqa: F401
            from rallypoint.failures.failure import OomKills

            self._oom_kills = OomKills()
        except BaseException:
            self.close(signal.SIGKILL)
            raise

    def _start_new(self, ranks: Sequence[int]) -> None:
        options = self._options
        outputs = self._console.open(
            self.dest,
            ranks,
            self.prefixes,
            filters=(options.stdout_filters, options.stderr_filters),
            merges=options.merges,
            global_ranks={rank: int(env.get("RANK", rank)) for rank, env in self.envs.items()},
        )
        self._outputs |= outputs
        cpus = self.cpus()
        starts = []
        for rank, output in outputs.items():
            stdout, stderr = output.worker_ends
            starts.append(WorkerStart(rank, stdout, stderr, cpus[rank]))
        for rank, process in self._start_each(starts):
            self._processes[rank] = process
            outputs[rank].close_worker_ends()
        self._processes = dict(sorted(self._processes.items()))

    def cpus(self) -> Sequence[Collection[int]]:
        cpus: Sequence[Collection[int]] = [()] * self.nprocs
        if self._options.numa_options is not None:
            from rallypoint.base.numa import worker_cpus

            cpus = worker_cpus(self._options.numa_options, self.nprocs, os.environ) or cpus
        return cpus

    # While they are running

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def program_pid(self, local_rank: int) -> int:
        """Pid of a worker's program; 0 if none was started. For any thread."""
        process = self._processes.get(local_rank)
        return 0 if process is None else process.program_pid

    def program_pids(self) -> dict[int, int]:
        return {rank: self.program_pid(rank) for rank in tuple(self._processes)}

    def last_lines(self, local_rank: int) -> Callable[[], bytes]:
        """Return a function that returns the end of a worker's standard error, as far as it is stored. Works on any
        thread, after `close`, and when the worker is in another context."""
        return self._outputs[local_rank].last_lines if local_rank in self._outputs else bytes

    def output(self, local_rank: int) -> WorkerOutput | None:
        """Where a worker writes, even after `close`; None if it was not started."""
        return self._outputs.get(local_rank)

    def relay(self, local_rank: int, stream: int) -> Relay | None:
        """The relay of standard output (0) or standard error (1), if it exists."""
        return self._outputs[local_rank].relays[stream] if local_rank in self._outputs else None

    def exit_fds(self) -> list[int] | None:
        """Descriptors of processes that were running at the last `poll`; readable once they end. None if a process can
        end without a signal (see `ChildProcess.held_by_debugger`), so that you must call `poll` at intervals."""
        waited = [self._processes[rank] for rank in self.awaited]
        if any(process.held_by_debugger and process.exitcode is None for process in waited):
            return None
        running = [process.fileno() for process in waited]
        if waited and self._reaper is not None:  # even if it is lost: `poll` must follow at once
            running.append(self._reaper.fileno())
        return running

    def poll(self) -> RunProcsResult | None:
        """Check without waiting: None while all is well, else the result. Stops no process.

        After `close` it returns what was known before; `return_values` contains workers that succeeded before or during
        it.
        """
        # Poll once: a worker that ends between two polls would be neither a failure nor a success.
        poll_all(self._processes.values())
        exitcodes = {rank: process.exitcode for rank, process in self._processes.items()}
        self._polled_ended = {rank for rank, exitcode in exitcodes.items() if exitcode is not None}
        if self.stopping is None:
            self._record_failures(exitcodes)
        if self._failures:
            return RunProcsResult({}, dict(self._failures), self.stdouts, self.stderrs)
        if None in exitcodes.values() and not self._closed:
            return None
        succeeded = [rank for rank, exitcode in exitcodes.items() if exitcode == 0]
        values = {rank: self._value(rank) for rank in succeeded}
        return RunProcsResult(values, {}, self.stdouts, self.stderrs)

    @property
    def running(self) -> tuple[int, ...]:
        """Local ranks of workers that are in the round and still running."""
        if self._over:
            return ()
        poll_all(self._processes.values())
        return tuple(rank for rank, process in self._processes.items() if process.exitcode is None)

    @property
    def awaited(self) -> tuple[int, ...]:
        """Local ranks of workers in the round whose end `poll` has not reported, even if others noticed it."""
        return () if self._over else tuple(rank for rank in self._processes if rank not in self._polled_ended)

    @property
    def _over(self) -> bool:
        return self._closed or (self.stopping is not None and self.stopping.over)

    @property
    def stopped(self) -> tuple[int, ...]:
        """Local ranks of workers that were signalled to stop while still running."""
        return tuple(rank for rank, process in self._processes.items() if process.signalled)

    @property
    def succeeded(self) -> tuple[int, ...]:
        """Local ranks of workers that succeeded before anything stopped them."""
        poll_all(self._processes.values())
        well = (rank for rank, process in self._processes.items() if process.exitcode == 0 and not process.signalled)
        return tuple(rank for rank in well if rank not in self._failures)

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit codes of the workers that ended, by local rank."""
        poll_all(self._processes.values())
        return {rank: process.exitcode for rank, process in self._processes.items() if process.exitcode is not None}

    @property
    def ended_in_order(self) -> bool:
        """Whether all processes that had to be stopped succeeded or ended by SIGTERM."""
        those = self._processes if self._were_held is None else self._were_held
        return all(self._processes[rank].poll() in (0, *exit_codes_of(signal.SIGTERM)) for rank in those)

    def ended_at(self, local_rank: int) -> float:
        """When a worker's end was noticed, on the monotonic clock."""
        return self._processes[local_rank].ended_at

    def forward_signal(self, number: int) -> None:
        for process in self._processes.values():
            process.forward_signal(number)

    def announce_stacks(self, pid: int) -> None:
        """Log that a process is about to write its threads' stacks, and which worker it is."""
        same = (rank for rank, process in self._processes.items() if pid in (process.pid, process.program_pid))
        rank = next(same, None)
        if rank is None or rank not in self._outputs:
            return
        own = self.envs[rank].get("RANK")
        name = f"{f'local rank {rank}' if own is None else f'rank {own}'} on {os.uname().nodename}"
        path = self._outputs[rank].log
        where = f"are in {os.path.abspath(path)}" if path else "follow"
        log.warning("the stacks of %s (pid %d), which Python labels a fatal error, %s", name, pid, where)
        self._outputs[rank].label(f"[{name}] ")

    def output_ages(self) -> Callable[[], tuple[float, ...]]:
        """Return a function that returns the seconds since each process's last output; empty if unknown.

        Call it on another thread: it asks the file system, and a disk might hang.
        """
        outputs = [self._outputs[rank] for rank in sorted(self._outputs)]
        return lambda: tuple(output.age() for output in outputs)

    def console_blocked_for(self) -> float:
        """Seconds for which a console of these processes has accepted no output; 0.0 if none is waiting."""
        return self._console.blocked_for()

    def output_marks(self) -> Callable[[], object] | None:
        """Return a function whose result changes when any process writes output; None if this cannot be known.

        Call it on another thread: it asks the file system, and a disk might hang.
        """
        if not self._outputs:
            return None
        outputs = [*self._outputs.values()]
        return lambda: [output.marks() for output in outputs]

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all processes succeed or one fails, then stop the others.

        Args:
            timeout: seconds; 0 polls once, negative waits forever.
            period: seconds between polls if a debugger holds a process; otherwise exits wake us.

        Returns:
            None if the time passed and all is well.
        """
        deadline = Deadline(float("inf") if timeout < 0 else SYSTEM_CLOCK.monotonic() + timeout, SYSTEM_CLOCK)
        while (result := self.poll()) is None and not deadline.expired:
            fds = self.exit_fds()
            self._sleep(fds or (), deadline.remaining() if fds is not None else min(deadline.remaining(), period))
        if result is not None:
            self.close()
        return result

    def _sleep(self, fds: Sequence[int], seconds: float) -> None:
        until_readable(fds, seconds)

    # Failures

    def _record_failures(self, exitcodes: Mapping[int, int | None]) -> None:
        """Record workers that failed on their own. Never called for workers that are being stopped."""
        orphans = self._orphans(self._reaper) if self._reaper is not None and self._reaper.lost else []
        for rank, process in self._processes.items():
            exitcode = -signal.SIGKILL if rank in orphans else exitcodes[rank]
            if exitcode is None or rank in self._failures:
                continue
            fault = self._failure_reason(rank, exitcode) or process.fault
            if rank in orphans and self._reaper is not None:
                fault = self._reaper.lost_reason
            if exitcode or fault:
                self._failures[rank] = self._failure(rank, process.program_pid, exitcode)
                self._failures[rank].set_reason(fault)
                self._failures[rank].remark = process.remark

    def _orphans(self, lost: ReaperClient) -> list[int]:
        """Local ranks of workers that were running when the reaper was lost; they have been killed."""
        orphans = [rank for rank, process in self._processes.items() if process.poll() is None or process.orphaned]
        if orphans and not self._failures:
            from rallypoint.workers.stop import kill_trees

            log.error("%s", lost.lost_reason)
            kill_trees(self._processes.values())
        return orphans

    def _failure(self, rank: int, pid: int, exitcode: int) -> ProcessFailure:
        from rallypoint.failures.failure import ProcessFailure

        output, error_file = self._outputs[rank], self.error_files.get(rank, "")
        failure = ProcessFailure(
            *(rank, pid, exitcode, error_file),
            last_lines=output.last_lines(),
            last_stdout=output.last_stdout(),
            log=output.log,
            stdout=output.files[0],
            program=self.entrypoint if isinstance(self.entrypoint, str) else "",
        )
        if exitcode:
            from rallypoint.failures.failure import explain_signal

            ended = [process for process in self._processes.values() if process.exitcode == -signal.SIGKILL]
            explain_signal(failure, self._oom_kills, sum(not process.signalled for process in ended))
        return failure

    def failure_so_far(self, local_rank: int) -> tuple[ProcessFailure, float]:
        """Describe a worker's failure as if it exited with 1 now, and the seconds since its last output."""
        return self._failure(local_rank, self._processes[local_rank].program_pid, 1), self._outputs[local_rank].age()

    def failed_behind(self, local_rank: int) -> ProcessFailure | None:
        """The failure of a worker's program while the command that wraps it is still running."""
        process = self._processes[local_rank]
        if not (code := process.program_code):
            return None
        failure = self._failure(local_rank, process.pid, code)
        failure.remark = "its --wrap command has not exited"
        return failure

    # Stop

    def begin_close(
        self,
        death_sig: signal.Signals | None = None,
        timeout: float = 30,
        limit: float = 0.0,
        *,
        sent: bool = False,
        leaving: LeavingWorkers | None = None,
        leaving_time: float = 0.0,
        leftover_time: float = 0.0,
    ) -> Stop:
        """Begin to close, and return the stop to drive to its end. If a stop already began, also stop the workers that
        wait for the next round, or would have waited.

        Args:
            death_sig, timeout, sent: see `close`.
            limit: seconds for which a process that is writing a file is spared, if longer than `timeout`.
            leaving: workers that were asked to leave their round. Those that do within `leaving_time` seconds are
                `held`.
            leftover_time: seconds to wait for busy processes left behind by workers that succeeded.
        """
        number = death_sig or signal.SIGTERM
        if self.stopping is not None:
            if self.stopping.over and not self._closed:
                # Without workers that ended meanwhile: nobody stopped those.
                self._were_held = [rank for rank in self.held if self._processes[rank].poll() is None]
            self.stopping.stop_held(number, timeout, sent=sent)
            return self.stopping
        from rallypoint.workers.stop import Stop

        leftovers = None
        if leftover_time > 0 and self._reaper is not None and (succeeded := self.succeeded):
            from rallypoint.workers.leftovers import Leftovers

            ranks = {process.pid: int(self.envs[rank].get("RANK", rank)) for rank, process in self._processes.items()}
            waited = {ranks[self._processes[rank].pid] for rank in succeeded}
            leftovers = Leftovers(self._reaper.pid, self._reaper.excluded, ranks, waited, leftover_time)
        self.stopping = Stop(
            self._processes,
            self._sweep(),
            number,
            timeout,
            limit,
            sent=sent,
            leaving=leaving,
            leaving_time=leaving_time,
            finish=self._on_stopped,
            leftovers=leftovers,
        )
        return self.stopping

    def shorten_close(self, until: float) -> None:
        """If stopping has begun, end the processes' time at this moment, on the monotonic clock."""
        if self.stopping is not None:
            self.stopping.shorten(until)

    def stop_held(self, death_sig: signal.Signals, timeout: float) -> None:
        """After the stop in progress, keep no worker: stop them all with this signal, within `timeout` seconds."""
        if self.stopping is not None:
            self.stopping.stop_held(death_sig, timeout)

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30, *, sent: bool = False) -> None:
        """Stop all running processes, write all remaining output, and release everything. Idempotent.

        Args:
            death_sig: the first signal; SIGTERM by default. SIGKILL also hurries a stop in progress.
            timeout: seconds between this signal and SIGKILL.
            sent: whether another process sends the signal.
        """
        if self._closed:
            return
        from rallypoint.workers.stop import run_to_end

        stopping = self.begin_close(death_sig, timeout, sent=sent)
        if death_sig == signal.SIGKILL:
            stopping.kill_now()
        try:
            run_to_end(stopping)
        except BaseException:
            stopping.kill_now()
            raise

    def _on_stopped(self) -> None:
        """Note that no worker is in the round any more."""
        held = self.held
        if not held:
            self._finish()
            return
        ended = self._processes.keys() - held
        for rank in ended:
            self._processes[rank].release()
        self._console.end([self._outputs[rank] for rank in ended])
        log.info("%d of %d workers are waiting in their processes for the next round", len(held), len(self._processes))

    def _finish(self) -> None:
        """Write all remaining output, and release everything."""
        self._console.end(self._outputs.values())
        if self._options.console is None:
            self._console.close()
        for process in self._processes.values():
            process.release()
        if self._owns_reaper and self._reaper is not None:
            self._reaper.close()
        self._closed = True

    # Workers that keep their processes

    @property
    def held(self) -> tuple[int, ...]:
        """Local ranks of workers that are waiting in their processes for the next round."""
        return () if self.stopping is None else self.stopping.held

    def output_of(self, rank: int) -> WorkerOutput:
        return self._outputs[rank]

    def relabel(self, rank: int, output: WorkerOutput) -> None:
        """Label a worker's lines with a local rank of this context, which will adopt it.

        Call this before the worker enters the round:

            1. the agent asks it to enter the round, and loses its processor;
            2. the worker writes a line, which the thread that shows lines reads at once;
            3. a label changed now would come too late.
        """
        output.relabel(self.prefixes.get(rank, ""), int(self.envs[rank].get("RANK", rank)))

    def hand_over(self, rank: int) -> HeldWorker:
        """Hand a waiting worker over to the next round's context, which has the same console. Call this once per
        worker."""
        if self.stopping is not None:
            self.stopping.hand_over(rank)
        return HeldWorker(self._processes.pop(rank), self._outputs.pop(rank), self.envs[rank])

    def end_held(self, spared: Collection[int]) -> None:
        """Kill the waiting workers that were not handed over. Returns when they and everything that they left behind
        are gone, or after a second or two. `spared`: pids of other contexts' workers, spared with their descendants."""
        if self.stopping is not None and self.stopping.held:
            from rallypoint.workers.stop import run_to_end

            self.stopping.end_held(spared)
            run_to_end(self.stopping)

    def adopt(self, rank: int, held: HeldWorker) -> None:
        """Take over a worker in its process for this local rank, instead of starting one. Call this after `relabel`."""
        self._processes[rank], self._outputs[rank] = held.process, held.output
        streams = (self.stdouts, self.dest.tee_stdouts), (self.stderrs, self.dest.tee_stderrs)
        for (files, shown), path in zip(streams, held.output.files, strict=True):
            if path not in ("", os.devnull):
                link_log(path, files[rank])
            files[rank] = path
            shown.update({rank: path} if rank in shown else {})


class SubprocessContext(PContext):
    def _start_each(self, starts: Sequence[WorkerStart]) -> Iterator[tuple[int, ChildProcess]]:
        assert self._reaper is not None
        options, commands = self._options, {}
        kinds: dict[int, Callable[[ReaperClient, ProcessHandle], ChildProcess]] = {}
        for rank, stdout, stderr, cpus in starts:
            argv: Sequence[str] = [str(self.entrypoint), *map(str, self.args[rank])]
            changed = None if options.command is None else options.command(rank, argv)
            forked = None
            if changed is not None:
                argv, kinds[rank] = changed
            elif options.fork is not None:
                forked = options.fork(argv, {**os.environ, **self.envs[rank]}, stdout, stderr, cpus)
            if forked is not None:
                if options.waits_for_place:
                    self._reaper.adopt(forked.pid, excluded=True)
                yield rank, AdoptedProcess(self._reaper, forked)
            else:
                commands[rank] = Command(argv, self.envs[rank], (None, stdout, stderr), cpus)
        excluded = options.waits_for_place
        started = start_workers(self._reaper, [*commands.values()], os.environ, excluded=excluded) if commands else []
        for rank, worker in zip(commands, started, strict=True):
            yield rank, kinds.get(rank, AdoptedProcess)(self._reaper, worker)
