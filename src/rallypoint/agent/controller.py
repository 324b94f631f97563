"""The workers of one node, as the agent's loop sees them.

The layers that a stop goes through; each knows only the next one:

    agent/policy      StopWorkers               one at a time; `WorkersStopped` follows
    agent/executor    WorkerController.stop     waits on the stop's `fds` until its `wake_at`, beside everything else
    agent/processes   PContext.begin_close
    workers/stop      Stop                      signal, grace period, stacks, SIGKILL, sweep; then all output is written
      WriteDetector which workers are spared, since they write a file
      ChildProcess    a signal to the worker alone, through its pidfd
      Sweep           all that workers have left: by the reaper, or, where that is lost, as /proc shows it
    workers/reaper    SIGTERM, then SIGKILL to all below it, until nothing is left; its supervisor kills what it leaves
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from signal import Signals

from rallypoint.agent.event_emitter import EventEmitter
from rallypoint.agent.grace_period import GracePeriods
from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.agent.spec import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState, node_failure
from rallypoint.agent.steps import KeepNobody, StopWorkers
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.failures.cause import Cause, Ending
from rallypoint.membership.operations import Succeed
from rallypoint.protocol.messages import NodeReport, Placement
from rallypoint.telemetry.lazy import profiled

if TYPE_CHECKING:
    from rallypoint.agent.monitors import EventObserver, Monitor, Preparation, WorkerWatch
    from rallypoint.agent.node_check import NodeCheck
    from rallypoint.agent.progress import ProgressTracker
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.ranks.assign import NodeRanks
    from rallypoint.workers.context import PContext
    from rallypoint.workers.stop import StopInProgress

log = get_logger(__name__)


class WorkersSeen(NamedTuple):
    """The workers of a node at one moment, for other threads: how many ran, how many failures the job would survive,
    and what `WorkerController.output_ages` returns.
    """

    running: int
    remaining: int
    output_ages: Callable[[], tuple[float, ...]] = tuple


class WorkerController(ABC):
    """Starts, watches and stops the workers of one node. No call waits for other nodes.

    Args:
        spec: the spec of the workers.
        rendezvous: this node's client of the rendezvous.
        grace: how long workers have to end.
    """

    def __init__(self, spec: WorkerSpec, rendezvous: RendezvousClient, grace: GracePeriods) -> None:
        self.group = WorkerGroup(spec)
        self.events = EventEmitter(self.group)
        self.rendezvous = rendezvous
        self.grace = grace
        self.progress: ProgressTracker | None = None
        """Tracks the progress of the workers; None before the first have been started."""
        self.hang_watch: WorkerWatch | None = None
        """Tells since when the workers have given no sign of life, if that is requested."""
        self.pcontext: PContext | None = None
        """The processes of the present workers; None before the first, and if they are not our processes."""
        self.incidents: EventObserver | None = None
        """Keeps failures for later, if a folder for that was given."""
        self.preparations: list[Preparation] = []
        """The preparations that each round waits for before its workers start, in this order."""
        self.begin_check: Callable[[], NodeCheck] | None = None
        """Begins the user's check of this node, if there is one."""
        self.round_entered_at = 0.0
        """When this node entered the present round, on the monotonic clock."""
        self.started_at = 0.0
        """When the present workers were started, in seconds since 1970."""
        self.failures: Mapping[int, ProcessFailure] = {}
        """The failures of the present workers that the last `poll` has found, by global rank."""
        self.seen = WorkersSeen(0, spec.max_restarts)
        """What other threads may know; all else here, and the workers above all, is the loop's."""

    def begin_round(self, placement: Placement) -> None:
        """Begin a round; `start` follows as soon as no preparation is left."""
        self.enter_round(placement)
        for each in self.preparations:
            each.begin(self.group)

    @abstractmethod
    def start(self, placement: Placement) -> None:
        """Start the workers of the round that was begun."""

    @abstractmethod
    def poll(self) -> RunResult:
        """The result so far of the workers: state, return values and failures by global rank. Does not wait."""

    @abstractmethod
    def begin_stop(self, death_sig: Signals, timeout: float) -> StopInProgress | None:
        """Begin to end the workers; the loop drives the stop while it handles everything else.

        Args:
            death_sig: the first signal.
            timeout: seconds between it and SIGKILL.

        Returns:
            The stop in progress; None if the workers are gone.
        """

    @abstractmethod
    def shutdown(self, number: int) -> None:
        """Stop the workers for good by this signal, until they are gone. Always called at the end; idempotent."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """The run begins: prepare what can be prepared while the nodes find each other."""

    def close(self) -> None:
        """The run is over, for the other nodes too: release what was kept until now."""
        for each in (self.progress, self.incidents, self.hang_watch, *self.preparations):
            if each is not None:
                each.close()

    def stop(self, step: StopWorkers) -> StopInProgress | None:
        """Begin to stop the workers as the step says; None if they are gone already."""
        if self.hang_watch is not None:
            self.hang_watch.end_round()
        if step.restarts:
            self.events.workers_restarting()
            log.info("[%s] Stopping worker group", self.group.spec.role)
        return self.begin_stop(Signals(step.signal), self.grace.of(step.failed))

    def keep_nobody(self, step: KeepNobody) -> None:
        """Let no worker go on in its process after the stop in progress, whatever its reason."""
        if self.pcontext is not None:
            self.pcontext.keep_nobody(Signals(step.signal), self.grace.of(step.failed))

    def terminated(self) -> float:
        """This agent was sent SIGTERM. Returns the seconds that the workers may be given to save."""
        until = self.grace.terminated()
        if until is not None:
            self.shorten_stop(until)
        return self.grace.notice

    def shorten_stop(self, until: float) -> None:  # noqa: B027 - most have nothing to do
        """Shorten the stop in progress, if there is one, so that it leaves the workers no time after this moment."""

    def forward(self, number: int) -> None:  # noqa: B027 - most have nothing to do
        """Forward a signal that this agent was sent to each running worker that was not sent it too."""

    def on_succeeded(self) -> None:
        """All workers have succeeded: announce it."""
        assert self.group.placement is not None, "no placement before the first round"
        self.rendezvous.send(Succeed(self.group.placement.round))

    def fence(self, until: float) -> None:  # noqa: B027 - most have nothing to do
        """Have the workers killed at this moment (`BOOT_CLOCK`), even if this agent is frozen; infinity for never."""

    def exit_fds(self) -> list[int] | None:
        """Descriptors that become readable when a worker ends; None if workers must be polled at intervals."""
        return None

    def monitors(self) -> Sequence[Monitor]:
        """Further objects that the loop waits for and steps."""
        return [*(each for each in (self.progress, self.hang_watch) if each is not None), *self.preparations]

    def preparing(self) -> bool:
        """Whether workers that are due to start have to wait."""
        return any(each.preparing() for each in self.preparations)

    def preparation_failure(self) -> Cause | None:
        """Why the workers of this round cannot start; None if they can."""
        failed = next((each for each in self.preparations if each.failure), None)
        if failed is None:
            return None
        return node_failure(failed.failure, Ending.INFRASTRUCTURE, exitcode=1, host=failed.failed_node)

    def cancel_preparations(self) -> None:
        """The round is over, and its workers, if they have not started, never will."""
        for each in self.preparations:
            each.cancel()

    def running(self) -> Collection[int]:
        """Local ranks of the workers that have not ended, as far as is known."""
        return range(self.group.spec.local_world_size)

    def shared_signals(self) -> frozenset[int]:
        """The signals that all processes of this node's job were sent a moment ago, as far as is known."""
        return frozenset()

    def ended_in_order(self) -> bool:
        """Whether the workers, if there were any, have ended with success or by SIGTERM."""
        return False

    def stopped(self) -> tuple[int, ...]:
        """Global ranks of the workers that this agent ended while they ran, for the report; none if unknown."""
        return ()

    def succeeded(self) -> tuple[int, ...]:
        """Global ranks of the workers that had succeeded before anything stopped them; none if that is not known."""
        return ()

    def look_ahead(self) -> None:  # noqa: B027 - most have nothing to do
        """Workers have written something into their folder: import what reading it at the end of the round needs."""

    def survivors(self) -> Collection[int]:
        """Local ranks of the workers that have left their round and wait in their processes for the next one."""
        return ()

    def restarts_workers(self) -> bool:
        """Whether not all workers of the round that ends can go on in their processes; asked before their stop."""
        return bool(self.group.workers)

    def restart_limit(self) -> int:
        """The number of failures that the job may survive, as far as this node knows."""
        ends = any(each.failure and each.ends_job for each in self.preparations)
        return 0 if ends else self.group.spec.max_restarts

    def remaining(self) -> int:
        """The number of further failures that the job would survive."""
        return max(0, self.restart_limit() - self.group.restarts)

    def report(self, round_: int) -> NodeReport:
        """The report about the workers of this round, which the coordinator sends to watchers."""
        pids = tuple(each.id if isinstance(each.id, int) else 0 for each in self.group.workers)
        step, age = -1, -1.0
        steps: tuple[int, ...] = ()
        if self.progress is not None:
            self.progress.look()
            steps = self.progress.steps()
            if (latest := self.progress.latest()) is not None:
                step, age = latest.step, max(0.0, SYSTEM_CLOCK.monotonic() - latest.at)
        return NodeReport(round_, pids, progress=step, progress_age=age, steps=steps)

    def output_ages(self) -> Callable[[], tuple[float, ...]]:
        """A function that returns the seconds since each worker, by local rank, has written something; -1 if that is
        not known.

        It looks at log files, which may be on a disk that hangs: do not call it on the loop's thread.
        """
        return tuple if self.pcontext is None else self.pcontext.output_ages()

    def look(self) -> None:
        """Replace `seen` by what the loop knows now."""
        self.seen = WorkersSeen(len(self.running()), self.remaining(), self.output_ages())

    def has_progress(self) -> bool:
        """Whether the workers of this round have reported progress."""
        return self.progress is not None and self.progress.made()

    def report_progress(self) -> None:
        """Report to the coordinator, at the end of a round, the progress of its workers."""
        if self.progress is not None:
            self.progress.end_round()

    def _watch_progress(self) -> None:
        """Watch the workers that have just been started. The code for that is imported now: no worker waits for it."""
        if self.progress is None:
            from rallypoint.agent.progress import ProgressTracker

            path, seen = self.group.spec.features.recovery.progress_file, self.events.progress
            self.progress = ProgressTracker(SYSTEM_CLOCK, path, self.rendezvous.send, seen)
            self.progress.on_folder = self.look_ahead
        group, placement = self.group, self.group.placement
        assert placement is not None
        since = self.round_entered_at if group.survived else -math.inf
        self.progress.begin_round(placement.round, group.notices, len(group.workers), placement.progress, since)
        if self.hang_watch is not None:
            self.hang_watch.begin_round(placement.round)

    def status(self) -> Mapping[str, object]:
        """The status of this agent for the health check."""
        group = self.group
        return {
            "run_id": group.spec.rdzv_handler.get_run_id(),
            "role": group.spec.role,
            "state": group.state.value,
            "round": None if group.placement is None else group.placement.round,
            "restarts": group.restarts,
            "remaining_restarts": self.remaining(),
            "group_rank": group.group_rank,
            "group_world_size": group.group_world_size,
            "workers": [
                {"local_rank": each.local_rank, "global_rank": each.global_rank, "pid": each.id}
                for each in group.workers
            ],
        }

    # Parts of `begin_round` and `start`

    def enter_round(self, placement: Placement) -> None:
        """Begin a round: address of the store, group rank, worker ranks."""
        group, spec = self.group, self.group.spec
        if not self.survivors():
            self.pcontext = None  # those of the previous round, which are gone
        self.round_entered_at = SYSTEM_CLOCK.monotonic()
        group.placement, group.restarts = placement, placement.restarts
        self.rendezvous.begin_round(placement)
        if placement.max_restarts >= 0:  # the first node's value is the job's
            spec.max_restarts = placement.max_restarts
        self.events.round_complete()
        info = self.rendezvous.info(placement)
        group.store = None
        group.open_store = lambda: info.store
        group.master_addr = spec.master_addr or placement.store_address
        group.master_port = spec.master_port or placement.store_port
        with self.events.duration("ASSIGN_WORKER_RANKS"):
            group.workers = self.assign(placement)
        group.group_rank = placement.group_rank
        group.group_world_size = placement.group_world_size
        log.info("[%s] Rendezvous complete for workers. Result:\n%s", spec.role, _round_block(group))

    @profiled("SimpleElasticAgent._assign_worker_ranks")
    def assign(self, placement: Placement) -> list[Worker]:
        """The workers of this node with their ranks, all of which the placement holds."""
        return workers_of(placement.ranks, self.group.spec)

    def started(self, ids: Mapping[int, object]) -> None:
        """Note that the workers have been started, with these ids by local rank."""
        for local_rank, worker_id in ids.items():
            self.group.workers[local_rank].id = worker_id
        self.started_at = time.time()
        self.events.workers_started()
        self.group.state = WorkerState.HEALTHY
        self._watch_progress()


def workers_of(ranks: NodeRanks, spec: WorkerSpec) -> list[Worker]:
    """The workers of a node with these ranks."""
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


def _round_block(group: WorkerGroup) -> str:
    """The lines about a complete round, for the log."""
    rows = {
        "restart_count": group.restarts,
        "master_addr": group.master_addr,
        "master_port": group.master_port,
        "group_rank": group.group_rank,
        "group_world_size": group.group_world_size,
        "local_ranks": [each.local_rank for each in group.workers],
        "role_ranks": [each.role_rank for each in group.workers],
        "global_ranks": [each.global_rank for each in group.workers],
        "role_world_sizes": [each.role_world_size for each in group.workers],
        "global_world_sizes": [each.world_size for each in group.workers],
        "event_log_handler": group.spec.event_log_handler,
    }
    return "\n".join(f"  {name}={value}" for name, value in rows.items())
