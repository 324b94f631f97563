"""The agent whose workers are processes of this host (contract section 8, `LocalElasticAgent`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from typing import Any

from rallypoint.agent.api import SimpleElasticAgent
from rallypoint.agent.environment import worker_environment
from rallypoint.agent.spec import RunResult, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.base.log import get_logger
from rallypoint.logs.prefix import line_prefixes
from rallypoint.logs.specs import LogsSpecs
from rallypoint.workers.context import PContext, start_processes
from rallypoint.workers.guardian.client import Guardian
from rallypoint.workers.guardian.early import take
from rallypoint.workers.macros import macros
from rallypoint.workers.stop import Stopping

log = get_logger(__name__)


class LocalElasticAgent(SimpleElasticAgent):
    """Starts the workers as processes, wakes at their exits, and leaves none behind."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
    ) -> None:
        """Make an agent; nothing happens before `run`.

        Args:
            spec: what to run.
            logs_specs: where the workers' output goes.
            start_method: how workers that are functions are started.
            exit_barrier_timeout: see `SimpleElasticAgent`.
            log_line_prefix_template: what stands before each teed line (contract section 6.5).
            shutdown_timeout: seconds between the signal that stops workers and SIGKILL.
        """
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout)
        self._start_method = start_method
        self._logs_specs = logs_specs
        self._log_line_prefix_template = log_line_prefix_template
        self._pcontext: PContext | None = None
        self._guardian: Guardian | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        assert spec.entrypoint is not None
        restarts = self._placed().restarts
        args, envs = {}, {}
        for worker in worker_group.workers:
            rank = worker.local_rank
            args[rank] = tuple(macros.substitute(spec.args, str(rank)))
            envs[rank] = worker_environment(worker_group, worker, restarts, os.environ)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        prefixes = line_prefixes(self._log_line_prefix_template, spec.role, ranks)
        log.info("[%s] Starting worker group", spec.role)
        log.info("use_agent_store: %s", spec.rdzv_handler.use_agent_store)
        guardian = self._guarded()
        self._pcontext = start_processes(
            spec.role,
            spec.entrypoint,
            args,
            envs,
            self._logs_specs,
            prefixes,
            self._start_method,
            guardian=guardian,
            made=lambda: self._see_to_folders(guardian, worker_group.notices),
        )
        guardian.shrink()
        return dict(self._pcontext.pids())

    def _see_to_folders(self, guardian: Guardian, notices: str) -> None:
        """Have removed what this run makes, should this process end without doing so."""
        temporary = self._logs_specs.temporary
        guardian.remove_at_the_end(empty=[temporary] if temporary else [], whole=[notices] if notices else [])

    def _guarded(self) -> Guardian:
        """The guardian of this run, which starts the workers of all rounds; a new one if that is lost."""
        if self._guardian is not None and self._guardian.lost:
            self._dismiss()
        if self._guardian is None:
            self._guardian = take()
        return self._guardian

    def _dismiss(self) -> None:
        guardian, self._guardian = self._guardian, None
        if guardian is not None:
            guardian.close()

    def _invoke_run(self, role: str) -> RunResult:
        self._guarded()  # it gets ready while the nodes come together
        try:
            return super()._invoke_run(role)
        finally:
            self._dismiss()

    def _running_ranks(self) -> Collection[int]:
        return () if self._pcontext is None else self._pcontext.running

    def _pass_on(self, number: int) -> None:
        if self._pcontext is not None:
            self._pcontext.pass_on(number)

    def _exit_fds(self) -> list[int] | None:
        if self._pcontext is None:
            return []
        return None if self._pcontext.must_be_asked else self._pcontext.exit_fds()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._pcontext is None:
            return RunResult(WorkerState.UNKNOWN)
        if set(self._pcontext.pids().values()) != {worker.id for worker in worker_group.workers}:
            log.error("[%s] the workers' process ids are not those that were started", worker_group.spec.role)
            return RunResult(WorkerState.UNKNOWN)
        result = self._pcontext.poll()
        if result is None:
            return RunResult(WorkerState.HEALTHY)
        by_rank = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if result.is_failed():
            failures = {by_rank[rank]: failure for rank, failure in result.failures.items()}
            return RunResult(WorkerState.FAILED, failures=failures)
        values = {by_rank[rank]: value for rank, value in result.return_values.items()}
        state = WorkerState.SUCCEEDED if len(values) == len(by_rank) else WorkerState.STOPPED
        return RunResult(state, return_values=values)

    def _stopped_ranks(self) -> tuple[int, ...]:
        if self._pcontext is None:
            return ()
        by_rank = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return tuple(by_rank[rank] for rank in self._pcontext.stopped)

    def _begin_stop(self, death_sig: signal.Signals, timeout: int) -> Stopping | None:
        if self._stops_differently():
            return super()._begin_stop(death_sig, timeout)
        if self._pcontext is None:
            return None
        stopping = self._pcontext.begin_close(death_sig, timeout)
        return None if stopping.step() else stopping

    def _stops_differently(self) -> bool:
        """Whether a subclass has a way of its own to stop workers, which must be gone then."""
        ours = (LocalElasticAgent._stop_workers, LocalElasticAgent._shutdown)
        return (type(self)._stop_workers, type(self)._shutdown) != ours

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout)
        self._dismiss()
