"""All worker processes of one start on one node, as one thing (contract sections 6.1 and 6.2).

Laws:

1. A context is closed when all its processes are stopped and reaped, not before: a `close` that an exception cuts
   short (a ^C) has ended them by SIGKILL at least, and the next `close` finishes.
2. From the moment that stopping begins, nobody is found to have failed: those who end then were asked to.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.base.errors import UserError
from rallypoint.logs.outputs import Outputs
from rallypoint.logs.specs import LogsDest, LogsSpecs
from rallypoint.workers.process import WorkerProcess
from rallypoint.workers.stop import stop_all

if TYPE_CHECKING:
    from rallypoint.failures.failure import ProcessFailure


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

    @abstractmethod
    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop what still runs, carry all output through, and let go of everything. Idempotent.

        Args:
            death_sig: the signal that asks; SIGTERM if not given.
            timeout: seconds between it and SIGKILL.
        """

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all have succeeded or one has failed, and stop the others then.

        Args:
            timeout: seconds; 0 looks once, negative waits for ever.
            period: accepted for torch's callers; exits wake us by themselves.

        Returns:
            None if the time is up and all is well.
        """
        import select

        deadline = Deadline(float("inf") if timeout < 0 else SYSTEM_CLOCK.monotonic() + timeout, SYSTEM_CLOCK)
        while (result := self.poll()) is None and not deadline.expired:
            poller = select.poll()
            for fd in self.exit_fds():
                poller.register(fd, select.POLLIN)
            remaining = deadline.remaining()
            poller.poll(None if remaining == float("inf") else remaining * 1000 + 1)
        if result is not None:
            self.close()
        return result


class SubprocessContext(PContext):
    """Workers that are commands."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes)
        self._program = entrypoint
        self._processes: dict[int, WorkerProcess] = {}
        self._outputs: Outputs | None = None
        self._failures: dict[int, ProcessFailure] = {}
        self._stopping = False
        self._closed = False

    def start(self) -> None:
        """Start all. If one cannot be started, those that were are ended, and the error goes on."""
        if self._outputs is not None:
            raise ValueError(f"the processes of {self.name!r} have been started before; make a new context")
        self._outputs = outputs = Outputs(self.dest, self.nprocs, self.prefixes)
        try:
            for rank in range(self.nprocs):
                argv = [self._program, *map(str, self.args[rank])]
                stdout, stderr = outputs.stdio(rank)
                self._processes[rank] = WorkerProcess(argv, {**os.environ, **self.envs[rank]}, stdout, stderr)
                outputs.started(rank)
        except BaseException:
            self.close(signal.SIGKILL)
            raise

    def pids(self) -> dict[int, int]:
        """Local rank to process id."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def exit_fds(self) -> list[int]:
        """Descriptors of processes that had not ended at the last `poll`."""
        return [] if self._closed else [each.fileno() for each in self._processes.values() if not each.seen_ended]

    def poll(self) -> RunProcsResult | None:
        """Look, without waiting: None while all is well, else how it ended. Stops nothing."""
        if not self._stopping:
            self._note_failures()
        if self._failures:
            return RunProcsResult({}, dict(self._failures), self.stdouts, self.stderrs)
        exitcodes = {rank: process.poll() for rank, process in self._processes.items()}
        if None in exitcodes.values() and not self._closed:
            return None
        succeeded = [rank for rank, exitcode in exitcodes.items() if exitcode == 0]
        return RunProcsResult(dict.fromkeys(succeeded), {}, self.stdouts, self.stderrs)

    @property
    def stopped(self) -> tuple[int, ...]:
        """Local ranks that were sent a signal to stop while they still ran."""
        return tuple(rank for rank, process in self._processes.items() if process.signalled)

    def _note_failures(self) -> None:
        """Remember who has failed by itself. The exits of those whom the ladder stops are never looked at here."""
        for rank, process in self._processes.items():
            exitcode = process.poll()
            if exitcode and rank not in self._failures:
                self._failures[rank] = self._failure(rank, process.pid, exitcode)

    def _failure(self, rank: int, pid: int, exitcode: int) -> ProcessFailure:
        from rallypoint.failures.failure import ProcessFailure

        assert self._outputs is not None
        last_lines = self._outputs.last_lines(rank)
        return ProcessFailure(rank, pid, exitcode, self.error_files.get(rank, ""), last_lines=last_lines)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Stop what still runs, carry all output through, and let go of everything. Idempotent."""
        if self._closed:
            return
        self._stopping = True
        processes = list(self._processes.values())
        try:
            stuck = stop_all(processes, death_sig or signal.SIGTERM, timeout)
            for process in processes:
                if process not in stuck:
                    process.reap()
        except BaseException:
            for process in processes:
                process.signal(signal.SIGKILL)
            raise
        if self._outputs is not None:
            self._outputs.close()
        self._closed = True


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    start_method: str = "spawn",
) -> PContext:
    """Start one process for each local rank (contract section 6.1).

    Args:
        name: what messages call the group.
        entrypoint: a program to run.
        args: local rank to its arguments, made strings by `str`.
        envs: local rank to what is added to the agent's environment.
        logs_specs: where output goes.
        log_line_prefixes: local rank to what stands before each teed line.
        start_method: how functions are started; of no matter to programs.

    Raises:
        UserError: the ranks of `args` or `envs` are not 0 to n-1, the program cannot be run, or it is a function,
            which this release cannot start yet.
    """
    if not isinstance(entrypoint, str):
        raise UserError(
            f"the entry point {entrypoint!r} is a function, which this release cannot start yet "
            f"(start method {start_method}); put it into a script and run that"
        )
    context = SubprocessContext(name, entrypoint, args, envs, logs_specs, log_line_prefixes)
    context.start()
    return context


def _check_ranks(what: str, mapping: Mapping[int, object], nprocs: int) -> None:
    if set(mapping) != set(range(nprocs)):
        raise UserError(f"{what} are for the local ranks {sorted(mapping)}; they must be for 0 to {nprocs - 1}")
