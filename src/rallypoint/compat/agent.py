"""torch's agents as base classes, built from parts of our own agent.

Third parties override methods of `SimpleElasticAgent`; `OverriddenWorkers` lets our loop call them. If a method is not
overridden, our loop works as without these classes: it handles notifications while workers stop, and opens no store.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from rallypoint.agent.launch import rendezvous_of
from rallypoint.agent.loop import run_agent, run_loop
from rallypoint.agent.signals import GracePeriods
from rallypoint.agent.spec import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.agent.steps import StopWorkers
from rallypoint.agent.third_party import exchange_ranks
from rallypoint.agent.workers import WorkerController, workers_of
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.control.protocol.messages import Placement
from rallypoint.observe.telemetry.agent_events import Event
from rallypoint.observe.telemetry.lazy import profiled
from rallypoint.store.api import Store
from rallypoint.workers.logs.specs import DefaultLogsSpecs, LogsSpecs
from rallypoint.workers.stop import Stop

if TYPE_CHECKING:
    from rallypoint.observe.health import HealthCheckServer, ProgressProbe

__all__ = ["ElasticAgent", "LocalElasticAgent", "SimpleElasticAgent"]

log = get_logger(__name__)


class ElasticAgent(ABC):
    """An agent, from the launcher's point of view."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult | None:
        """Run the workers to the job's end, in as many rounds as it takes; None for a spare that was not needed."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The worker group. Do not change it."""


class OverriddenWorkers(WorkerController):
    """Workers that the methods of an agent start, watch and stop, for our loop."""

    agent: SimpleElasticAgent

    def overrides(self, name: str, of: type[SimpleElasticAgent] | None = None) -> bool:
        """Whether the agent's class overrides this method of `of`, or of `SimpleElasticAgent`."""
        return getattr(type(self.agent), name) is not getattr(of or SimpleElasticAgent, name)

    def enter_round(self, placement: Placement) -> None:
        """Note the place; `start` enters the round, with methods that a subclass may override."""
        self.group.placement, self.group.restarts = placement, placement.restarts

    def start(self) -> None:
        self.agent._initialize_workers(self.group)

    def assign(self, placement: Placement) -> list[Worker]:
        # Open the round's store only for an override, which may use it.
        store = self.group.store if self.overrides("_assign_worker_ranks") else None
        size = placement.group_world_size
        return self.agent._assign_worker_ranks(store, placement.group_rank, size, self.group.spec)

    def poll(self) -> RunResult:
        return self.agent._monitor_workers(self.group)

    def stop(self, step: StopWorkers) -> Stop | None:
        if step.restarts and self.overrides("_restart_workers"):
            self.agent._restart_workers(self.group)
            return None
        # `_stop_workers` sends SIGTERM. No notification is handled meanwhile, so none can shorten the grace period.
        if step.restarts:
            log.info("[%s] Stopping worker group", self.group.spec.role)
        if step.signal == signal.SIGTERM:
            self.agent._stop_workers(self.group)
        else:
            self.agent._shutdown(signal.Signals(step.signal), round(self.grace.seconds(failed=step.failed)))
        return None

    def shutdown(self, number: int, timeout: float | None = None) -> None:
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


class WithoutProcesses(OverriddenWorkers):
    """Workers that only the agent's methods know, without a reaper."""

    def prepare(self) -> None:
        """No processes are started here."""

    def exit_fds(self) -> list[int] | None:
        return None

    def running(self) -> Collection[int]:
        return range(self.group.spec.local_world_size)

    def ended_in_order(self) -> bool:
        return False


def attribute_of(owner: Callable[[Any], Any], name: str) -> Any:
    """A property for an attribute of a part, which subclasses read and set."""
    return property(lambda agent: getattr(owner(agent), name), lambda agent, value: setattr(owner(agent), name, value))


class SimpleElasticAgent(ElasticAgent):
    """An agent with one worker group. Subclasses start, watch and stop the workers.

    Args:
        spec: what to run.
        exit_barrier_timeout: seconds that a handler without notifications waits for other nodes at the end. With our
            own handler, the wait ends with the verdict, however long it takes.
        shutdown_timeout: seconds between the signal that stops workers and SIGKILL. After a failure it is 5, or this
            value if lower.
        workers: the workers for our loop; by default, workers that call the methods below.
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
            workers = WithoutProcesses(spec, rendezvous, GracePeriods(shutdown_timeout), DefaultLogsSpecs())
        workers.agent = self
        self._workers = workers
        self._health: AbstractContextManager[ProgressProbe | None] = health or nullcontext()
        self._worker_group = workers.group
        self._runs = False
        """Whether `run` is in progress."""
        self._restarts_left: int | None = None
        self._most_restarts = 0

    _shutdown_timeout = attribute_of(lambda agent: agent._workers.grace, "stop")

    # For subclasses

    @abstractmethod
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers of the group's spec; returns worker ids by local rank."""

    @abstractmethod
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop all workers, and return when they are gone. Does nothing if none run."""

    @abstractmethod
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers without waiting; returns state, return values and failures by global rank."""

    @abstractmethod
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the workers and release everything. Always called at the end; idempotent.

        Args:
            death_sig: the first signal.
            timeout: seconds between this signal and SIGKILL.
        """

    # For torch's users to call and override

    @property
    def _remaining_restarts(self) -> int:
        """How many failures the job can still survive. A subclass sets it to 0 if no restart can help."""
        group = self._worker_group
        left = max(0, group.spec.max_restarts - group.restarts)
        if self._restarts_left is None:
            return left
        return min(left, max(0, self._most_restarts - group.restarts))

    @_remaining_restarts.setter
    def _remaining_restarts(self, left: int) -> None:
        group = self._worker_group
        self._restarts_left = left
        self._most_restarts = group.restarts + left

    def get_event_succeeded(self) -> Event:
        """The event to record after `run` returned."""
        return self._workers.record_events().succeeded()

    def get_event_failed(self) -> Event:
        """The event to record while handling the exception that ended the run."""
        return self._workers.record_events().failed()

    def record_duration(self, state: str) -> AbstractContextManager[None]:
        """Record the event of a state with the duration of the `with` block."""
        return self._workers.record_events().duration(state)

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The worker group. Do not change it."""
        return self._worker_group

    def run(self, role: str = DEFAULT_ROLE) -> RunResult | None:
        """Run the workers to the job's end; see `agent.loop.run_agent`."""
        self._runs = True
        try:
            return run_agent(self._workers, role, self._health, lambda: self._invoke_run(role))
        finally:
            self._runs = False

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers. No worker is left when this returns or raises. An override must call this method."""
        return run_loop(self._workers, role, self._health)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Apply a placement: address of the store, group rank, worker ranks."""
        WorkerController.enter_round(self._workers, self._placement())

    def _placement(self) -> Placement:
        """The placement from the loop. Raises UserError if the loop is not ours."""
        placement = self._worker_group.placement
        if placement is None:
            raise UserError(
                f"{type(self).__name__} starts its workers from its own loop, which Rallypoint does not run; let "
                "_invoke_run() call super()._invoke_run(), and override the methods that it calls (_start_workers, "
                "_monitor_workers, _stop_workers, _restart_workers, _shutdown)"
            )
        return placement

    @profiled("SimpleElasticAgent._assign_worker_ranks")
    def _assign_worker_ranks(
        self, store: Store | None, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Assign ranks to this node's workers.

        The placement contains them. They are exchanged over the store only if a subclass has its own rendezvous.
        """
        if self._worker_group.placement is not None:
            return workers_of(self._worker_group.placement.ranks, spec)
        assert store is not None, "ranks are exchanged over a store where no placement has them"
        ranks = exchange_ranks(store, group_rank, group_world_size, spec.role, spec.local_world_size)
        return workers_of(ranks, spec)

    @profiled("SimpleElasticAgent._initialize_workers")
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Apply the placement and start the workers."""
        self._placement()
        self._rendezvous(worker_group)
        self._workers.started(self._start_workers(worker_group))

    @profiled("SimpleElasticAgent._restart_workers")
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers. The loop has already requested the next round, and starts them when it is complete.

        The loop calls this only if it is overridden; otherwise it runs the stop itself.
        """
        log.info("[%s] Stopping worker group", worker_group.spec.role)
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED

    def _exit_barrier(self) -> None:
        """Report that this node has finished. The loop ends with the verdict, after all nodes have."""
        WorkerController.on_succeeded(self._workers)


class OverriddenProcesses(OverriddenWorkers):
    """Processes that the methods of an agent start, watch and stop, for our loop."""

    def stop(self, step: StopWorkers) -> Stop | None:
        # A subclass may have its own way to stop workers, which must then be gone.
        own = ("_restart_workers",) if step.restarts else ()
        if any(self.overrides(name, LocalElasticAgent) for name in ("_stop_workers", "_shutdown", *own)):
            return super().stop(step)
        return WorkerController.stop(self, step)


class LocalElasticAgent(SimpleElasticAgent):
    """The agent whose workers are processes of this host.

    Args:
        spec, exit_barrier_timeout, shutdown_timeout: see `SimpleElasticAgent`.
        logs_specs, start_method, log_line_prefix_template, uninterruptible_state_timeout: see `WorkerController`.
        health_check_server: see `health_check`.
    """

    _workers: OverriddenProcesses

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
    ) -> None:
        workers = OverriddenProcesses(
            spec,
            rendezvous_of(spec, exit_barrier_timeout),
            GracePeriods(shutdown_timeout),
            logs_specs,
            start_method,
            log_line_prefix_template,
            uninterruptible_state_timeout,
        )
        from rallypoint.observe.health import health_check

        health = health_check(health_check_server)
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout, workers, health)

    _pcontext = attribute_of(lambda agent: agent._workers, "pcontext")
    _logs_specs = attribute_of(lambda agent: agent._workers, "logs_specs")
    _start_method = attribute_of(lambda agent: agent._workers, "start_method")
    _log_line_prefix_template = attribute_of(lambda agent: agent._workers, "log_line_prefix_template")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return dict(self._workers.start_workers())

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = WorkerController.poll(self._workers)
        if self._workers.beyond_help:
            self._remaining_restarts = 0
        return result

    @profiled("LocalElasticAgent._stop_workers")
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        WorkerController.shutdown(self._workers, signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        WorkerController.shutdown(self._workers, death_sig, timeout)
        if not self._runs:
            self._workers.close()
