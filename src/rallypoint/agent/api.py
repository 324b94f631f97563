"""The agent: rendezvous, ranks and the restart of its worker group, under the method names of the contract's section 8.

`SimpleElasticAgent` leaves processes to a subclass. What happens when is decided in `loop` and `policy`.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rallypoint.agent.crew import Crew, Minding
from rallypoint.agent.loop import AgentLoop
from rallypoint.agent.membership import Membership
from rallypoint.agent.spec import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.agent.telling import Telling
from rallypoint.base.log import get_logger
from rallypoint.base.signals import deaf_at_the_end, signal_number
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.errors import RendezvousGracefulExitError
from rallypoint.rendezvous.messages import Placement
from rallypoint.telemetry.door import profiled

if TYPE_CHECKING:
    from rallypoint.health.pulse import Pulse
    from rallypoint.store.api import Store
    from rallypoint.telemetry.events import Event
    from rallypoint.workers.stop import Stopping

log = get_logger(__name__)

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class ElasticAgent(ABC):
    """What a launcher holds of an agent."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to the job's end, through as many rounds as it takes."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The worker group, to look at and not to change."""


class SimpleElasticAgent(ElasticAgent):
    """The loop of an agent with one worker group. Subclasses start, watch and stop the workers."""

    def __init__(self, spec: WorkerSpec, exit_barrier_timeout: float = 300, shutdown_timeout: int = 30) -> None:
        """Make an agent; nothing happens before `run`.

        Args:
            spec: what to run.
            exit_barrier_timeout: seconds that a handler which can only be asked waits for other nodes at the end.
                With ours the wait ends with the verdict, however long that takes.
            shutdown_timeout: seconds between the signal that stops workers and SIGKILL.
        """
        self._worker_group = WorkerGroup(spec)
        self._exit_barrier_timeout = exit_barrier_timeout
        self._shutdown_timeout = shutdown_timeout
        self._membership = self._make_membership(spec, exit_barrier_timeout)
        self._placement: Placement | None = None
        self._pulse: Pulse | None = None
        self._telling = Telling(self._worker_group, lambda: self._restarts)

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
        """End the workers and let go of everything. Always called at the end; idempotent.

        Args:
            death_sig: the signal that asks the workers.
            timeout: seconds between it and SIGKILL.
        """

    def _begin_stop(self, death_sig: signal.Signals, timeout: int) -> Stopping | None:
        """Begin to end the workers; the loop sees the stop through and hears everything else meanwhile.

        This one ends them before it returns, by what a subclass has: `_stop_workers`, which asks by SIGTERM, or
        `_shutdown` for any other signal. Nothing is heard meanwhile, so that nothing can cut the grace short.

        Args:
            death_sig: the signal that asks the workers.
            timeout: seconds between it and SIGKILL.

        Returns:
            The stop that is under way; None if the workers are gone.
        """
        if death_sig == signal.SIGTERM:
            self._stop_workers(self._worker_group)
        else:
            self._shutdown(death_sig, timeout)
        return None

    def _pass_on(self, number: int) -> None:
        """Hand a signal to each worker that runs; nothing happens where workers cannot be sent any."""

    def _running_ranks(self) -> Collection[int]:
        """Local ranks of the workers that have not ended, as far as is known."""
        return range(self._worker_group.spec.local_world_size)

    def _watched_by(self) -> Minding | None:
        """What else watches the workers that run now, if anything does."""
        return None

    def _exit_fds(self) -> list[int] | None:
        """Descriptors that become readable when a worker ends; None if workers must be asked every so often."""
        return None

    def _stopped_ranks(self) -> tuple[int, ...]:
        """Global ranks of the workers that this agent ended while they ran, for the report; none if it cannot tell."""
        return ()

    # What torch's users call and override

    @property
    def _restarts(self) -> int:
        return self._placement.restarts if self._placement is not None else 0

    @property
    def _remaining_restarts(self) -> int:
        return self._telling.remaining_restarts

    def get_event_succeeded(self) -> Event:
        """The event that this agent's run has returned."""
        return self._telling.event("SUCCEEDED")

    def get_event_failed(self) -> Event:
        """The event that the exception which is being handled has ended this agent's run."""
        import traceback

        return self._telling.event("FAILED", traceback.format_exc())

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Tell the event of a state with the time that the inside of the `with` takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._telling.took(state, began)

    def tell(self, make: Callable[[], Event]) -> None:
        """Record an event where this agent's events go; it is made only if anybody wants it."""
        self._telling.tell(make)

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The worker group, to look at and not to change."""
        return self._worker_group

    @profiled
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to the job's end.

        Returns:
            How the group ended; for a spare that was never needed, success without values.

        Raises:
            RendezvousError: no round could be agreed on.
            SignalException: this agent was asked to end; its workers have been.
        """
        with deaf_at_the_end():
            try:
                result = self._invoke_run(role)
                self._telling.ended(result)
                return result
            except RendezvousGracefulExitError as ending:
                log.info("%s", ending)
                return RunResult(WorkerState.SUCCEEDED)
            finally:
                self._membership.shutdown()

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """The run itself; when it returns or raises, no worker is left."""
        group = self._worker_group
        log.info("[%s] starting workers for entrypoint: %s", role, group.spec.get_entrypoint_name())
        crew = Crew(
            group=group,
            grace=self._shutdown_timeout,
            start=self._start_round,
            stop=self._stop,
            shutdown=lambda number: self._shutdown(signal.Signals(number), self._shutdown_timeout),
            pass_on=self._pass_on,
            look=self._look,
            running=self._running_ranks,
            exit_fds=self._exit_fds,
            finished=self._exit_barrier,
            stopped=self._stopped_ranks,
            minder=self._watched_by,
            shown=self._shown,
        )
        return AgentLoop(crew, self._membership, pulse=self._pulse).run(_signals())

    def _look(self) -> RunResult:
        result = self._monitor_workers(self._worker_group)
        self._telling.looked(result)
        return result

    def _shown(self) -> Mapping[str, object]:
        """What the health check shows of this agent."""
        group = self._worker_group
        return {
            "run_id": group.spec.rdzv_handler.get_run_id(),
            "role": group.spec.role,
            "state": str(group.state),
            "round": None if self._placement is None else self._placement.round,
            "restarts": self._restarts,
            "remaining_restarts": self._remaining_restarts,
            "group_rank": group.group_rank,
            "group_world_size": group.group_world_size,
            "workers": [
                {"local_rank": each.local_rank, "global_rank": each.global_rank, "pid": each.id}
                for each in group.workers
            ],
        }

    def _start_round(self, placement: Placement) -> None:
        self._placement = placement
        self._initialize_workers(self._worker_group)

    def _stop(self, number: int, again: bool) -> Stopping | None:
        if again and type(self)._restart_workers is not SimpleElasticAgent._restart_workers:
            self._restart_workers(self._worker_group)
            return None
        if again:
            log.info("[%s] Stopping worker group", self._worker_group.spec.role)
        return self._begin_stop(signal.Signals(number), self._shutdown_timeout)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Take up the placement that the rendezvous has given: address of the store, group rank, worker ranks."""
        placement, spec = self._placed(), worker_group.spec
        self._telling.met()
        self._membership.take_up(placement)
        info = self._membership.info(placement)
        worker_group.store = None
        worker_group.open_store = lambda: info.store
        worker_group.master_addr = spec.master_addr or placement.store_address
        worker_group.master_port = spec.master_port or placement.store_port
        # An override may want to talk over the round's store. Ours does not, and then none is opened.
        overridden = type(self)._assign_worker_ranks is not SimpleElasticAgent._assign_worker_ranks
        store = worker_group.store if overridden else None
        with self.record_duration("ASSIGN_WORKER_RANKS"):
            workers = self._assign_worker_ranks(store, placement.group_rank, placement.group_world_size, spec)
        worker_group.workers = workers
        worker_group.group_rank = placement.group_rank
        worker_group.group_world_size = placement.group_world_size
        log.info("[%s] Rendezvous complete for workers. Result:\n%s", spec.role, self._round_block())

    @profiled
    def _assign_worker_ranks(
        self, store: Store | None, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """The workers of this node with their ranks. The placement holds them, so the store is not used."""
        ranks = self._placed().ranks
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

    @profiled
    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        """Take up the placement and start the workers."""
        self._rendezvous(worker_group)
        ids = self._start_workers(worker_group)
        for local_rank, worker_id in ids.items():
            worker_group.workers[local_rank].id = worker_id
        self._telling.started()
        worker_group.state = WorkerState.HEALTHY

    @profiled
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers; they are started again when the next round, asked for already, is complete.

        Called only where it is overridden: else the stop is begun by `_begin_stop`, and waited for with all the rest.
        """
        log.info("[%s] Stopping worker group", worker_group.spec.role)
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED

    def _exit_barrier(self) -> None:
        """Tell the others that this node is done. The verdict, once all are, ends the run."""
        log.info("Local worker group finished (%s). Waiting for the other agents.", self._worker_group.state)
        self._membership.report_success(self._placed().round)

    # Inside

    @staticmethod
    def _make_membership(spec: WorkerSpec, exit_barrier_timeout: float) -> Membership:
        if isinstance(spec.rdzv_handler, ElasticHandler):
            return spec.rdzv_handler
        from rallypoint.agent.foreign import ForeignMembership

        return ForeignMembership(spec, exit_barrier_timeout)

    def _placed(self) -> Placement:
        assert self._placement is not None, "no placement before the first round"
        return self._placement

    def _round_block(self) -> str:
        group = self._worker_group
        rows = {
            "restart_count": self._placed().restarts,
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


def _signals() -> list[int]:
    """The signals that this agent handles; a name that is none was warned of by the command line.

    Whoever started us with SIGHUP ignored (`nohup`) meant that, unless the user has named others than the usual. Of
    SIGINT and SIGQUIT that does not follow: a shell's script ignores them for all that it starts in the background.
    """
    names = os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS)
    numbers: list[int] = [number for number in map(signal_number, names.split(",")) if number is not None]
    if names != DEFAULT_SIGNALS:
        return numbers
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
