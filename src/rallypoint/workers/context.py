"""All worker processes of one start on one node, as one object (contract sections 6.1 and 6.2).

Law: a context is closed when all its processes, and whatever they have spawned, are gone, not before: a `close` that an
exception cuts short (a ^C) has sent SIGKILL to all of them at least, and the next `close` finishes.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.base.light_dataclasses import dataclass, field
from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple
from rallypoint.base.poll import until_readable
from rallypoint.logs.specs import LogsDest, LogsSpecs

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.workers.escalation import StopInProgress
    from rallypoint.workers.handover import Handover
    from rallypoint.workers.preload.manager import PreloadManager


@dataclass
class RunProcsResult:
    """How the processes ended, by local rank.

    `failures` holds those that failed on their own; `stdouts` and `stderrs` are paths, empty where there is no file.
    """

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether any process failed."""
        return bool(self.failures)


class ProcessOptions(NamedTuple):
    """Options of a job's processes.

    `numa_options` says which processors each is bound to, None for any. Teed lines that hold one of the filters' texts
    also go to a file of their own. `start_method` is how functions are started. Programs are forked from what `preload`
    has imported, as far as they can be; it is below the same reaper.
    """

    numa_options: NumaOptions | None = None
    stdout_filters: Sequence[str] | None = None
    stderr_filters: Sequence[str] | None = None
    start_method: str = "spawn"
    preload: PreloadManager | None = None
    collapse: float = 0.0
    """Seconds within which equal teed lines of several ranks are shown once; 0 for never."""
    ignored_signals: Collection[int] = ()
    """Signals that the processes ignore until they have handlers of their own."""
    reads_all_output: bool = False
    """Whether standard output that no file takes passes through this process too, so that `output_marks` shows it."""

    def cpus(self, workers: int) -> Sequence[Collection[int]]:
        """The processors of each worker, empty for all processors. Raises UserError if there are none for one."""
        found = None
        if self.numa_options is not None:
            from rallypoint.base.topology import worker_cpus

            found = worker_cpus(self.numa_options, workers, os.environ)
        return [()] * workers if found is None else found


class PContext(ABC):
    """Processes that start, are watched and end together. Used once: start, watch, close."""

    handover: Handover | None = None
    """Ends the round and holds the workers that go on, once that has begun."""

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
        self.without_stacks: set[int] = set()
        """Local ranks that hang and whose stacks have not been collected: they write them when they are ended."""
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
        """Start all. If one cannot be started, those already started are ended, and the error is raised."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Local rank to process id."""

    def last_lines(self, local_rank: int) -> Callable[[], bytes]:
        """A function that returns the end of a worker's standard error, as far as it is kept: also after `close`, when
        the worker has gone on in another context, and from any thread.
        """
        return bytes

    @abstractmethod
    def exit_fds(self) -> list[int]:
        """Descriptors of processes that had not ended at the last `poll`; readable once they have."""

    @abstractmethod
    def poll(self) -> RunProcsResult | None:
        """Check without waiting: None while all is well, else the result. Stops nothing.

        After `close` it returns what was known before; `return_values` holds those that succeeded before or during it.
        """

    @property
    def stopped(self) -> tuple[int, ...]:
        """Local ranks that were sent a signal to stop while they still ran; none by default."""
        return ()

    @property
    def survivors(self) -> tuple[int, ...]:
        """Local ranks of those that wait in their processes for the next round."""
        return () if self.handover is None else self.handover.survivors

    def keep_nobody(self, death_sig: signal.Signals, timeout: float) -> None:
        """Let no worker go on after the stop in progress: all are stopped by this signal, within `timeout` seconds."""
        if self.handover is not None:
            self.handover.keep_nobody(death_sig, timeout)

    @property
    def succeeded(self) -> tuple[int, ...]:
        """Local ranks that have succeeded without being asked to stop; none by default."""
        return ()

    @property
    def running(self) -> tuple[int, ...]:
        """Local ranks that have not ended; all by default."""
        return tuple(range(self.nprocs))

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit codes of those that have ended, by local rank; none by default."""
        return {}

    @property
    def ended_in_order(self) -> bool:
        """Whether all processes have ended with success or by SIGTERM; False by default."""
        return False

    @property
    def must_be_polled(self) -> bool:
        """Whether a process can end without a descriptor that shows it (see `ChildProcess.held_by_debugger`)."""
        return False

    def forward_signal(self, number: int) -> None:
        """Forward a signal to each running process; does nothing where that is not possible."""
        return

    def announce_stacks(self, pid: int) -> None:
        """A process is about to write the stacks of its threads: log whose they are. Does nothing here."""
        return

    def output_ages(self) -> Callable[[], tuple[float, ...]]:
        """A function that returns the seconds since each process has written something; empty if that is not known.

        It asks the file system, of which a disk may hang, so it is for another thread.
        """
        return tuple

    def output_marks(self) -> Callable[[], object] | None:
        """A function that returns a value that changes when a process has written anything; None if that cannot be
        known.

        It asks the file system, of which a disk may hang, so it is for another thread.
        """
        return None

    @abstractmethod
    def begin_close(
        self,
        death_sig: signal.Signals | None = None,
        timeout: float = 30,
        limit: float = 0.0,
        *,
        sent: bool = False,
    ) -> StopInProgress:
        """Begin to close, and return the object that drives it to its end; the same object if it has begun already.

        Args:
            death_sig, timeout, sent: see `close`.
            limit: seconds for which a process that is writing a file is spared, if that is more than `timeout`.
        """

    def shorten_close(self, until: float) -> None:
        """If stopping has begun: end the time that processes have at this moment, on the monotonic clock."""
        return

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30, *, sent: bool = False) -> None:
        """Stop what still runs, write all remaining output, and release everything. Idempotent.

        Args:
            death_sig: the first signal; SIGTERM if not given. SIGKILL also hurries a stop that has begun.
            timeout: seconds between it and SIGKILL.
            sent: whether the signal is sent to the processes from elsewhere.
        """
        from rallypoint.workers.escalation import run_to_end

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
            timeout: seconds; 0 polls once, negative waits forever.
            period: seconds between polls where a debugger holds a process; else exits wake us.

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
        """Wait this long for something that `poll` may report."""
        until_readable(self.exit_fds(), seconds)


def _check_ranks(what: str, mapping: Mapping[int, object], nprocs: int) -> None:
    if set(mapping) != set(range(nprocs)):
        from rallypoint.base.errors import user_error

        ranks = f"{what} are for the local ranks {sorted(mapping)}; they must be for 0 to {nprocs - 1}"
        raise user_error(ranks, RuntimeError)
