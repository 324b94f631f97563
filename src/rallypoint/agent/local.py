"""The agent whose workers are processes of this host (contract section 8, `LocalElasticAgent`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rallypoint.agent.api import SimpleElasticAgent
from rallypoint.agent.environment import worker_environment
from rallypoint.agent.handled import PASSED_ON, handled_signals, scheduler
from rallypoint.agent.spec import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.base.errors import SignalException
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name, signals_to
from rallypoint.logs.prefix import line_prefixes
from rallypoint.logs.specs import LogsDest, LogsSpecs
from rallypoint.telemetry.door import profiled
from rallypoint.workers.context import PContext, start_processes
from rallypoint.workers.guardian.client import Guardian, GuardianLost
from rallypoint.workers.guardian.early import take
from rallypoint.workers.macros import macros
from rallypoint.workers.stop import Stopping

if TYPE_CHECKING:
    from rallypoint.health.check import HealthCheckServer
    from rallypoint.watchdog.minder import Minder
    from rallypoint.watchdog.requests import FileTimerRequest
    from rallypoint.workers.forwarding import Forwarding
    from rallypoint.workers.warm.starts import WarmStarts

log = get_logger(__name__)

TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


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
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
        failure_grace: float | None = None,
        chosen_timeout: bool = True,
    ) -> None:
        """Make an agent; nothing happens before `run`.

        Args:
            spec: what to run.
            logs_specs: where the workers' output goes.
            start_method: how workers that are functions are started.
            exit_barrier_timeout: see `SimpleElasticAgent`.
            log_line_prefix_template: what stands before each teed line (contract section 6.5).
            shutdown_timeout: seconds between the signal that stops workers and SIGKILL.
            health_check_server: started with the run and stopped at its end; None for one on the port that
                `TORCHELASTIC_HEALTH_CHECK_PORT` names, if it does.
            uninterruptible_state_timeout: seconds that a worker may be stuck in the kernel; the environment's word if
                not given, and 0 for ever.
            failure_grace: see `SimpleElasticAgent`.
            chosen_timeout: see `SimpleElasticAgent`.
        """
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout, failure_grace, chosen_timeout)
        self._start_method = start_method
        self._logs_specs = logs_specs
        self._log_line_prefix_template = log_line_prefix_template
        self._pcontext: PContext | None = None
        self._guardian: Guardian | None = None
        self._warm: WarmStarts | None = None
        self._health_check_server = health_check_server
        self._stuck_after = uninterruptible_state_timeout
        self._minder: Minder | None = None
        self._alone = False
        self._said_where = False
        """Whether it was said where output goes that no console shows."""
        self._forwarding: Forwarding | None = None
        self._passed_on: set[int] = set()

    @profiled
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        assert spec.entrypoint is not None
        restarts = self._restarts
        if not self._driven:
            self._begin_alone()
        minder = self._minder = self._mind()
        args, envs = {}, {}
        for worker in worker_group.workers:
            rank = worker.local_rank
            args[rank] = tuple(macros.substitute(spec.args, str(rank)))
            envs[rank] = worker_environment(worker_group, worker, restarts, os.environ)
            if minder is not None:
                envs[rank].update(minder.environment)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        prefixes = line_prefixes(self._log_line_prefix_template, spec.role, ranks, restarts)
        log.info("[%s] Starting worker group", spec.role)
        log.info("use_agent_store: %s", spec.rdzv_handler.use_agent_store)
        guardian = self._guarded()
        self._passed_on.clear()
        if self._forwarding is not None:
            self._forwarding.forget()
        if self._warm is not None:
            self._warm.prepare(guardian)
        self._pcontext = start_processes(
            spec.role,
            spec.entrypoint,
            args,
            envs,
            self._logs_specs,
            prefixes,
            self._start_method,
            spec.numa_options,
            spec.duplicate_stdout_filters,
            spec.duplicate_stderr_filters,
            guardian=guardian,
            made=lambda: self._see_to_folders(guardian, worker_group.notices),
            warm=self._warm,
        )
        self._say_where(self._pcontext.dest)
        if minder is not None:
            minder.watch(self._pcontext.pids().values())
        guardian.shrink()
        return dict(self._pcontext.pids())

    def _say_where(self, dest: LogsDest) -> None:
        """Say once where to look for output that no console shows."""
        if self._said_where or not (paths := dest.only_in_files):
            return
        self._said_where = True
        folder = os.path.commonpath([os.path.abspath(os.path.dirname(path)) for path in paths])
        names = " and ".join(sorted({os.path.basename(path) for path in paths}))
        log.warning("[%s] output of workers goes to files only: %s in %s", self._worker_group.spec.role, names, folder)

    def _see_to_folders(self, guardian: Guardian, notices: str) -> None:
        """Have removed what this run makes, should this process end without doing so."""
        temporary = self._logs_specs.temporary
        pipes = [] if self._minder is None else self._minder.files
        whole = [*([notices] if notices else []), *pipes]
        guardian.remove_at_the_end(empty=[temporary] if temporary else [], whole=whole)

    def _mind(self) -> Minder | None:
        """What watches the workers that are to start, if the environment or our maker asks for any."""
        self._unmind()
        asked = (TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT)
        if not self._stuck_after and not any(os.environ.get(name) for name in asked):
            return None
        from rallypoint.logs.folders import temporary_folder
        from rallypoint.watchdog.minder import minder_of

        return minder_of(
            os.environ,
            temporary_folder(),
            stuck_after=self._stuck_after,
            run_id=self._worker_group.spec.rdzv_handler.get_run_id(),
            grace=self._shutdown_timeout,
            report=self._watched,
        )

    def _watched(self, name: str, timer: FileTimerRequest | None) -> None:
        """The watchdog has done what `name` says; whoever ends by its timer shows its stacks before."""
        if timer is not None and timer.signal > 0 and self._pcontext is not None:
            self._pcontext.announce_stacks(timer.worker_pid)
        self._telling.watched(name, timer)

    def _unmind(self) -> None:
        minder, self._minder = self._minder, None
        if minder is not None:
            minder.close()

    def _watched_by(self) -> Minder | None:
        return self._minder

    def _guarded(self) -> Guardian:
        """The guardian of this run, which starts the workers of all rounds; a new one if that is lost."""
        if self._guardian is not None and self._guardian.lost:
            self._dismiss()
        if self._guardian is None:
            self._guardian = take()
        return self._guardian

    def _warm_up(self, guardian: Guardian) -> None:
        if self._worker_group.spec.warm:
            from rallypoint.agent.warmth import warm_starts

            self._warm = warm_starts(self._worker_group.spec, guardian)

    def _warmth(self) -> WarmStarts | None:
        return self._warm

    def _dismiss(self) -> None:
        if self._warm is not None:
            self._warm.let_go()
        guardian, self._guardian = self._guardian, None
        if guardian is not None:
            guardian.close()

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        self._warm_up(self._guarded())  # both get ready while the nodes come together
        server = self._health_check()
        if server is not None:
            server.start()
        try:
            return super()._invoke_run(role)
        finally:
            if server is not None:
                server.stop()

    def _let_go(self) -> None:
        # Until here the guardian would have taken away what we leave, should we be killed while we say goodbye.
        self._dismiss()

    def _begin_alone(self) -> None:
        """For a loop that is not ours: what ours and `_invoke_run` see to."""
        if self._alone:
            return
        self._alone = True
        self._warm_up(self._guarded())
        self._until_the_end.enter_context(signals_to(self._on_signal_alone, handled_signals()))
        server = self._health_check()
        if server is not None:
            server.start()
            self._until_the_end.callback(server.stop)

    def _on_signal_alone(self, number: int) -> None:
        if number not in PASSED_ON:
            raise SignalException(f"Process {os.getpid()} got signal {signal_name(number)}", signal.Signals(number))
        self._pass_on(number)

    def _step_alone(self) -> None:
        if self._minder is not None:
            self._minder.step()
        if self._forwarding is not None:
            self._forwarding.step()
        if self._pulse is not None:
            self._pulse.sleeps(time.monotonic(), self._shown())

    def _health_check(self) -> HealthCheckServer | None:
        if self._health_check_server is not None or TORCHELASTIC_HEALTH_CHECK_PORT not in os.environ:
            return self._health_check_server
        from rallypoint.health.check import DEFAULT_TIMEOUT, create_healthcheck_server, wanted_port
        from rallypoint.health.pulse import Pulse

        port = wanted_port()
        if port is None:
            return None
        self._pulse = Pulse()
        return create_healthcheck_server(self._pulse.last_progress, port, DEFAULT_TIMEOUT, self._pulse.status)

    def _running_ranks(self) -> Collection[int]:
        return () if self._pcontext is None else self._pcontext.running

    def _pass_on(self, number: int) -> None:
        self._passed_on.add(number)
        if self._pcontext is not None and self._pcontext.running and not self._signals().takes(number):
            self._pcontext.pass_on(number)

    def _was_only_told(self, number: int) -> bool:
        """Whether a signal, by which a worker has ended, was to tell the workers something."""
        return number in PASSED_ON and (number in self._passed_on or number in self._reached())

    def _shorten_stop(self, until: float) -> None:
        if self._pcontext is not None:
            self._pcontext.shorten_close(until)

    def _in_order(self) -> bool:
        return self._pcontext is None or self._pcontext.in_order

    def _expect_shared(self, number: int) -> None:
        self._signals().takes(number)

    def _reached(self) -> frozenset[int]:
        return self._signals().reached()

    def _forwards(self) -> Forwarding | None:
        return self._forwarding

    def _signals(self) -> Forwarding:
        """What knows which signals the workers have been sent, made when there is one."""
        if self._forwarding is None:
            from rallypoint.workers.forwarding import Forwarding

            self._forwarding = Forwarding(self._heard, self._send_on, scheduler(os.environ) is not None)
        return self._forwarding

    def _have_it(self, number: int) -> bool:
        """Whether the workers that run have been sent the signal by whoever sent it to us, or soon will be by us."""
        runs = self._pcontext is not None and bool(self._pcontext.running)
        return runs and number != signal.SIGKILL and self._signals().in_hand(number)

    def _heard(self) -> Collection[int]:
        try:
            return () if self._guardian is None else self._guardian.heard()
        except GuardianLost:
            return ()

    def _send_on(self, number: int) -> None:
        if self._pcontext is not None:
            self._pcontext.pass_on(number)

    def _exit_fds(self) -> list[int] | None:
        if self._pcontext is None:
            return []
        return None if self._pcontext.must_be_asked else self._pcontext.exit_fds()

    @profiled
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._pcontext is None:
            return RunResult(WorkerState.UNKNOWN)
        if set(self._pcontext.pids().values()) != {worker.id for worker in worker_group.workers}:
            log.error("[%s] the workers' process ids are not those that were started", worker_group.spec.role)
            return RunResult(WorkerState.UNKNOWN)
        if not self._driven:
            self._step_alone()
        by_rank = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        result = self._pcontext.poll()
        if result is None:
            return self._while_they_run(by_rank)
        if result.is_failed():
            for failure in result.failures.values():
                why = "" if self._minder is None else self._minder.why(failure.pid)
                if why and not failure.reason.startswith(why):  # this may be the second look at it
                    failure.blame(f"{why} ({failure.text})")
                elif not failure.reason and self._was_only_told(-failure.exitcode):
                    failure.blame(f"{failure.text}, which was meant for the workers; this one has no handler for it")
            failures = {by_rank[rank]: failure for rank, failure in result.failures.items()}
            self._failed_with = RunResult(WorkerState.FAILED, failures=failures)
            return self._failed_with
        values = {by_rank[rank]: value for rank, value in result.return_values.items()}
        state = WorkerState.SUCCEEDED if len(values) == len(by_rank) else WorkerState.STOPPED
        return RunResult(state, return_values=values)

    def _while_they_run(self, by_rank: dict[int, int]) -> RunResult:
        if self._minder is None or self._pcontext is None or not (stuck := self._minder.stuck):
            return RunResult(WorkerState.HEALTHY)
        from rallypoint.failures.failure import ProcessFailure

        self._remaining_restarts = 0  # such a worker keeps its devices, so that starting again here cannot help
        failures = {}
        for local_rank, pid in self._pcontext.pids().items():
            if pid in stuck:
                failure = failures[by_rank[local_rank]] = ProcessFailure(local_rank, pid, -signal.SIGKILL, "")
                failure.blame(stuck[pid].why)
        return RunResult(WorkerState.UNHEALTHY, failures=failures)

    def _stopped_ranks(self) -> tuple[int, ...]:
        if self._pcontext is None:
            return ()
        return self._global(self._pcontext.stopped)

    def _succeeded_ranks(self) -> tuple[int, ...]:
        return () if self._pcontext is None else self._global(self._pcontext.succeeded)

    def _global(self, local_ranks: Collection[int]) -> tuple[int, ...]:
        by_rank = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return tuple(by_rank[rank] for rank in local_ranks)

    def _begin_stop(self, death_sig: signal.Signals, timeout: float) -> Stopping | None:
        if self._stops_differently():
            return super()._begin_stop(death_sig, timeout)
        if self._minder is not None:
            self._minder.stand_down()
        if self._pcontext is None:
            return None
        self._telling.stops()
        sent = self._have_it(death_sig)
        stopping = self._pcontext.begin_close(death_sig, timeout, self._within(self._shutdown_timeout), sent=sent)
        return None if stopping.step() else stopping

    def _stops_differently(self) -> bool:
        """Whether a subclass has a way of its own to stop workers, which must be gone then."""
        ours = (LocalElasticAgent._stop_workers, LocalElasticAgent._shutdown)
        return (type(self)._stop_workers, type(self)._shutdown) != ours

    @profiled
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, self._shutdown_timeout, sent=self._have_it(signal.SIGTERM))
        self._unmind()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._pcontext is not None:
            self._pcontext.close(death_sig, timeout, sent=self._have_it(death_sig))
        self._unmind()
        if not self._runs:
            self._let_go()
