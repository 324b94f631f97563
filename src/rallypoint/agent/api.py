"""The agent: rendezvous, ranks and the restart of its worker group, under the method names of the contract's section 8.

`SimpleElasticAgent` leaves processes to a subclass. What happens when is decided in `loop` and `policy`. A subclass
with a loop of its own, in `_invoke_run`, calls the same methods; `asking` is its line to the others.
"""

from __future__ import annotations

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rallypoint.agent.crew import Crew, Minding, Warmth
from rallypoint.agent.handled import handled_signals
from rallypoint.agent.loop import AgentLoop
from rallypoint.agent.membership import Membership
from rallypoint.agent.shown import round_block, status
from rallypoint.agent.spec import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.agent.steps import Stop
from rallypoint.agent.telling import Telling
from rallypoint.base.errors import SignalException
from rallypoint.base.log import get_logger
from rallypoint.base.signals import deaf_at_the_end
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.errors import RendezvousGracefulExitError
from rallypoint.rendezvous.messages import Placement
from rallypoint.telemetry.door import profiled

if TYPE_CHECKING:
    from rallypoint.agent.asking import Asking
    from rallypoint.agent.termination import Times
    from rallypoint.health.pulse import Pulse
    from rallypoint.store.api import Store
    from rallypoint.telemetry.events import Event
    from rallypoint.workers.stop import Stopping

log = get_logger(__name__)

FAILURE_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL after a failure, where nothing says otherwise (decision 26)."""


class ElasticAgent(ABC):
    """What a launcher holds of an agent."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult | None:
        """Run the workers to the job's end, in as many rounds as it takes; None for a spare that was not needed."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """The worker group, to look at and not to change."""


class SimpleElasticAgent(ElasticAgent):
    """The loop of an agent with one worker group. Subclasses start, watch and stop the workers."""

    def __init__(
        self,
        spec: WorkerSpec,
        exit_barrier_timeout: float = 300,
        shutdown_timeout: int = 30,
        failure_grace: float | None = None,
        chosen_timeout: bool = True,
    ) -> None:
        """Make an agent; nothing happens before `run`.

        Args:
            spec: what to run.
            exit_barrier_timeout: seconds that a handler which can only be asked waits for other nodes at the end.
                With ours the wait ends with the verdict, however long that takes.
            shutdown_timeout: seconds between the signal that stops workers and SIGKILL.
            failure_grace: the same where the round has ended by a failure; None for 5, or `shutdown_timeout` if less.
            chosen_timeout: whether somebody has chosen `shutdown_timeout`; if not, what is known of the scheduler's
                grace period may shorten it (`agent.termination`).
        """
        self._worker_group = WorkerGroup(spec)
        self._exit_barrier_timeout = exit_barrier_timeout
        self._runs = False
        """Whether `run` is under way."""
        self._shutdown_timeout = shutdown_timeout
        self._failure_grace = min(FAILURE_GRACE, shutdown_timeout) if failure_grace is None else failure_grace
        self._chosen_timeout = chosen_timeout
        self._times: Times | None = None
        """What SIGTERM to this agent leaves of time, once it has come, at this moment of `time.monotonic`:"""
        self._terminated_at = 0.0
        self._membership = self._make_membership(spec, exit_barrier_timeout)
        self._placement: Placement | None = None
        self._pulse: Pulse | None = None
        self._telling = Telling(self._worker_group, lambda: self._restarts)
        self._driven = False
        """Whether our own loop runs this agent, and not one of a subclass."""
        self._asking: Asking | None = None
        self._until_the_end = ExitStack()
        self._restarts_left: int | None = None
        self._most_restarts: int | None = None
        self._failed_with = RunResult(WorkerState.FAILED)

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

    def _begin_stop(self, death_sig: signal.Signals, timeout: float) -> Stopping | None:
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
            self._shutdown(death_sig, round(timeout))
        return None

    def _pass_on(self, number: int) -> None:
        """Hand a signal to each worker that runs; nothing happens where workers cannot be sent any."""

    def _expect_shared(self, number: int) -> None:
        """The workers are to be stopped by a signal that they may be sent by others too. Does nothing here."""

    def _shorten_stop(self, until: float) -> None:
        """A stop that runs, if one does, is to leave the workers no more time than until then. Does nothing here."""

    def _in_order(self) -> bool:
        """Whether the workers, if there were any, have ended with success or by the SIGTERM that asked them."""
        return False

    def _reached(self) -> frozenset[int]:
        """The signals that all processes of this node's job were sent a moment ago, as far as that can be told."""
        return frozenset()

    def _forwards(self) -> Minding | None:
        """What hands signals on to the workers later, if anything does."""
        return None

    def _running_ranks(self) -> Collection[int]:
        """Local ranks of the workers that have not ended, as far as is known."""
        return range(self._worker_group.spec.local_world_size)

    def _watched_by(self) -> Minding | None:
        """What else watches the workers that run now, if anything does."""
        return None

    def _warmth(self) -> Warmth | None:
        """What the workers are forked from, if they are."""
        return None

    def _exit_fds(self) -> list[int] | None:
        """Descriptors that become readable when a worker ends; None if workers must be asked every so often."""
        return None

    def _stopped_ranks(self) -> tuple[int, ...]:
        """Global ranks of the workers that this agent ended while they ran, for the report; none if it cannot tell."""
        return ()

    def _succeeded_ranks(self) -> tuple[int, ...]:
        """Global ranks of the workers that had succeeded before anything stopped them; none if it cannot tell."""
        return ()

    # What torch's users call and override

    @property
    def _restarts(self) -> int:
        if self._placement is not None:
            return self._placement.restarts
        return 0 if self._restarts_left is None else max(0, self._worker_group.spec.max_restarts - self._restarts_left)

    @property
    def _remaining_restarts(self) -> int:
        """How many failures the job would survive yet. It can be set: a loop of a subclass's own counts it down, and
        with ours, a subclass that knows that no restart would help sets it to 0."""
        left = self._telling.remaining_restarts
        if self._restarts_left is None or self._most_restarts is None:
            return left
        return min(left, max(0, self._most_restarts - self._restarts) if self._driven else self._restarts_left)

    @_remaining_restarts.setter
    def _remaining_restarts(self, left: int) -> None:
        self._restarts_left = left
        self._most_restarts = self._restarts + left

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
    def run(self, role: str = DEFAULT_ROLE) -> RunResult | None:
        """Run the workers to the job's end.

        Returns:
            How the group ended; None for a spare that was never needed.

        Raises:
            RendezvousError: no round could be agreed on.
            Exception: what a third party's rendezvous has raised, as it is.
            SignalException: this agent was asked to end; its workers have been.
        """
        self._runs = True
        with deaf_at_the_end():
            try:
                result = self._run(role)
                self._telling.ended(result)
                return result
            except RendezvousGracefulExitError as ending:
                log.info("%s", ending)
                return None
            finally:
                try:
                    self._membership.shutdown()
                finally:
                    self._runs = False
                    self._let_go()

    def _let_go(self) -> None:
        """The run is over, for the other nodes too: what has stood by until here can go. Does nothing here."""

    def _run(self, role: str) -> RunResult:
        """The run, and, after a loop that is not ours, what ours would have done at its end."""
        death_sig = signal.SIGTERM
        try:
            with self._until_the_end:
                result = self._invoke_run(role)
            if self._asking is not None:
                self._asking.end_with(result, self._exit_barrier_timeout)
            return result
        except SignalException as asked:
            death_sig = signal.Signals(asked.sigval)
            raise
        finally:
            if not self._driven:
                self._shutdown(death_sig, self._shutdown_timeout)

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """The run itself; when it returns or raises, no worker is left."""
        self._driven = True
        group = self._worker_group
        log.info("[%s] starting workers for entrypoint: %s", role, group.spec.get_entrypoint_name())
        crew = Crew(
            group=group,
            grace=lambda: self._within(self._shutdown_timeout),
            start=self._start_round,
            stop=self._stop,
            shutdown=lambda number: self._shutdown(signal.Signals(number), self._shutdown_timeout),
            pass_on=self._pass_on,
            look=self._look,
            running=self._running_ranks,
            exit_fds=self._exit_fds,
            finished=self._exit_barrier,
            stopped=self._stopped_ranks,
            allowed=self._allowed,
            ended=self._ended,
            reached=self._reached,
            forwarding=self._forwards,
            in_order=self._in_order,
            terminated=self._terminated,
            minder=self._watched_by,
            warmth=self._warmth,
            shown=self._shown,
        )
        return AgentLoop(crew, self._membership, pulse=self._pulse).run(handled_signals())

    def _look(self) -> RunResult:
        result = self._monitor_workers(self._worker_group)
        self._telling.looked(result)
        return result

    def _allowed(self) -> int:
        """How many failures the job survives; fewer than the spec says if a subclass has lessened what remains."""
        most = self._worker_group.spec.max_restarts
        if self._most_restarts is None:
            return most
        return min(most, self._most_restarts) if self._restarts_left else 0

    def _ended(self, result: RunResult | None) -> None:
        self._telling.workers_ended(result, self._succeeded_ranks())

    def _shown(self) -> Mapping[str, object]:
        """What the health check shows of this agent."""
        return status(self._worker_group, self._placement, self._restarts, self._remaining_restarts)

    def _start_round(self, placement: Placement) -> None:
        self._placement = placement
        self._initialize_workers(self._worker_group)

    def _stop(self, step: Stop) -> Stopping | None:
        if step.again and type(self)._restart_workers is not SimpleElasticAgent._restart_workers:
            self._restart_workers(self._worker_group)
            return None
        if step.again:
            self._telling.restarts()
            log.info("[%s] Stopping worker group", self._worker_group.spec.role)
        if step.shared:
            self._expect_shared(step.signal)
        grace = self._failure_grace if step.failed else self._shutdown_timeout
        return self._begin_stop(signal.Signals(step.signal), self._within(grace))

    def _terminated(self) -> float:
        """This agent was sent SIGTERM: what the scheduler's grace period leaves counts from the first one on.

        Returns:
            For how many seconds the workers may be asked to save before they are stopped.
        """
        if self._times is None:
            from rallypoint.agent.termination import times

            self._terminated_at = time.monotonic()
            self._times = times(self._shutdown_timeout, chosen=self._chosen_timeout, environ=os.environ)
            self._shorten_stop(self._terminated_at + self._within(math.inf))
        return self._times.notice

    def _within(self, seconds: float) -> float:
        """So many seconds, or what is left where this agent was sent SIGTERM."""
        if self._times is None:
            return seconds
        return min(seconds, self._times.left(time.monotonic() - self._terminated_at))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Take up a placement: address of the store, group rank, worker ranks.

        Our loop has been given it by then; for a loop of a subclass's own, this waits until the round is complete.
        """
        spec = worker_group.spec
        placement = self._placement = self._placed() if self._driven else self._meet()
        self._membership.take_up(placement)
        if placement.max_restarts >= 0:  # the first node's value is the job's
            spec.max_restarts = placement.max_restarts
        self._telling.met()
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
        log.info(
            "[%s] Rendezvous complete for workers. Result:\n%s",
            spec.role,
            round_block(worker_group, placement.restarts),
        )

    @profiled
    def _assign_worker_ranks(
        self, store: Store | None, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """The workers of this node with their ranks.

        The placement holds them, so that the store is not used; only where a subclass has met the others by itself are
        they exchanged over it.
        """
        if self._placement is not None:
            ranks = self._placement.ranks
        else:
            from rallypoint.agent.exchange import exchange_ranks

            assert store is not None, "ranks are exchanged over a store where no placement holds them"
            ranks = exchange_ranks(store, group_rank, group_world_size, spec.role, spec.local_world_size)
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
        """Stop the workers, and start them again in the next round.

        Our loop calls this only where it is overridden, and does the second half itself: it has asked for the round
        already, and starts the workers when that is complete. Otherwise it begins the stop by `_begin_stop`.
        """
        log.info("[%s] Stopping worker group", worker_group.spec.role)
        failed = worker_group.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        if self._asking is not None:
            self._asking.end_round(self._failed_with if failed else None)
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        if not self._driven:
            self._ended(self._failed_with if failed else None)
            self._initialize_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Tell the others that this node is done. The verdict, once all are, ends our loop; any other waits here."""
        log.info("Local worker group finished (%s). Waiting for the other agents.", self._worker_group.state.value)
        if self._asking is not None:
            self._asking.finish(self._exit_barrier_timeout)
        elif self._placement is not None:
            self._membership.report_success(self._placement.round)
        else:
            from rallypoint.agent.exchange import meet_at_the_end

            group = self._worker_group
            meet_at_the_end(group.store, group.group_world_size, self._exit_barrier_timeout)

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

    def _meet(self) -> Placement:
        if self._asking is None:
            from rallypoint.agent.asking import Asking

            self._asking = Asking(self._membership, self._worker_group.spec)
        self._worker_group.joined_at = time.monotonic()
        return self._asking.meet()
