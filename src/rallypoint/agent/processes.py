"""The workers of one node as processes: started through the reaper, watched by pidfd, none left behind."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Collection, Sequence
from signal import Signals

from rallypoint.agent.controller import WorkerController
from rallypoint.agent.environment import worker_environment
from rallypoint.agent.grace_period import GracePeriods
from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.agent.signal_set import FORWARDED_SIGNALS, scheduler
from rallypoint.agent.spec import RunResult, WorkerSpec, WorkerState
from rallypoint.agent.steps import StopWorkers
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.logs.specs import LogsSpecs, line_prefixes, log_only_in_files
from rallypoint.protocol.messages import Placement
from rallypoint.telemetry.lazy import profiled
from rallypoint.workers.context import PContext, ProcessOptions, SubprocessContext, macros
from rallypoint.workers.reaper.client import ReaperClient, ReaperLost, take_prestarted

if TYPE_CHECKING:
    from rallypoint.agent.held_workers import HeldWorkers
    from rallypoint.agent.monitors import Monitor
    from rallypoint.watchdog.requests import FileTimerRequest
    from rallypoint.watchdog.watchdog import WorkerMonitor
    from rallypoint.workers.forwarding import SignalForwarding
    from rallypoint.workers.preload.client import PreloadManager
    from rallypoint.workers.stop import StopInProgress

log = get_logger(__name__)

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


class ProcessController(WorkerController):
    """Starts the workers as processes, wakes at their exits, and leaves none behind.

    Args:
        spec, rendezvous, grace: see `WorkerController`.
        logs_specs: where their output goes.
        start_method: how workers that are functions are started.
        log_line_prefix_template: the prefix of each teed line (contract section 6.5).
        stuck_after: seconds that a worker may be stuck in the kernel; by default taken from the environment; 0:
            forever.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rendezvous: RendezvousClient,
        grace: GracePeriods,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        log_line_prefix_template: str | None = None,
        stuck_after: float | None = None,
    ) -> None:
        super().__init__(spec, rendezvous, grace)
        self.logs_specs = logs_specs
        self.start_method = start_method
        self.log_line_prefix_template = log_line_prefix_template
        self.beyond_help = False
        """Whether a worker is stuck in the kernel: it keeps its devices, so a restart here cannot help."""
        self._uninterruptible_timeout = stuck_after
        self._reaper: ReaperClient | None = None
        self._preload: PreloadManager | None = None
        self._watchdog: WorkerMonitor | None = None
        self._output_paths_logged = False
        self._forwarding: SignalForwarding | None = None
        self._forwarded: set[int] = set()
        self._held: HeldWorkers | None = None
        """Lets workers go on in their processes, once one has announced that it can."""
        self._releases = False  # whether the workers that are being stopped will be restarted

    # The start

    def prepare(self) -> None:
        reaper = self.ensure_reaper()
        if self.group.spec.features.recovery.preload:
            from rallypoint.agent.preload import preload_manager

            self._preload = preload_manager(self.group, reaper, self.has_progress)

    @profiled("SimpleElasticAgent._initialize_workers")
    def start(self, placement: Placement) -> None:
        self.started(self.start_workers())

    @profiled("LocalElasticAgent._start_workers")
    def start_workers(self) -> dict[int, int]:
        """Start the processes of the present round; returns local rank to process id."""
        group, spec = self.group, self.group.spec
        assert spec.entrypoint is not None
        self._close_watchdog()
        watchdog = self._watchdog = self._make_watchdog()
        args, envs, own = {}, {}, {} if watchdog is None else watchdog.environment
        for worker in group.workers:
            rank = worker.local_rank
            args[rank] = tuple(macros.substitute(spec.args, str(rank)))
            envs[rank] = {**worker_environment(group, worker, group.restarts, os.environ), **own}
        ranks = {worker.local_rank: worker.global_rank for worker in group.workers}
        prefixes = line_prefixes(self.log_line_prefix_template, spec.role, ranks, group.restarts)
        log.info("[%s] Starting worker group", spec.role)
        log.info("use_agent_store: %s", spec.rdzv_handler.use_agent_store)
        reaper = self.ensure_reaper()
        self._forwarded.clear()
        if self._forwarding is not None:
            self._forwarding.reset()
        if self._preload is not None:
            self._preload.ensure_zygote(reaper)
        filters = spec.duplicate_stdout_filters, spec.duplicate_stderr_filters
        ignored, collapse = spec.features.preemption.ignored, spec.features.output.tee_collapse
        numa, method, watched = spec.numa_options, self.start_method, self.hang_watch is not None
        options = ProcessOptions(numa, *filters, method, self._preload, collapse, ignored, watched)
        kind: type[PContext] = SubprocessContext
        if not isinstance(spec.entrypoint, str):
            from rallypoint.workers.functions.context import FunctionContext

            kind = FunctionContext
        context = kind(spec.role, spec.entrypoint, args, envs, self.logs_specs, prefixes, reaper, options)
        self._register_cleanup(reaper)
        if spec.features.hangs.flight_recorder:
            from rallypoint.agent.flight_recorder import switch_on

            switch_on(context, group.notices, self.pcontext)
        group.survived = () if self._held is None else self._held.enter(context)
        context.start()
        self.pcontext, self.failures, pids = context, {}, context.pids()
        self._output_paths_logged = self._output_paths_logged or log_only_in_files(context.dest, spec.role)
        if watchdog is not None:
            watchdog.watch(pids.values())
        return dict(pids)

    def _register_cleanup(self, reaper: ReaperClient) -> None:
        """Have the reaper remove what this run creates, if this process ends without doing so."""
        temporary = self.logs_specs.temporary
        pipes = [] if self._watchdog is None else self._watchdog.files
        whole = [*([self.group.notices] if self.group.notices else []), *pipes]
        reaper.set_cleanup(empty=[temporary] if temporary else [], whole=whole)

    def ensure_reaper(self) -> ReaperClient:
        """The reaper of this run, which starts the workers of all rounds; a new one if that is lost."""
        if self._reaper is not None and self._reaper.lost:
            self._drop_reaper()
        if self._reaper is None:
            self._reaper = take_prestarted()
        return self._reaper

    def fence(self, until: float) -> None:
        reaper = self.ensure_reaper() if until < math.inf else self._reaper
        if reaper is not None:
            reaper.fence(until)

    def close(self) -> None:
        super().close()
        self._drop_reaper()  # last: if we were killed until now, it would remove what we leave behind

    def _drop_reaper(self) -> None:
        """Close the reaper, and what is below it; everything else of the run remains."""
        if self._preload is not None:
            self._preload.close()
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            reaper.close()

    def preparing(self) -> bool:
        return (self._preload is not None and self._preload.importing) or super().preparing()

    # The watchdog

    def _make_watchdog(self) -> WorkerMonitor | None:
        """The watchdog for the workers about to start, if there is one."""
        variables = (TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT)
        if not self._uninterruptible_timeout and not any(os.environ.get(name) for name in variables):
            return None
        from rallypoint.logs.specs import temporary_folder
        from rallypoint.watchdog.watchdog import monitor_for

        return monitor_for(
            os.environ,
            temporary_folder(),
            stuck_after=self._uninterruptible_timeout,
            run_id=self.group.spec.rdzv_handler.get_run_id(),
            grace=self.grace.stop,
            report=self._watched,
        )

    def _watched(self, name: str, timer: FileTimerRequest | None) -> None:
        """The watchdog has done what `name` says; a worker that its timer ends writes its stacks first."""
        if timer is not None and timer.signal > 0 and self.pcontext is not None:
            self.pcontext.announce_stacks(timer.worker_pid)
        self.events.watched(name, timer)

    def _close_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    # How the workers are

    @profiled("LocalElasticAgent._monitor_workers")
    def poll(self) -> RunResult:
        result = self._poll()
        self.failures = result.failures
        return result

    def _poll(self) -> RunResult:
        group = self.group
        if self.pcontext is None:
            return RunResult(WorkerState.UNKNOWN)
        if set(self.pcontext.pids().values()) != {worker.id for worker in group.workers}:
            log.error("[%s] the workers' process ids are not those that were started", group.spec.role)
            return RunResult(WorkerState.UNKNOWN)
        by_rank = {worker.local_rank: worker.global_rank for worker in group.workers}
        result = self.pcontext.poll()
        if result is None:
            return self._running_result(self.pcontext, by_rank)
        if result.is_failed():
            from rallypoint.agent.failure_reasons import add_reasons

            add_reasons(result.failures.values(), self._watchdog, self._was_only_forwarded)
            return RunResult(
                WorkerState.FAILED, failures={by_rank[rank]: failure for rank, failure in result.failures.items()}
            )
        values = {by_rank[rank]: value for rank, value in result.return_values.items()}
        state = WorkerState.SUCCEEDED if len(values) == len(by_rank) else WorkerState.STOPPED
        return RunResult(state, return_values=values)

    def _running_result(self, pcontext: PContext, by_rank: dict[int, int]) -> RunResult:
        if self._watchdog is None or not (stuck := self._watchdog.stuck):
            return RunResult(WorkerState.HEALTHY)
        from rallypoint.agent.failure_reasons import stuck_failures

        self.beyond_help = True
        return RunResult(WorkerState.UNHEALTHY, failures=stuck_failures(stuck, pcontext.pids(), by_rank))

    def restart_limit(self) -> int:
        return 0 if self.beyond_help else super().restart_limit()

    def exit_fds(self) -> list[int] | None:
        if self.pcontext is None:
            return []
        return None if self.pcontext.must_be_polled else self.pcontext.exit_fds()

    def monitors(self) -> Sequence[Monitor]:
        own = (self._watchdog, self._preload, self._forwarding)
        return [*super().monitors(), *(each for each in own if each is not None)]

    def running(self) -> Collection[int]:
        return () if self.pcontext is None else self.pcontext.running

    def ended_in_order(self) -> bool:
        return self.pcontext is None or self.pcontext.ended_in_order

    def stopped(self) -> tuple[int, ...]:
        return () if self.pcontext is None else self._global(self.pcontext.stopped)

    def succeeded(self) -> tuple[int, ...]:
        return () if self.pcontext is None else self._global(self.pcontext.succeeded)

    def _global(self, local_ranks: Collection[int]) -> tuple[int, ...]:
        by_rank = {worker.local_rank: worker.global_rank for worker in self.group.workers}
        return tuple(by_rank[rank] for rank in local_ranks)

    # Signals

    def forward(self, number: int) -> None:
        self._forwarded.add(number)
        if self.pcontext is not None and self.pcontext.running and not self._signals().forward(number):
            self.pcontext.forward_signal(number)

    def shared_signals(self) -> frozenset[int]:
        return self._signals().shared_signals()

    def _was_only_forwarded(self, number: int) -> bool:
        """Whether a signal by which a worker has ended was meant to inform the workers."""
        return number in FORWARDED_SIGNALS and (number in self._forwarded or number in self.shared_signals())

    def _signals(self) -> SignalForwarding:
        """Tracks which signals the workers have been sent; created with the first signal."""
        if self._forwarding is None:
            from rallypoint.workers.forwarding import SignalForwarding

            scheduled = scheduler(os.environ) is not None
            self._forwarding = SignalForwarding(self._signals_received, self._send_signal, scheduled)
        return self._forwarding

    def _signals_received(self) -> Collection[int]:
        try:
            return () if self._reaper is None else self._reaper.signals_received()
        except ReaperLost:
            return ()

    def _send_signal(self, number: int) -> None:
        if self.pcontext is not None:
            self.pcontext.forward_signal(number)

    # The stop

    def stop(self, step: StopWorkers) -> StopInProgress | None:
        if step.shared:
            self._signals().forward(step.signal)
        self._releases = step.restarts and not step.ends_all
        return super().stop(step)

    def begin_stop(self, death_sig: Signals, timeout: float) -> StopInProgress | None:
        if self._watchdog is not None:
            self._watchdog.stop_enforcing()
        if self.pcontext is None:
            return None
        self.events.workers_stopping()
        limit, sent = self.grace.within(self.grace.stop), self._workers_have_signal(death_sig)
        if (held := self._going_on()) is not None and self._releases:
            return held.begin_release(self.pcontext, death_sig, timeout, limit, sent=sent)
        stopping = self.pcontext.begin_close(death_sig, timeout, limit, sent=sent)
        return None if stopping.step() else stopping

    def shorten_stop(self, until: float) -> None:
        if self.pcontext is not None:
            self.pcontext.shorten_close(until)

    def shutdown(self, number: int) -> None:
        self.end(Signals(number), self.grace.stop)

    def end(self, death_sig: Signals, timeout: float) -> None:
        """End the processes, and return when they are gone. Idempotent.

        Args:
            death_sig: the first signal.
            timeout: seconds between it and SIGKILL.
        """
        if self.pcontext is not None:
            self.pcontext.close(death_sig, timeout, sent=self._workers_have_signal(death_sig))
        self._close_watchdog()

    def _workers_have_signal(self, number: int) -> bool:
        """Whether the running processes have been sent the signal by its sender, or soon will be by us."""
        runs = self.pcontext is not None and bool(self.pcontext.running)
        return runs and number != signal.SIGKILL and self._signals().is_handled(number)

    # Workers that go on in their processes

    def restarts_workers(self) -> bool:
        return bool(self.started_at) and self._going_on() is None

    def look_ahead(self) -> None:
        if (held := self._going_on()) is not None:
            held.make_ready()

    def survivors(self) -> Collection[int]:
        return () if self.pcontext is None else self.pcontext.held

    def _going_on(self) -> HeldWorkers | None:
        """Lets workers go on, if those of all local ranks of this node have announced that they can."""
        if self._held is None and self.group.notices and os.path.isdir(self.group.notices):
            from rallypoint.agent.held_workers import find_held_workers

            self._held = find_held_workers(self)
        return None if self._held is None or not self._held.all_announced() else self._held
