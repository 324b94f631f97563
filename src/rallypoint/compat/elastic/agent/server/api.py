"""In the place of `torch.distributed.elastic.agent.server.api`: agents as subclasses, over the parts of our own agent.

Third parties override methods of `SimpleElasticAgent`; `OverriddenWorkers` lets our loop call them. Where a method is
not overridden, our loop goes on as it does without: it handles notifications while workers stop, and opens no store.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from rallypoint.agent.loop import AgentLoop
from rallypoint.agent.rendezvous_client import rendezvous_of
from rallypoint.agent.signals import GracePeriods, handled_signals
from rallypoint.agent.spec import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.agent.steps import StopWorkers
from rallypoint.agent.third_party import exchange_ranks
from rallypoint.agent.workers import WorkerController, workers_of
from rallypoint.base.errors import SignalException
from rallypoint.base.log import get_logger
from rallypoint.base.signals import ignore_signals_at_exit
from rallypoint.compat.elastic.agent.server.own_loop import OwnLoop
from rallypoint.compat.reexports import reexports_of
from rallypoint.logs.specs import DefaultLogsSpecs
from rallypoint.protocol.errors import RendezvousGracefulExitError
from rallypoint.protocol.messages import Placement
from rallypoint.store.api import Store
from rallypoint.telemetry.events import Event
from rallypoint.telemetry.lazy import profiled
from rallypoint.workers.escalation import StopInProgress

if TYPE_CHECKING:
    from rallypoint.health.check import ProgressProbe

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

__getattr__ = reexports_of(__name__)

log = get_logger(__name__)


class ElasticAgent(ABC):
    """An agent as its launcher sees it."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult | None:
        """Run the workers to the job's end, in as many rounds as it takes; None for a spare that was not needed."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The worker group, to look at and not to change."""


class OverriddenWorkers(WorkerController):
    """Workers that the methods of an agent start, watch and stop, for our loop."""

    agent: SimpleElasticAgent

    def prepare(self) -> None:
        """There is no reaper: no processes are started here."""

    def exit_fds(self) -> list[int] | None:
        return None

    def running(self) -> Collection[int]:
        return range(self.group.spec.local_world_size)

    def ended_in_order(self) -> bool:
        return False

    def overrides(self, name: str, of: type[SimpleElasticAgent] | None = None) -> bool:
        """Whether the agent's class has another method of this name than `of`, or than `SimpleElasticAgent`, has."""
        return getattr(type(self.agent), name) is not getattr(of or SimpleElasticAgent, name)

    def begin_round(self, placement: Placement) -> None:
        self.group.placement, self.group.restarts = placement, placement.restarts

    def start(self, placement: Placement) -> None:
        self.agent._initialize_workers(self.group)  # it enters the round, by methods that a subclass may override

    def assign(self, placement: Placement) -> list[Worker]:
        # An override may use the round's store. Ours does not, and then none is opened.
        store = self.group.store if self.overrides("_assign_worker_ranks") else None
        size = placement.group_world_size
        return self.agent._assign_worker_ranks(store, placement.group_rank, size, self.group.spec)

    def poll(self) -> RunResult:
        return self.agent._monitor_workers(self.group)

    def stop(self, step: StopWorkers) -> StopInProgress | None:
        if step.restarts and self.overrides("_restart_workers"):
            self.agent._restart_workers(self.group)
            return None
        return super().stop(step)

    def begin_stop(self, death_sig: signal.Signals, timeout: float, *, keeps: bool) -> StopInProgress | None:
        # `_stop_workers` asks by SIGTERM. No notification is handled meanwhile: none can shorten the grace period.
        if death_sig == signal.SIGTERM:
            self.agent._stop_workers(self.group)
        else:
            self.agent._shutdown(death_sig, round(timeout))
        return None

    def shutdown(self, number: int) -> None:
        self.agent._shutdown(signal.Signals(number), self.agent._shutdown_timeout)

    def on_succeeded(self) -> None:
        self.agent._exit_barrier()

    def restart_limit(self) -> int:
        most, left = self.group.spec.max_restarts, self.agent._restarts_left
        if left is None:
            return most
        return min(most, self.agent._most_restarts) if left else 0

    def remaining(self) -> int:
        return self.agent._remaining_restarts


def attribute_of(owner: Callable[[Any], Any], name: str) -> Any:
    """A property for an attribute of one of the parts, which subclasses read and set."""
    return property(lambda agent: getattr(owner(agent), name), lambda agent, value: setattr(owner(agent), name, value))


class SimpleElasticAgent(ElasticAgent):
    """An agent with one worker group. Subclasses start, watch and stop the workers.

    Args:
        spec: what to run.
        exit_barrier_timeout: seconds that a handler without notifications waits for other nodes at the end. With ours
            the wait ends with the verdict, however long that takes.
        shutdown_timeout: seconds between the signal that stops workers and SIGKILL. After a failure it is 5, or this if
            it is less.
        workers: what our loop gets; one that calls the methods below if none is given.
        health: see `run_agent`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = 300,
        shutdown_timeout: int = 30,
        workers: OverriddenWorkers | None = None,
        health: AbstractContextManager[ProgressProbe | None] | None = None,
    ) -> None:
        if workers is None:
            rendezvous = rendezvous_of(spec, exit_barrier_timeout)
            workers = OverriddenWorkers(spec, rendezvous, GracePeriods(shutdown_timeout), DefaultLogsSpecs())
        workers.agent = self
        self._workers = workers
        self._health: AbstractContextManager[ProgressProbe | None] = health or nullcontext()
        self._worker_group = workers.group
        self._exit_barrier_timeout = exit_barrier_timeout
        self._own_loop: OwnLoop | None = OwnLoop(workers)
        """What a loop of a subclass's own needs; given up when ours begins."""
        self._runs = False
        """Whether `run` is under way."""
        self._until_the_end = ExitStack()
        self._restarts_left: int | None = None
        self._most_restarts = 0
        self._failed_with = RunResult(WorkerState.FAILED)

    _shutdown_timeout = attribute_of(lambda agent: agent._workers.grace, "stop")

    # For subclasses

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers of the group's spec; returns local rank to worker id."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop all workers, and return when they are gone. Nothing happens if none run."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the workers without waiting; state, return values and failures by global rank."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the workers and release everything. Always called at the end; idempotent.

        Args:
            death_sig: the signal that asks the workers.
            timeout: seconds between it and SIGKILL.
        """

    # What torch's users call and override

    @property
    def _remaining_restarts(self) -> int:
        """How many failures the job would still survive. It can be set: a loop of a subclass's own counts it down, and
        with ours, a subclass that knows that no restart would help sets it to 0."""
        group = self._worker_group
        left = max(0, group.spec.max_restarts - group.restarts)
        if self._restarts_left is None:
            return left
        if self._own_loop is not None:
            return min(left, self._restarts_left)
        return min(left, max(0, self._most_restarts - group.restarts))

    @_remaining_restarts.setter
    def _remaining_restarts(self, left: int) -> None:
        group = self._worker_group
        if group.placement is None:
            group.restarts = max(0, group.spec.max_restarts - left)
        self._restarts_left = left
        self._most_restarts = group.restarts + left

    def get_event_succeeded(self) -> Event:
        """The event that this agent's run has returned."""
        return self._workers.events.succeeded()

    def get_event_failed(self) -> Event:
        """The event that the exception which is being handled has ended this agent's run."""
        return self._workers.events.failed()

    def record_duration(self, state: str) -> AbstractContextManager[None]:
        """Record the event of a state with the time that the inside of the `with` takes."""
        return self._workers.events.duration(state)

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The worker group, to look at and not to change."""
        return self._worker_group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult | None:
        """Run the workers to the job's end; see `agent.loop.run_agent`."""
        self._runs = True
        try:
            return self._run_to_end(role)
        finally:
            self._runs = False

    @profiled("SimpleElasticAgent.run")
    def _run_to_end(self, role: str) -> RunResult | None:
        workers = self._workers
        with ignore_signals_at_exit():
            try:
                result = self._run(role)
                workers.events.run_ended(result, workers.remaining())
                return result
            except RendezvousGracefulExitError as ending:
                log.info("%s", ending)
                return None
            finally:
                try:
                    workers.rendezvous.shutdown()
                finally:
                    workers.close()

    def _run(self, role: str) -> RunResult:
        """The run, and, after a loop that is not ours, what ours would have done at its end."""
        death_sig = signal.SIGTERM
        try:
            with self._until_the_end:
                result = self._invoke_run(role)
            if self._own_loop is not None:
                self._own_loop.end_with(result, self._exit_barrier_timeout)
            return result
        except SignalException as asked:
            death_sig = signal.Signals(asked.sigval)
            raise
        finally:
            if self._own_loop is not None:
                self._shutdown(death_sig, self._shutdown_timeout)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """The run itself; when it returns or raises, no worker is left."""
        self._own_loop = None
        self._workers.prepare()
        with self._health as probe:
            log.info("[%s] starting workers for entrypoint: %s", role, self._worker_group.spec.get_entrypoint_name())
            return AgentLoop(self._workers, probe=probe).run(handled_signals())

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Apply a placement: address of the store, group rank, worker ranks.

        Our loop has been given it by then; for a loop of a subclass's own, this waits until the round is complete.
        """
        placement = worker_group.placement if self._own_loop is None else self._own_loop.rendezvous()
        assert placement is not None, "no placement before the first round"
        self._workers.enter_round(placement)

    @profiled("SimpleElasticAgent._assign_worker_ranks")
    def _assign_worker_ranks(
        self, store: Store | None, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """The workers of this node with their ranks.

        The placement has them; only where a subclass has a rendezvous of its own are they exchanged over the store.
        """
        if self._worker_group.placement is not None:
            return workers_of(self._worker_group.placement.ranks, spec)
        assert store is not None, "ranks are exchanged over a store where no placement has them"
        ranks = exchange_ranks(store, group_rank, group_world_size, spec.role, spec.local_world_size)
        return workers_of(ranks, spec)

    @profiled("SimpleElasticAgent._initialize_workers")
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Apply the placement and start the workers."""
        self._rendezvous(worker_group)
        self._workers.started(self._start_workers(worker_group))

    @profiled("SimpleElasticAgent._restart_workers")
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers, and start them again in the next round.

        Our loop calls this only where it is overridden, and does the second half itself: it has asked for the round
        already, and starts the workers when that is complete. Otherwise it begins a stop that it sees through.
        """
        log.info("[%s] Stopping worker group", worker_group.spec.role)
        failed = self._failed_with if worker_group.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) else None
        if self._own_loop is not None:
            self._own_loop.end_round(failed)
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        if self._own_loop is not None:
            self._workers.events.workers_ended(failed, self._workers.succeeded())
            self._initialize_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Report that this node is done. The verdict, once all are, ends our loop; any other waits here."""
        if self._own_loop is None:
            WorkerController.on_succeeded(self._workers)
        else:
            self._own_loop.finish(self._exit_barrier_timeout)
