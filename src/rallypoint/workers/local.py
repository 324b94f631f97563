"""Contexts of processes that a reaper, or a process below it, starts on this node.

Laws:

1. From the moment that stopping begins, no worker is found to have failed: those that end then were stopped.
2. If the reaper is lost, the workers that were not known to have ended have failed; they are killed with all that can
   be found, as far as the reaper's supervisor has not done that already.
3. A worker that goes on in its process is handed from the context of one round to that of the next, with its outputs:
   at each moment one context has it, and answers for it as for those that it has started itself.
"""

from __future__ import annotations

import os
import signal
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from rallypoint.base.light_dataclasses import replace
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger
from rallypoint.base.signals import exit_codes_of
from rallypoint.logs.outputs import Outputs
from rallypoint.logs.specs import LogsSpecs, link_log
from rallypoint.workers.context import PContext, ProcessOptions, RunProcsResult
from rallypoint.workers.process import AdoptedProcess, ChildProcess, WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient

if TYPE_CHECKING:
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.failures.out_of_memory import OomKills
    from rallypoint.logs.collapse import Collapse
    from rallypoint.workers.escalation import Escalation, StopInProgress, SweepInProgress
    from rallypoint.workers.handover import Survivor
    from rallypoint.workers.resumable import LeavingWorkers

log = get_logger(__name__)


class LocalProcessesContext(PContext):
    """Base of our contexts, however they start each of their workers.

    Args:
        reaper: starts the workers; None for one of this context's own, which ends with it.
        options: further options of the workers.
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
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes)
        self._reaper = reaper
        self._owns_reaper = reaper is None
        self._options = options or ProcessOptions()
        self._processes: dict[int, ChildProcess] = {}
        self._outputs: dict[int, Outputs] = {}
        self._failures: dict[int, ProcessFailure] = {}
        self._oom_kills: OomKills | None = None
        self._closing: Escalation | None = None
        self._polled_ended: Collection[int] = ()
        """Local ranks whose end `poll` has reported; that of others wakes its caller, whoever else has seen it."""
        self._started = False
        self._closed = False

    @abstractmethod
    def _start_one(self, rank: int, stdout: int | None, stderr: int | None, cpus: Collection[int]) -> ChildProcess:
        """Start the worker of a local rank with these descriptors, None for ours, on these processors."""

    def _prepare(self) -> None:
        """Prepare what `_start_one` needs."""
        self._reaper = self._reaper or ReaperClient()
        self._reaper.ignored = self._options.ignored_signals

    def _sweep(self) -> SweepInProgress:
        """The sweep that ends all workers and all that they have left."""
        if self._reaper is None:  # nothing was ever started
            from rallypoint.workers.escalation import NoSweep

            return NoSweep()
        from rallypoint.workers.sweep import Sweep

        return Sweep(self._reaper, list(self._processes.values()))

    def _failure_reason(self, rank: int, exitcode: int) -> str:
        """Why a worker has failed, if its exit code does not show it; else, and if it has not failed, empty."""
        return ""

    def _value(self, rank: int) -> Any:
        """The return value of a worker that has succeeded."""
        return None

    def start(self) -> None:
        if self._started:
            raise ValueError(f"the processes of {self.name!r} have been started before; make a new context")
        self._started = True
        try:
            self._prepare()
            new = [rank for rank in range(self.nprocs) if rank not in self._processes]
            if new:
                self._start_new(new)
            for rank, process in self._processes.items():
                process.on_stacks = partial(self.announce_stacks, process.pid)
                process.stacks_wanted = partial(self.without_stacks.__contains__, rank)
            from rallypoint.failures.out_of_memory import OomKills

            self._oom_kills = OomKills()
        except BaseException:
            self.close(signal.SIGKILL)
            raise

    def _start_new(self, ranks: Sequence[int]) -> None:
        outputs = Outputs(
            replace(self.dest, collapse=self._collapse(), reads_all=self._options.reads_all_output),
            ranks,
            self.prefixes,
            stdout_filters=self._options.stdout_filters,
            stderr_filters=self._options.stderr_filters,
        )
        self._outputs.update(dict.fromkeys(ranks, outputs))
        cpus = self._options.cpus(self.nprocs)
        for rank in ranks:
            self._processes[rank] = self._start_one(rank, *outputs.stdio(rank), cpus[rank])
            outputs.started(rank)
        self._processes = dict(sorted(self._processes.items()))

    def adopt(self, rank: int, survivor: Survivor) -> None:
        """Take over the worker of a local rank, which goes on in its process, instead of starting one."""
        self._processes[rank], self._outputs[rank] = survivor.process, survivor.outputs
        survivor.outputs.relabel(rank, self.prefixes.get(rank, ""), int(self.envs[rank].get("RANK", rank)))
        streams = (self.stdouts, self.dest.tee_stdouts), (self.stderrs, self.dest.tee_stderrs)
        for (files, shown), path in zip(streams, survivor.outputs.paths(rank), strict=True):
            if path not in ("", os.devnull):
                link_log(path, files[rank])
            files[rank] = path
            shown.update({rank: path} if rank in shown else {})

    def _collapse(self) -> Collapse | None:
        """The options for showing equal lines of several workers once, if that is wanted."""
        if not self._options.collapse:
            return None
        from rallypoint.logs.collapse import Collapse

        ranks = {rank: int(env.get("RANK", rank)) for rank, env in self.envs.items()}
        return Collapse(self._options.collapse, ranks)

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def last_lines(self, local_rank: int) -> Callable[[], bytes]:
        return partial(self._outputs[local_rank].last_lines, local_rank) if local_rank in self._outputs else bytes

    def exit_fds(self) -> list[int]:
        waited = (
            []
            if self._closed or self.handover is not None
            else [each for rank, each in self._processes.items() if rank not in self._polled_ended]
        )
        running = [each.fileno() for each in waited if not each.held_by_debugger]
        if waited and self._reaper is not None:  # also one that is lost: `poll` must follow at once
            running.append(self._reaper.fileno())
        return running

    def poll(self) -> RunProcsResult | None:
        # Each is polled once: one that ended between two polls would be neither a failure nor a success.
        exitcodes = {rank: process.poll() for rank, process in self._processes.items()}
        self._polled_ended = {rank for rank, exitcode in exitcodes.items() if exitcode is not None}
        if self._closing is None and self.handover is None:
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
        return tuple(rank for rank, process in self._processes.items() if process.signalled)

    @property
    def succeeded(self) -> tuple[int, ...]:
        well = (rank for rank, process in self._processes.items() if process.poll() == 0 and not process.signalled)
        return tuple(rank for rank in well if rank not in self._failures)

    @property
    def running(self) -> tuple[int, ...]:
        if self._closed or (self.handover is not None and self.handover.over):
            return ()
        return tuple(rank for rank, each in self._processes.items() if each.poll() is None)

    @property
    def exit_codes(self) -> dict[int, int]:
        return {rank: code for rank, each in self._processes.items() if (code := each.poll()) is not None}

    @property
    def ended_in_order(self) -> bool:
        those = self._processes if self.handover is None or self._closing is None else self.handover.waited
        return all(self._processes[rank].poll() in (0, *exit_codes_of(signal.SIGTERM)) for rank in those)

    @property
    def must_be_polled(self) -> bool:
        return not self._closed and any(
            each.held_by_debugger and not each.seen_ended for each in self._processes.values()
        )

    def forward_signal(self, number: int) -> None:
        for process in self._processes.values():
            process.forward_signal(number)

    def announce_stacks(self, pid: int) -> None:
        rank = next((rank for rank, each in self._processes.items() if each.pid == pid), None)
        if rank is None or rank not in self._outputs:
            return
        own = self.envs[rank].get("RANK")
        name = f"{f'local rank {rank}' if own is None else f'rank {own}'} on {os.uname().nodename}"
        path = self._outputs[rank].log_of(rank)
        log.warning("the stacks of %s (pid %d) %s", name, pid, f"are in {os.path.abspath(path)}" if path else "follow")
        self._outputs[rank].label(rank, f"[{name}] ")

    def _record_failures(self, exitcodes: Mapping[int, int | None]) -> None:
        """Record workers that have failed on their own. Those that are being stopped are never looked at here."""
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
        """Local ranks of the workers that ran when the reaper was lost; they have been killed."""
        if self._reaper is None or not self._reaper.lost:
            return []
        orphans = [rank for rank, each in self._processes.items() if each.poll() is None or each.orphaned]
        if orphans and not self._failures:
            from rallypoint.workers.sweep import kill_trees

            log.error("%s", self._reaper.lost_reason)
            kill_trees(self._processes.values())
        return orphans

    def _failure(self, rank: int, pid: int, exitcode: int) -> ProcessFailure:
        from rallypoint.failures.failure import ProcessFailure

        outputs, error_file = self._outputs[rank], self.error_files.get(rank, "")
        lines, log_path = outputs.last_lines(rank), outputs.log_of(rank)
        failure = ProcessFailure(rank, pid, exitcode, error_file, last_lines=lines, log=log_path)
        if exitcode:
            from rallypoint.failures.system_diagnosis import explain_signal

            ended = [each for each in self._processes.values() if each.poll() == -signal.SIGKILL]
            explain_signal(failure, self._oom_kills, sum(not each.signalled for each in ended))
        return failure

    def output_ages(self) -> Callable[[], tuple[float, ...]]:
        outputs = sorted(self._outputs.items())
        return lambda: tuple(each.age(rank) for rank, each in outputs)

    def output_marks(self) -> Callable[[], object] | None:
        if not self._outputs or not self._options.reads_all_output:
            return None
        outputs = {id(each): each for each in self._outputs.values()}.values()
        return lambda: [each.marks() for each in outputs]

    def begin_close(
        self,
        death_sig: signal.Signals | None = None,
        timeout: float = 30,
        limit: float = 0.0,
        *,
        sent: bool = False,
    ) -> StopInProgress:
        if self._closing is None:
            from rallypoint.workers.escalation import Escalation

            if self.handover is not None:
                self.handover.give_up()
            processes, number = list(self._processes.values()), death_sig or signal.SIGTERM
            sweep = self._sweep()
            self._closing = Escalation(processes, sweep, number, timeout, limit, sent=sent, finish=self._finish)
        return self._closing

    def shorten_close(self, until: float) -> None:
        stopping = self._closing or self.handover
        if stopping is not None:
            stopping.shorten(until)

    # Workers that go on in their processes

    def begin_release(
        self,
        leaving: LeavingWorkers,
        timeout: float,
        death_sig: signal.Signals,
        grace: float,
        limit: float,
        *,
        sent: bool,
    ) -> StopInProgress:
        """Begin to end all workers except those that leave their round in time: `handover` holds these then.

        Args:
            leaving: the workers that were told to leave.
            timeout: seconds within which they have to.
            death_sig, grace, limit, sent: how the others are stopped; see `begin_close`.
        """
        from rallypoint.workers.escalation import Escalation, NoSweep
        from rallypoint.workers.handover import Handover

        assert self._reaper is not None
        others = [each for rank, each in self._processes.items() if rank not in leaving.told]
        stop = Escalation(others, NoSweep(), death_sig, grace, limit, sent=sent)
        self.handover = Handover(self._reaper, self._processes, self._outputs, self.envs)
        return self.handover.begin(leaving, stop, timeout, limit)

    def _finish(self) -> None:
        """Write all remaining output, and release everything."""
        for outputs in {id(each): each for each in self._outputs.values()}.values():
            outputs.close()
        for process in self._processes.values():
            process.release()
        if self._owns_reaper and self._reaper is not None:
            self._reaper.close()
        self._closed = True


class SubprocessContext(LocalProcessesContext):
    """Workers that are commands."""

    def _start_one(self, rank: int, stdout: int | None, stderr: int | None, cpus: Collection[int]) -> ChildProcess:
        assert self._reaper is not None
        argv = [str(self.entrypoint), *map(str, self.args[rank])]
        environ = {**os.environ, **self.envs[rank]}
        preload = self._options.preload
        started = None if preload is None else preload.start(argv, environ, stdout, stderr, cpus)
        if started is not None:
            return AdoptedProcess(self._reaper, started)
        return WorkerProcess(self._reaper, argv, environ, stdout, stderr, cpus)
