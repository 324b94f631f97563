"""The agent's loop: turns everything that happens into events, and lets the policy decide what to do about each.

One thread waits for the descriptors and deadlines of all sources (`sources.Source`): mail (notifications from the
rendezvous, signals), worker exits, a stop in progress, and sources that features add. It does nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from signal import SIGKILL, SIGTERM

from rallypoint.agent.actions import Actions
from rallypoint.agent.feature import Agent, FeatureSet, Load
from rallypoint.agent.policy import Phase, PolicyState, begin, decide
from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.agent.signals import handled_signals
from rallypoint.agent.sources import Source
from rallypoint.agent.spec import DEFAULT_ROLE, RunResult, WorkerState
from rallypoint.agent.steps import (
    DrainArrived,
    Event,
    SignalArrived,
    Timer,
    WorkersFailed,
    WorkersFenced,
    WorkersStarted,
    WorkersSucceeded,
)
from rallypoint.agent.workers import WorkerController
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.kernel import until_readable
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.mailbox import Mailbox
from rallypoint.base.signals import SignalWakeup, defer_interrupts, ignore_signals_at_exit, post_signals
from rallypoint.base.stderr import written_beside
from rallypoint.control.protocol.errors import RendezvousGracefulExitError
from rallypoint.control.protocol.messages import CauseClues, CauseSought, DrainRequested
from rallypoint.observe.telemetry.lazy import handlers_beside, metrics_wanted, profiled

if TYPE_CHECKING:
    from rallypoint.agent.causes import CauseSearch
    from rallypoint.observe.health import ProgressProbe

log = get_logger(__name__)

_SAFETY_CHECK = 60.0
"""Seconds between polls of workers whose exits wake us, in case one does not; the monitor interval if longer."""


@profiled("SimpleElasticAgent.run")
def run_agent(
    workers: WorkerController,
    role: str = DEFAULT_ROLE,
    health: AbstractContextManager[ProgressProbe | None] | None = None,
    loop: Callable[[], RunResult] | None = None,
) -> RunResult | None:
    """Run this node's part of the job, in as many rounds as it takes, until the job ends.

    Args:
        workers: the workers of this node, with its rendezvous client.
        role: the workers' name in the log.
        health: a context manager, entered for the run; yields the progress probe if the agent has a health check.
        loop: runs instead of `run_loop`.

    Returns:
        The result of the worker group; None for a spare that was never needed.

    Raises:
        RendezvousError: the nodes could not agree on a round.
        Exception: any error from a third party's rendezvous, unchanged.
        SignalException: a signal ended this agent; its workers are gone.
    """
    with ignore_signals_at_exit(), written_beside(), handlers_beside():
        try:
            if workers.group.spec.event_log_handler != "null" or metrics_wanted():
                workers.record_events()
            result = run_loop(workers, role, health) if loop is None else loop()
            if workers.events is not None:
                workers.events.run_ended(result)
            return result
        except RendezvousGracefulExitError as ending:
            log.warning("%s", ending)  # a warning, like the line about the wait: no other line says why this node ends
            return None
        finally:
            if workers.events is not None:
                workers.events.workers_ended()
            try:
                workers.rendezvous.shutdown()
            except Exception:  # such as one from an overridden method
                log.exception("the rendezvous could not be shut down; this does not change the job's outcome")
            finally:
                workers.close()


def run_loop(
    workers: WorkerController, role: str, health: AbstractContextManager[ProgressProbe | None] | None
) -> RunResult:
    """Run the loop; when it returns or raises, no worker is left. The arguments are as in `run_agent`."""
    workers.prepare()  # first: it reports everything that this machine does not permit
    loop = AgentLoop(workers)
    with health or nullcontext() as probe:
        log.info("[%s] starting workers for entrypoint: %s", role, workers.group.spec.get_entrypoint_name())
        return loop.run(handled_signals(), probe)


class AgentLoop:
    """One run of an agent, from the first join to the end of the job."""

    def __init__(self, workers: WorkerController, clock: Clock = SYSTEM_CLOCK) -> None:
        self._workers = workers
        self._progress_probe: ProgressProbe | None = None
        self._rendezvous: RendezvousClient = workers.rendezvous
        self._clock = clock
        self._mailbox: Mailbox[Event] = Mailbox()
        self._actions = Actions(workers, workers.rendezvous, clock, self._mailbox.post)
        self._raise_interrupt: Callable[[], None] = lambda: None
        """Raises KeyboardInterrupt after a ^C if SIGINT is not among the signals."""
        agent = Agent(workers, self._mailbox.post, clock, self._actions.at_end.append)
        self._features = FeatureSet(agent, self._actions.steps, self._actions.handlers)
        workers.finish = self._features.finish
        self._features.load(Load.AT_START)
        workers.on_folder = lambda: self._features.load(Load.WITH_FOLDER)
        self._state = PolicyState(notice_timeout=self._rendezvous.notice_timeout, checks_node=workers.gate is not None)
        self._mail = _Mail(self)
        self._sources = workers.sources
        """Everything that the loop waits for, in the order in which it is asked for events; changes during the run."""
        self._sources.insert(0, self._mail)
        # Ask for exits before the folder, which depends on them:
        #   1. the workers are asked to save; rank 0 acknowledges, rank 1 finishes its work and exits without doing so;
        #   2. if the folder came first, it would still wait for rank 1, whose exit nobody has seen;
        #   3. the loop reads the exit next, and then no longer waits for rank 1's descriptor. Nothing wakes the loop,
        #      so this node would consent only at the notice's deadline.
        exits = _Exits(self)
        self._sources += [self._actions, exits, workers.folder]
        self._actions.handlers[CauseSought] = self._actions.handlers[CauseClues] = [exits.on_cause_message]

    def run(self, signals: Iterable[int], probe: ProgressProbe | None = None) -> RunResult:
        """Run until the job ends. No worker is left in any case.

        Args:
            signals: the numbers of the signals to handle, in addition to those that features handle.
            probe: for the health check; notified when the loop sleeps.

        Raises:
            RendezvousError: the nodes could not agree on a round.
            SignalException: one of `signals` arrived and ends this agent.
        """
        self._progress_probe = probe
        try:
            signals = {*signals, *self._features.signals}
            # Keep the handlers until the workers are gone:
            #   1. SIGTERM arrives, and the agent stops the workers, which takes their grace period;
            #   2. the impatient sender sends SIGTERM again;
            #   3. the default handler would end the agent, and the reaper would kill workers that are writing a
            #      checkpoint.
            with post_signals(lambda number: self._mailbox.post(SignalArrived(number)), signals) as self._mail.wakeup:
                number = SIGTERM
                try:
                    with defer_interrupts() as self._raise_interrupt:
                        return self._run_to_end()
                except KeyboardInterrupt:  # if SIGINT is not among `signals`
                    number = SIGTERM if not self._actions.workers_stop.in_progress else SIGKILL
                    raise
                finally:
                    self._actions.end_everything(number)
        finally:
            self._rendezvous.listen(None)
            self._mailbox.close()

    def _run_to_end(self) -> RunResult:
        self._rendezvous.listen(self._mailbox.post)
        for prepare in self._workers.hooks.prepare:
            prepare()
        self._hear(None)
        awaits_place = True
        while self._actions.result is None:
            self._wait()
            self._raise_interrupt()
            for source in tuple(self._sources):
                for event in source.step() or ():
                    self._hear(event)
            if awaits_place and self._rendezvous.local_job() is not None:
                awaits_place = False
                self._features.load(Load.WHEN_PLACED)
        self._raise_interrupt()
        return self._actions.result

    def _hear(self, event: Event | None) -> None:
        """Handle an event; None is the start of the run."""
        before, actions = self._state, self._actions
        if event is not None:
            if isinstance(event, WorkersStarted):
                if self._progress_probe is not None:  # importing features must not delay readiness
                    self._progress_probe.going_to_sleep(self._clock.monotonic(), self._workers.look().status())
                self._features.load(Load.WHEN_PLACED)  # before workers can fail, so that no failure waits for an import
                self._features.load(Load.WHEN_STARTED)
            self._features.load_for(event)
            for handle in actions.handlers.get(type(event), ()):
                handle(event)
        after, steps = begin(before) if event is None else decide(before, event, self._features.rules)
        self._state = after
        self._workers.watchers.observe(before, event, after, steps)
        if before.phase is Phase.FORMING and after.phase is not Phase.FORMING:
            actions.timers.pop(Timer.PROGRESS, None)  # this node is no longer waiting for others
        actions.round = after.round
        for step in steps:
            actions.steps[type(step)](step)

    # Waiting

    def _wait(self) -> None:
        """Sleep until a descriptor is readable or something is due."""
        wake_at = min(source.wake_at() for source in self._sources)
        fds = [fd for source in self._sources for fd in source.fds()]
        if self._progress_probe is not None:
            self._progress_probe.going_to_sleep(wake_at, self._workers.look().status())
        until_readable(fds, wake_at - self._clock.monotonic())
        if self._progress_probe is not None:
            self._progress_probe.on_wake()


class _Mail(Source):
    """Notifications from the rendezvous, and signals"""

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop
        self.wakeup: SignalWakeup | None = None

    def fds(self) -> list[int]:
        mail = self._loop._mailbox.fileno()
        return [mail] if self.wakeup is None else [mail, self.wakeup.fileno()]

    def step(self) -> Iterator[Event]:
        if self.wakeup is not None:
            self.wakeup.clear()
        for event in self._loop._mailbox.drain():
            if isinstance(event, DrainRequested):
                yield DrainArrived(event.by, self._loop._workers.drain_notice())
            elif not isinstance(event, SignalArrived):
                yield event
            elif event.number in self._loop._features.signals:
                yield self._loop._features.signals[event.number](event.number)
            elif event.number == SIGTERM:
                yield event._replace(notice=self._loop._workers.terminated())
            else:
                yield event


class _Exits(Source):
    """The exits of the workers, while they matter."""

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop
        self._workers = loop._workers
        self._check_at = 0.0
        self._search: CauseSearch | None = None

    def on_cause_message(self, event: CauseSought | CauseClues) -> None:
        """Note that another node is looking for a cause, or helping to find one."""
        self._cause_search().hear(event)
        self._check_at = -math.inf

    def _cause_search(self) -> CauseSearch:
        from rallypoint.agent.causes import CauseSearch  # imported here: no start needs it

        self._search = self._search or CauseSearch(self._workers)
        return self._search

    def _watches(self) -> bool:
        state = self._loop._state
        return state.phase is Phase.RUNNING and state.held_failure is None and self._loop._actions.starting is None

    def fds(self) -> list[int]:
        return self._workers.exit_fds() or [] if self._watches() else []

    def wake_at(self) -> float:
        return self._check_at if self._watches() else super().wake_at()

    def step(self) -> Iterator[Event]:
        if not self._watches():
            return
        group, loop = self._workers.group, self._loop
        result = self._workers.poll()
        self._workers.failures = result.failures
        if self._workers.events is not None:
            self._workers.events.polled(result.state)
        every = group.spec.monitor_interval
        if self._workers.exit_fds() is not None:
            every = max(every, _SAFETY_CHECK)
        self._check_at = loop._clock.monotonic() + every
        if (search := self._search) is not None and result.state is WorkerState.HEALTHY:
            # A failure here may have caused another node's failure.
            result, again_at = search.answer(result, loop._state.round, loop._clock.monotonic())
            self._check_at = min(again_at, self._check_at)
        group.state = result.state
        match result.state:
            case WorkerState.SUCCEEDED:
                loop._actions.last = result
                yield WorkersSucceeded(self._workers.folder.any_acknowledged())
            case WorkerState.FAILED if (fence := loop._actions.fence) is not None and fence.has_fenced():
                yield WorkersFenced()
            case WorkerState.FAILED | WorkerState.UNHEALTHY:
                cause, self._check_at = self._cause_search().step(result, loop._state.round, loop._clock.monotonic())
                if cause is None:
                    return
                reached = frozenset[int]() if cause.exitcode == -SIGKILL else self._workers.shared_signals()
                # Read the mail once more before a death counts as a failure:
                #   1. this pass reads the mail, and finds nothing;
                #   2. a scheduler sends SIGTERM to all processes of the job: to this agent and its workers;
                #   3. the signal kills a worker, and `poll` finds it in the same pass. It would be announced as failed,
                #      and use up a restart, although the scheduler wants this node to leave.
                # If the mail ends the round, the poll's result is dropped (`_watches`).
                round_ = loop._state.round
                yield from loop._mail.step()
                if self._watches() and loop._state.round == round_:
                    loop._actions.last = result
                    # The signal may have reached the workers and the reaper, but not this process yet: the sender
                    # signals one process after the other. It will arrive in a moment.
                    if numbers := loop._features.signals.keys() & reached:
                        yield loop._features.signals[min(numbers)](min(numbers))
                    yield WorkersFailed(cause, reached, self._workers.restart_limit())
            case WorkerState.HEALTHY:
                pass
            case lost:
                raise RuntimeError(
                    f"[{group.spec.role}] the worker group is in state {lost.value}; the agent lost track of its "
                    "workers"
                )
