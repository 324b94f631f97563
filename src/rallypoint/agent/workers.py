"""Starts, watches (by pidfd) and stops one node's workers, through the reaper; none is left behind.

Layers of a stop; each knows only the next one:

    agent/policy      StopWorkers               one at a time; `WorkersStopped` follows
    agent/actions     WorkerController.stop     begins it, with PContext.begin_close
    agent/stopping    WorkersStop               its one owner: drives it beside everything else
    workers/stop      Stop                      signal, grace period, stacks, SIGKILL, sweep; then all output is written
      WriteDetector                             which workers are spared because they are writing a file
      ChildProcess                              a signal to the worker alone, through its pidfd
      Sweep                                     everything that workers left behind: through the reaper, or, if that is
                                                lost, from /proc
    workers/reaper    SIGTERM, then SIGKILL to all below it, until nothing is left; its supervisor kills the rest
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from signal import SIGKILL, Signals

from rallypoint.agent.facts import NodeFacts, WaitingProcess, worker_facts
from rallypoint.agent.folder import WorkerFolder
from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.agent.signals import FORWARDED_SIGNALS, GracePeriods, SignalForwarding, scheduler
from rallypoint.agent.sources import Gate, Hooks, Keeper, Preparation, Preparations, Source, Watchers, guarded
from rallypoint.agent.spec import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.agent.steps import StopWorkers
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.control.membership.state import Succeed
from rallypoint.control.protocol.messages import Placement
from rallypoint.notices import VARIABLE as NOTICES_VARIABLE
from rallypoint.observe.telemetry.lazy import profiled
from rallypoint.workers.context import PContext, ProcessOptions, SubprocessContext, macros
from rallypoint.workers.logs.outputs import WorkerConsole
from rallypoint.workers.logs.specs import LogsSpecs, line_prefixes, log_only_in_files
from rallypoint.workers.reaper.client import ReaperClient, ReaperLost, take_prestarted

if TYPE_CHECKING:
    from rallypoint.agent.events import AgentEvents
    from rallypoint.control.membership.state import NodeRanks
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.workers.stop import Stop
    from rallypoint.workers.timers import FileTimerRequest
    from rallypoint.workers.watchdog import StuckProcess, WorkerMonitor

log = get_logger(__name__)

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
_WATCHDOG_VARIABLES = (TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT)


DRAIN_NOTICE = 30.0
"""Seconds that workers get to save before `rallyctl drain` takes their node away, unless the job sets another time."""


class WorkerController:
    """Controls the workers of one node. No call waits for other nodes.

    Args:
        spec: the spec of the workers.
        rendezvous: this node's rendezvous client.
        grace: how much time workers get to end.
        logs_specs: where to write their output.
        start_method: how to start workers that are functions.
        log_line_prefix_template: the prefix of each teed line (contract section 6.5).
        stuck_after: seconds that a worker may be stuck in the kernel; 0 means forever. The environment sets the
            default.
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
        self.group = WorkerGroup(spec)
        self.began, self.began_at = time.monotonic(), time.time()
        self.events: AgentEvents | None = None
        """Records the run, if needed (`record_events`)."""
        self.rendezvous = rendezvous
        self.grace = grace
        self.logs_specs = logs_specs
        self.start_method = start_method
        self.log_line_prefix_template = log_line_prefix_template
        self.pcontext: PContext | None = None
        """The current workers' processes; None before the first start, and if the processes are not ours."""
        self.console = WorkerConsole()
        """Shows the output of all the run's workers."""
        self.folder = WorkerFolder(self.awaited, rendezvous.send, spec.features.recovery.progress_file)
        """The folder shared with the workers."""
        self.folder.on_folder = self._look_at_folder
        self.on_folder: Callable[[], None] = lambda: None
        """Called once workers have created that folder."""
        self.sources: list[Source] = []
        """Sources that the loop waits for and drives."""
        self.preparations = Preparations()
        """Work that each round waits for before its workers start."""
        self.watchers = Watchers()
        """Sources that only watch this run and cannot end it."""
        self.at_end = ExitStack()
        """Resources to release when the run ends."""
        self.at_end.callback(self.folder.close)
        self.hooks = Hooks()
        """Calls the features of this run."""
        self.constants: dict[str, str] = {}
        """Variables that features add for all workers in all rounds."""
        self.gate: Callable[[], Gate] | None = None
        """Begins the check that must pass before this node requests a place, if the user has one."""
        self.is_launched = False
        """Whether this run belongs to a launch, which ends with `finish`."""
        self.finish: Callable[[BaseException | None], None] = lambda _error: None
        """The launch's last action; takes its error, if any."""
        self.max_nodes = 1
        """The maximum number of nodes in a round."""
        self.round_entered_at = 0.0
        """When this node entered the current round, on the monotonic clock."""
        self.started_at = 0.0
        """When the current workers were started, in seconds since 1970."""
        self.failures: Mapping[int, ProcessFailure] = {}
        """The current workers' failures at the last `poll`, by global rank."""
        self.remarks: dict[int, str] = {}
        """Findings about current workers to show people, by global rank; for any thread."""
        self.beyond_help = False
        """Whether a worker is stuck in the kernel: it still occupies its devices, so a restart here cannot help."""
        self.seen: NodeFacts | None = None
        """Facts for other threads, as of the last `look`; everything else here belongs to the loop."""
        self._stuck_after = stuck_after
        self._reaper: ReaperClient | None = None
        self._watchdog: WorkerMonitor | None = None
        self._scheduled = scheduler(os.environ) is not None
        self._signals = SignalForwarding(self._signals_received, self._send_signal, self._scheduled)
        if self._scheduled:  # otherwise it never has a signal to send later
            self.sources.append(self._signals)
        self._forwarded: set[int] = set()
        self._keeper: Keeper | None = None
        """The keeper that kept workers in their processes since the last stop for a restart."""

    def record_events(self) -> AgentEvents:
        """Record the run from now on; returns the recorder."""
        if self.events is None:
            from rallypoint.agent.events import AgentEvents

            self.events = AgentEvents(self)
            self.watchers.observe_with(self.events.observe)
            self.folder.on_progress = self.events.progress
        return self.events

    def add_preparation(self, preparation: Preparation) -> None:
        """Make each round wait for this preparation before its workers start."""
        self.preparations.append(preparation)
        self.sources.append(preparation)

    def prepare(self) -> None:
        """Start the reaper at the start of the run, while the nodes find each other."""
        self.ensure_reaper()
        if not HAS_PIDFDS:
            from rallypoint.base.without_pidfds import FACT

            log.warning("%s", FACT)

    def close(self) -> None:
        """Release everything: the run has ended for the other nodes too."""
        for preparation in self.preparations:
            preparation.close()
        guarded("the final cleanup", self.at_end.close)
        self.console.close()
        self._drop_reaper()  # last: if this agent is killed before, the reaper removes the leftovers

    # Start of a round

    def enter_round(self, placement: Placement) -> None:
        """Take this node's place in a round: store address, group rank, worker ranks. `start` follows when the round is
        prepared."""
        group, spec = self.group, self.group.spec
        if not self.survivors():
            self.pcontext = None  # previous workers, which are gone
        self.round_entered_at = SYSTEM_CLOCK.monotonic()
        group.placement, group.restarts = placement, placement.restarts
        self.rendezvous.begin_round(placement)
        if placement.max_restarts >= 0:  # the first node's value is the job's
            spec.max_restarts = placement.max_restarts
        group.store = None
        group.open_store = lambda: self.rendezvous.info(placement).store
        group.master_addr = spec.master_addr or placement.store_address
        group.master_port = spec.master_port or placement.store_port
        began = time.monotonic()
        group.workers = self.assign(placement)
        if self.events is not None:
            self.events.placed(time.monotonic() - began)
        group.group_rank = placement.group_rank
        group.group_world_size = placement.group_world_size
        if log.isEnabledFor(logging.INFO):
            log.info("[%s] Rendezvous complete for workers. Result:\n%s", spec.role, _describe(group))

    @profiled("SimpleElasticAgent._assign_worker_ranks")
    def assign(self, placement: Placement) -> list[Worker]:
        """Create this node's workers with their ranks from the placement."""
        return workers_of(placement.ranks, self.group.spec)

    # Start of the workers

    @profiled("SimpleElasticAgent._initialize_workers")
    def start(self) -> None:
        """Start the workers of the round that this node entered."""
        self.started(self.start_workers())

    @profiled("LocalElasticAgent._start_workers")
    def start_workers(self) -> dict[int, int]:
        """Start the processes of the current round; returns local rank to process id."""
        group, spec = self.group, self.group.spec
        assert spec.entrypoint is not None
        if self._watchdog is not None:
            self._close_watchdog(self._watchdog)
        watched = self._stuck_after or any(os.environ.get(name) for name in _WATCHDOG_VARIABLES)
        watchdog = self._begin_watchdog() if watched else None
        args, envs, own = {}, {}, {} if watchdog is None else watchdog.environment
        constant = self.constant_environment()
        for worker in group.workers:
            rank = worker.local_rank
            args[rank] = tuple(macros.substitute(spec.args, str(rank)))
            envs[rank] = {**worker_environment(group, worker, constant, os.environ), **own}
        prefixes = line_prefixes(self.log_line_prefix_template, spec.role, self.global_ranks(), group.restarts)
        log.info("[%s] Starting worker group", spec.role)
        log.info("use_agent_store: %s", spec.rdzv_handler.use_agent_store)
        reaper = self.ensure_reaper()
        self._forwarded.clear()
        self._signals.reset()
        options = self.process_options()
        kind: type[PContext] = SubprocessContext
        if not isinstance(spec.entrypoint, str):
            from rallypoint.workers.functions.context import FunctionContext

            kind = FunctionContext
        context = kind(spec.role, spec.entrypoint, args, envs, self.logs_specs, prefixes, reaper, options)
        # Tell the reaper before any start: a worker may create the folder of notices as its first act. If this agent is
        # then killed, only the reaper knows what to remove.
        self.set_cleanup(reaper)
        for before_start in self.hooks.before_start:
            before_start(context)
        group.survived = () if self._keeper is None else self._keeper.enter(context)
        for take_places in self.hooks.take_places:
            take_places(context)
        context.start()
        self.pcontext, self.failures, self.remarks, pids = context, {}, {}, context.pids()
        if not self.started_at:  # once per run
            log_only_in_files(context.dest, spec.role)
        if watchdog is not None:
            watchdog.watch(pids.values())
        return dict(pids)

    def constant_environment(self) -> dict[str, str]:
        """The variables that are the same for all workers of this node in all rounds."""
        return {**constant_environment(self.group.spec, os.environ), **self.constants}

    def process_options(self) -> ProcessOptions:
        spec = self.group.spec
        filters = spec.duplicate_stdout_filters, spec.duplicate_stderr_filters
        options = ProcessOptions(spec.numa_options, *filters, self.start_method, console=self.console)
        for change in self.hooks.process_options:
            options = change(options)
        return options

    def set_cleanup(self, reaper: ReaperClient) -> None:
        # Files that the reaper removes if this process cannot.
        temporary, pipes = self.logs_specs.temporary, [] if self._watchdog is None else self._watchdog.files
        whole = [*([self.group.notices] if self.group.notices else []), *pipes]
        reaper.set_cleanup(empty=[temporary] if temporary else [], whole=whole)

    def started(self, ids: Mapping[int, object]) -> None:
        """Note that the workers were started, with these ids by local rank."""
        for local_rank, worker_id in ids.items():
            self.group.workers[local_rank].id = worker_id
        self.started_at = time.time()
        if self.events is not None:
            self.events.workers_started()
        self.group.state = WorkerState.HEALTHY
        placement = self.group.placement
        assert placement is not None
        since = self.round_entered_at if self.group.survived else -math.inf
        self.folder.begin_round(placement.round, len(self.group.workers), placement.progress, since)

    def ensure_reaper(self) -> ReaperClient:
        """Return this run's reaper, which starts the workers of all rounds, or a new one if it was lost."""
        if self._reaper is not None and self._reaper.lost:
            self._drop_reaper()
        if self._reaper is None:
            self._reaper = take_prestarted()
        return self._reaper

    def fence(self, until: float) -> None:
        """Kill the workers at this time (`BOOT_CLOCK`), even if this agent is frozen; infinity for never."""
        reaper = self.ensure_reaper() if until < math.inf else self._reaper
        if reaper is not None:
            reaper.fence(until)

    def _drop_reaper(self) -> None:
        """Close the reaper and everything below it; keep the rest of the run."""
        for on_reaper_closed in self.hooks.on_reaper_closed:
            on_reaper_closed()
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            reaper.close()

    # Watchdog

    def _begin_watchdog(self) -> WorkerMonitor | None:
        """Create the watchdog for the workers about to start, if they need one."""
        from rallypoint.workers.logs.specs import temporary_folder
        from rallypoint.workers.watchdog import monitor_for

        self._watchdog = monitor_for(
            os.environ,
            temporary_folder(),
            stuck_after=self._stuck_after,
            run_id=self.group.spec.rdzv_handler.get_run_id(),
            grace=self.grace.stop,
            report=self._watched,
        )
        if self._watchdog is not None:
            self.sources.append(self._watchdog)
        return self._watchdog

    def watch_programs(self) -> None:
        """Watch the new processes of workers whose programs moved to other processes."""
        if self._watchdog is not None and self.pcontext is not None:
            self._watchdog.watch(self.pcontext.program_pids().values())

    def _watched(self, name: str, timer: FileTimerRequest | None) -> None:
        """Record a watchdog action; a worker whose timer expired first writes its stacks."""
        if timer is not None and timer.signal > 0 and self.pcontext is not None:
            self.pcontext.announce_stacks(timer.worker_pid)
        if self.events is not None:
            self.events.watched(name, timer)

    def _close_watchdog(self, watchdog: WorkerMonitor) -> None:
        self._watchdog = None
        self.sources.remove(watchdog)
        watchdog.close()

    # State of the workers

    @profiled("LocalElasticAgent._monitor_workers")
    def poll(self) -> RunResult:
        """The workers' current result: state, return values and failures by global rank. Does not wait."""
        # A third party's agent may have replaced the ids. Then nothing is known about these workers.
        if self.pcontext is None or set(self.pcontext.pids().values()) != {worker.id for worker in self.group.workers}:
            if self.pcontext is not None:
                log.error("[%s] the workers' process ids are not the ones that the agent started", self.group.spec.role)
            return RunResult(WorkerState.UNKNOWN)
        by_rank, found = self.global_ranks(), self.pcontext.poll()
        if found is None:
            stuck = {} if self._watchdog is None else self._watchdog.stuck
            result = self._stuck_result(self.pcontext, by_rank, stuck) if stuck else RunResult(WorkerState.HEALTHY)
        elif found.failures:
            self._add_reasons(found.failures.values())
            if self._keeper is not None and self.group.survived:
                self.folder.look()
                seconds = time.time() - self.started_at
                self._keeper.note_failures(found.failures, seconds, progress=self.folder.made())
            failures = {by_rank[rank]: failure for rank, failure in found.failures.items()}
            result = RunResult(WorkerState.FAILED, failures=failures)
        else:
            values = {by_rank[rank]: value for rank, value in found.return_values.items()}
            state = WorkerState.SUCCEEDED if len(values) == len(by_rank) else WorkerState.STOPPED
            result = RunResult(state, return_values=values)
        return result

    def _stuck_result(
        self, pcontext: PContext, by_rank: Mapping[int, int], stuck: Mapping[int, StuckProcess]
    ) -> RunResult:
        from rallypoint.failures.failure import ProcessFailure

        self.beyond_help = True
        failures = {}
        for local_rank, pid in pcontext.program_pids().items():
            if pid in stuck:
                failure = failures[by_rank[local_rank]] = ProcessFailure(local_rank, pid, -SIGKILL, "")
                failure.set_reason(stuck[pid].why)
        return RunResult(WorkerState.UNHEALTHY, failures=failures)

    def _add_reasons(self, failures: Iterable[ProcessFailure]) -> None:
        """Add to each failure what the watchdog did, or that the signal was not meant to end the worker."""
        for failure in failures:
            why = "" if self._watchdog is None else self._watchdog.expiry_reason(failure.pid)
            if why and not failure.reason.startswith(why):  # an earlier poll may have added this reason
                failure.set_reason(f"{why} ({failure.text})")
            elif not failure.reason and self._was_only_forwarded(-failure.exitcode):
                failure.set_reason(
                    f"{failure.text}, which the agent passed on to its workers; this worker has no handler for it"
                )

    def exit_fds(self) -> list[int] | None:
        """Descriptors that become readable when a worker ends; None if workers must be polled at intervals."""
        return [] if self.pcontext is None else self.pcontext.exit_fds()

    def running(self) -> Collection[int]:
        """Local ranks of the workers that are still running, as far as known."""
        return () if self.pcontext is None else self.pcontext.running

    def awaited(self) -> Collection[int]:
        """Local ranks of the workers whose end `poll` has not reported, so it is unknown whether they succeeded."""
        return self.running() if self.pcontext is None else self.pcontext.awaited

    def ended_in_order(self) -> bool:
        """Whether all workers, if any, succeeded or ended by SIGTERM."""
        return self.pcontext is None or self.pcontext.ended_in_order

    def stopped(self) -> tuple[int, ...]:
        """Global ranks of running workers that this agent ended, for the report."""
        return self._global(self.pcontext.stopped if self.pcontext is not None else ())

    def succeeded(self) -> tuple[int, ...]:
        """Global ranks of the workers that succeeded before anything stopped them."""
        return self._global(self.pcontext.succeeded if self.pcontext is not None else ())

    def _global(self, local_ranks: Collection[int]) -> tuple[int, ...]:
        by_rank = self.global_ranks() if local_ranks else {}
        return tuple(by_rank[rank] for rank in local_ranks)

    def global_ranks(self) -> dict[int, int]:
        return {worker.local_rank: worker.global_rank for worker in self.group.workers}

    def restart_limit(self) -> int:
        """How many failures the job can survive, as far as this node knows."""
        return 0 if self.beyond_help or self.preparations.end_job else self.group.spec.max_restarts

    def remaining(self) -> int:
        """How many more failures the job would survive."""
        return max(0, self.restart_limit() - self.group.restarts)

    def look(self) -> NodeFacts:
        """Collect the current facts, which other threads read from `seen`."""
        group, spec, context = self.group, self.group.spec, self.pcontext
        codes = {} if context is None else context.exit_codes
        workers = tuple(worker_facts(worker, context, codes) for worker in group.workers)
        self.seen = NodeFacts(
            job=spec.rdzv_handler.get_run_id(),
            role=spec.role,
            state=group.state.value,
            round=-1 if group.placement is None else group.placement.round,
            host=os.uname().nodename,
            pid=os.getpid(),
            group_rank=-1 if group.group_rank is None else group.group_rank,
            group_world_size=group.group_world_size or 0,
            restarts=group.restarts,
            remaining=self.remaining(),
            since=self.started_at,
            program=spec.get_program_name(),
            workers=workers,
            processes=() if context is None else workers,
            running=frozenset(self.running()),
            failures={} if context is None else self.failures,
            output_ages=tuple if context is None else context.output_ages(),
            waiting=self.waiting_processes(),
        )
        return self.seen

    # Signals

    def on_succeeded(self) -> None:
        """Announce that all workers succeeded."""
        assert self.group.placement is not None, "no placement before the first round"
        self.rendezvous.send(Succeed(self.group.placement.round))

    def forward(self, number: int) -> None:
        """Forward a signal to each running worker that did not receive it itself."""
        self._forwarded.add(number)
        if self.pcontext is not None and self.pcontext.running and not self._signals.forward(number):
            self.pcontext.forward_signal(number)

    def shared_signals(self) -> frozenset[int]:
        """Signals that all processes of the job on this node received a moment ago, as far as known."""
        return self._signals.shared_signals()

    def _was_only_forwarded(self, number: int) -> bool:
        """Whether the signal that ended a worker was only meant to inform workers."""
        return number in FORWARDED_SIGNALS and (number in self._forwarded or number in self.shared_signals())

    def _signals_received(self) -> Collection[int]:
        try:
            return () if self._reaper is None else self._reaper.signals_received()
        except ReaperLost:
            return ()

    def _send_signal(self, number: int) -> None:
        if self.pcontext is not None:
            self.pcontext.forward_signal(number)

    def terminated(self) -> float:
        """Handle SIGTERM to this agent. Returns how many seconds the workers can have to save."""
        until = self.grace.terminated()
        if until is not None and self.pcontext is not None:
            self.pcontext.shorten_close(until)
        return self.grace.notice

    def drain_notice(self) -> float:
        """Seconds that workers get to save before an operator takes this node away: the job's `notice_timeout`. If that
        is unset, `DRAIN_NOTICE` if a worker looks for notices, else 0.0."""
        return self.rendezvous.notice_timeout or (DRAIN_NOTICE if self.folder.is_looked_at() else 0.0)

    # Stop

    def stop(self, step: StopWorkers) -> Stop | None:
        """Begin to stop the workers; the loop drives the stop beside everything else.

        Returns:
            The stop in progress; None if the workers are gone.
        """
        if step.shared:
            self._signals.forward(step.signal)
        if self._watchdog is not None:
            self._watchdog.stop_enforcing()
        if step.restarts:
            log.info("[%s] Stopping worker group", self.group.spec.role)
        if self.pcontext is None:
            return None
        death_sig, timeout = Signals(step.signal), self.grace.seconds(failed=step.failed)
        limit = self.grace.seconds(failed=False)
        # Did the sender signal the workers too? Asking the reaper costs a round trip, so ask only if this is possible:
        # under a scheduler, or if this agent was signalled too. Without asking:
        #   1. `kill -TERM -PGID` reaches this agent and the workers;
        #   2. each worker begins to save in its handler;
        #   3. our SIGTERM follows, and a handler that gives up at the second signal aborts the save.
        sent = (step.shared or self._scheduled) and self._workers_have_signal(death_sig)
        if step.restarts and not step.ends_all and (keeper := self._find_keeper()) is not None:
            self._keeper = keeper
            return keeper.begin_release(self.pcontext, death_sig, timeout, limit, sent=sent)
        # Do not wait on a restart: new workers may need what the old processes use, or write the same files.
        wanted = self.group.spec.features.recovery.leftover_timeout
        left = 0.0 if step.restarts else self.grace.within(wanted)
        return self.pcontext.begin_close(death_sig, timeout, limit, sent=sent, leftover_time=left)

    def stop_held(self, number: int, *, failed: bool) -> None:
        """Also stop workers that would continue in their processes after the stop in progress, whatever its reason."""
        if self.pcontext is not None:
            self.pcontext.stop_held(Signals(number), self.grace.seconds(failed=failed))

    def shutdown(self, number: int, timeout: float | None = None) -> None:
        """End the workers; return when they are gone. Always called at the end. Idempotent.

        Args:
            number: the first signal.
            timeout: seconds between this signal and SIGKILL; None for the default.
        """
        if self.pcontext is not None:
            death_sig, timeout = Signals(number), self.grace.stop if timeout is None else timeout
            self.pcontext.close(death_sig, timeout, sent=self._workers_have_signal(death_sig))
        if self._watchdog is not None:
            self._close_watchdog(self._watchdog)

    def _workers_have_signal(self, number: int) -> bool:
        """Whether the sender also signalled the running processes, or this agent will soon forward the signal."""
        runs = self.pcontext is not None and bool(self.pcontext.running)
        return runs and number != SIGKILL and self._signals.is_handled(number)

    # Workers that continue in their processes

    def survivors(self) -> Collection[int]:
        """Local ranks of the workers that left their round and are waiting in their processes for the next one."""
        return () if self.pcontext is None else self.pcontext.held

    def keeps_folder(self) -> bool:
        """Whether processes that know the shared folder continue."""
        return bool(self.survivors()) or any(holds() for holds in self.hooks.holds_folder)

    def waiting_processes(self) -> tuple[WaitingProcess, ...]:
        """Processes of this node that are waiting for a place in a round."""
        return tuple(process for known in self.hooks.processes for process in known())

    def _look_at_folder(self) -> None:
        """Import now what reading the folder at the end of the round needs: workers wrote into it."""
        if (keeper := self._find_keeper()) is not None:
            keeper.make_ready()

    def restarts_all(self) -> bool:
        """Whether some worker of this node cannot continue in its process. Call this before a stop."""
        return bool(self.started_at) and self._find_keeper() is None

    def _find_keeper(self) -> Keeper | None:
        """The keeper that lets workers continue in their processes, if it can do so for all local ranks of this node.
        Call this before a stop."""
        if self.group.notices and os.path.isdir(self.group.notices):
            self.on_folder()
        return next((keeper for find in self.hooks.keeper if (keeper := find()) is not None), None)


def workers_of(ranks: NodeRanks, spec: WorkerSpec) -> list[Worker]:
    """Create a node's workers with these ranks."""
    return [
        Worker(
            local_rank=local_rank,
            global_rank=ranks.base_rank + local_rank,
            role_rank=ranks.base_role_rank + local_rank,
            world_size=ranks.world_size,
            role_world_size=ranks.role_world_size,
        )
        for local_rank in range(spec.local_world_size)
    ]


def _describe(group: WorkerGroup) -> str:
    """Format the log lines about a complete round."""
    rows = {
        "restart_count": group.restarts,
        "master_addr": group.master_addr,
        "master_port": group.master_port,
        "group_rank": group.group_rank,
        "group_world_size": group.group_world_size,
        "local_ranks": [worker.local_rank for worker in group.workers],
        "role_ranks": [worker.role_rank for worker in group.workers],
        "global_ranks": [worker.global_rank for worker in group.workers],
        "role_world_sizes": [worker.role_world_size for worker in group.workers],
        "global_world_sizes": [worker.world_size for worker in group.workers],
        "event_log_handler": group.spec.event_log_handler,
    }
    return "\n".join(f"  {name}={value}" for name, value in rows.items())


# Workers' environment (contract section 2)


def worker_environment(
    group: WorkerGroup, worker: Worker, constant: Mapping[str, str], agent_environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables for one worker besides the agent's environment.

    Args:
        group: the group, with its place in the round.
        worker: the worker, with its ranks.
        constant: the variables of all workers (`constant_environment`).
        agent_environment: the agent's own environment.
    """
    spec = group.spec
    numbers: dict[str, object] = {
        **constant,
        "LOCAL_RANK": worker.local_rank,
        "RANK": worker.global_rank,
        "GROUP_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": group.restarts,
    }
    environment = {name: str(value) for name, value in numbers.items()}
    if spec.virtual_local_rank:
        from rallypoint.base.devices import one_device_per_worker

        environment["LOCAL_RANK"] = "0"
        environment |= one_device_per_worker(agent_environment, spec.local_world_size)[worker.local_rank]
    if group.notices:
        environment[NOTICES_VARIABLE] = group.notices
    for source in group.variable_sources:
        environment.update(source.variables(worker, environment))
    return environment


def constant_environment(spec: WorkerSpec, agent_environment: Mapping[str, str]) -> dict[str, str]:
    """The additional variables shared by all workers of this node in all rounds.

    Args:
        spec: the spec of the workers.
        agent_environment: the agent's own environment.
    """
    constants: dict[str, object] = {
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": agent_environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        # Makes SIGSEGV, and the SIGABRT of a stop that takes too long, write the stacks of all threads.
        "PYTHONFAULTHANDLER": agent_environment.get("PYTHONFAULTHANDLER", 1),
    }
    if spec.local_world_size == 1 or spec.virtual_local_rank:
        constants["LOCAL_RANK"] = 0
    if "OMP_NUM_THREADS" in agent_environment:
        constants["OMP_NUM_THREADS"] = agent_environment["OMP_NUM_THREADS"]
    return {name: str(value) for name, value in constants.items()}
