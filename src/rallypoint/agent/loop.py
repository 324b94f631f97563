"""The agent's loop: everything that happens becomes one event, and the policy decides what to do about it.

One thread waits for mail (notifications of the rendezvous, signals), exits of workers, their acknowledgements and a
stop in progress, and does nothing else between events. The `StepExecutor` carries out the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from signal import SIGKILL, SIGTERM

from rallypoint.agent.controller import WorkerController
from rallypoint.agent.executor import StepExecutor
from rallypoint.agent.policy import begin, decide
from rallypoint.agent.policy_state import Phase, PolicyState
from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.agent.spec import RunResult, WorkerState
from rallypoint.agent.steps import (
    Event,
    PreemptionRequested,
    SignalArrived,
    Step,
    WorkersFailed,
    WorkersFenced,
    WorkersSucceeded,
)
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.mailbox import Mailbox
from rallypoint.base.poll import until_readable
from rallypoint.base.signals import SignalWakeup, defer_interrupts, post_signals

if TYPE_CHECKING:
    from rallypoint.agent.local_socket import LocalSocket
    from rallypoint.agent.monitors import Monitor
    from rallypoint.agent.preemption.triggers import PreemptionTriggers
    from rallypoint.health.progress_probe import ProgressProbe

_SAFETY_CHECK = 60.0
"""Seconds between polls of workers whose exits wake us, in case one did not; longer if the monitor interval is."""


class AgentLoop:
    """One run of an agent, from the first join to the end of the job."""

    def __init__(
        self,
        workers: WorkerController,
        rendezvous: RendezvousClient,
        clock: Clock = SYSTEM_CLOCK,
        probe: ProgressProbe | None = None,
    ) -> None:
        self._workers = workers
        self._progress_probe = probe
        self._rendezvous = rendezvous
        self._clock = clock
        self._mailbox: Mailbox[Event] = Mailbox()
        self._executor = StepExecutor(workers, rendezvous, clock, self._mailbox.post)
        self._signal_wakeup: SignalWakeup | None = None
        self._raise_interrupt: Callable[[], None] = lambda: None
        """Raises KeyboardInterrupt if there was a ^C that is not among the signals."""
        self._state = PolicyState(
            notice_timeout=rendezvous.notice_timeout,
            checks_node=workers.begin_check is not None,
            on_hang=workers.group.spec.features.hangs.reaction,
        )
        self._safety_check_at = 0.0
        self._preemption: PreemptionTriggers | None = None
        group, preemption = workers.group, workers.group.spec.features.preemption
        if preemption.wanted:
            from rallypoint.agent.preemption.triggers import PreemptionTriggers

            self._preemption = PreemptionTriggers(
                preemption,
                rendezvous.notice_timeout,
                workers.grace.stop,
                lambda: not group.group_rank,
                self._mailbox.post,
                clock,
            )
        self._local_socket: LocalSocket | None = None
        """Opened after the first look at events, so that no worker waits for it."""

    def run(self, signals: Iterable[int]) -> RunResult:
        """Run until the job ends. No worker is left, whatever happens.

        Args:
            signals: the numbers of the signals that this agent handles, in addition to those that preempt the job.

        Raises:
            RendezvousError: the nodes could not agree on a round.
            SignalException: one of `signals` arrived that ends this agent.
        """
        try:
            signals = signals if self._preemption is None else {*signals, *self._preemption.signals}
            # The handlers stay until the workers are gone: a further signal must not end us before.
            with post_signals(lambda number: self._mailbox.post(SignalArrived(number)), signals) as self._signal_wakeup:
                number = SIGTERM
                try:
                    with defer_interrupts() as self._raise_interrupt:
                        return self._run_to_end()
                except KeyboardInterrupt:  # where SIGINT is not among `signals`
                    number = SIGKILL if self._executor.stops else SIGTERM
                    raise
                finally:
                    if self._preemption is not None and self._preemption.deadline is not None:
                        self._preemption.deadline.close()
                    self._executor.leave_nothing(number)
        finally:
            if self._local_socket is not None:
                self._local_socket.close()
            self._rendezvous.listen(None)
            self._mailbox.close()

    def _run_to_end(self) -> RunResult:
        self._rendezvous.listen(self._mailbox.post)
        self._take(begin(self._state))
        told = self._workers.events.log
        while self._executor.result is None:
            for event in self._events():
                if told is not None:
                    told.heard(event)
                if self._workers.incidents is not None:
                    self._workers.incidents.look_at(event, self._state)
                self._executor.heard(event)
                self._take(decide(self._state, event))
        self._raise_interrupt()
        return self._executor.result

    def _take(self, decision: tuple[PolicyState, tuple[Step, ...]]) -> None:
        self._state, steps = decision
        if not self._waits_for_others:
            self._executor.waiting.end()  # before workers start: they may write to the same terminal
        for step in steps:
            self._executor.carry_out(step, self._state.round)

    def _events(self) -> Iterator[Event]:
        """Wait until something has happened, and yield the events one by one."""
        self._wait()
        self._raise_interrupt()
        yield from self._drain_mailbox()
        yield from self._executor.stop_events()
        for monitor in self._monitors():
            monitor.step()
        yield from self._executor.start_events()
        if self._watches:
            yield from self._poll_workers()
        yield from self._executor.notice_events()
        if self._state.phase is Phase.LEAVING:
            yield from self._executor.waiting.leave_events()
        if self._waits_for_others:
            self._executor.waiting.ask_progress()
        self._answer_local_commands()

    def _answer_local_commands(self) -> None:
        if self._local_socket is None:
            from rallypoint.agent.local_socket import LocalSocket

            self._local_socket = LocalSocket(self._rendezvous.local_job)
            self._local_socket.open()
        self._local_socket.step()

    def _local_fds(self) -> list[int]:
        return [] if self._local_socket is None else self._local_socket.fds()

    def _monitors(self) -> Sequence[Monitor]:
        deadline = None if self._preemption is None else self._preemption.deadline
        own = self._workers.monitors()
        return own if deadline is None else [*own, deadline]

    def _wait(self) -> None:
        """Sleep until a descriptor is readable or something is due."""
        fds = [self._mailbox.fileno(), *self._executor.fds(), *self._local_fds()]
        wake_at = self._executor.wake_at()
        if self._signal_wakeup is not None:
            fds.append(self._signal_wakeup.fileno())
        for monitor in self._monitors():
            fds += monitor.fds()
            wake_at = min(wake_at, monitor.wake_at())
        if self._watches:
            fds += self._workers.exit_fds() or []
            wake_at = min(wake_at, self._safety_check_at)
        elif self._waits_for_others or self._state.phase is Phase.LEAVING:
            wake_at = min(wake_at, self._executor.waiting.ask_at)
        if self._progress_probe is not None:
            self._workers.look()
            self._progress_probe.going_to_sleep(wake_at, self._workers.status())
        until_readable(fds, wake_at - self._clock.monotonic())
        if self._progress_probe is not None:
            self._progress_probe.woken()
        if self._signal_wakeup is not None:
            self._signal_wakeup.clear()

    @property
    def _waits_for_others(self) -> bool:
        return self._state.phase is Phase.FORMING and not self._executor.stops

    @property
    def _watches(self) -> bool:
        """Whether exits of workers matter now."""
        return (
            self._state.phase is Phase.RUNNING and self._state.held_failure is None and self._executor.starting is None
        )

    def _drain_mailbox(self) -> Iterator[Event]:
        for event in self._mailbox.drain():
            if isinstance(event, SignalArrived) and (preempted := self._preempted_by({event.number})) is not None:
                yield preempted
            elif isinstance(event, SignalArrived) and event.number == SIGTERM:
                yield event._replace(notice=self._workers.terminated())
            else:
                yield event

    def _preempted_by(self, numbers: Collection[int]) -> PreemptionRequested | None:
        """The event for signals that preempt the job, if one of these does."""
        if self._preemption is None:
            return None
        number = next((each for each in numbers if each in self._preemption.signals), None)
        return None if number is None else self._preemption.of_signal(number)

    def _poll_workers(self) -> Iterator[Event]:
        group = self._workers.group
        result = self._workers.poll()
        self._workers.events.workers_polled(result, self._workers.remaining())
        every = group.spec.monitor_interval
        if self._workers.exit_fds() is not None:
            every = max(every, _SAFETY_CHECK)
        self._safety_check_at = self._clock.monotonic() + every
        group.state = result.state
        match result.state:
            case WorkerState.SUCCEEDED:
                self._executor.last = result
                yield WorkersSucceeded(self._executor.acknowledged())
            case WorkerState.FAILED if self._executor.has_fenced():
                yield WorkersFenced()
            case WorkerState.FAILED | WorkerState.UNHEALTHY:
                cause = result.first_cause()
                reached = frozenset[int]() if cause.exitcode == -SIGKILL else self._workers.shared_signals()
                # A signal that has arrived since the mail was read is older than its effects on the workers.
                round_ = self._state.round
                yield from self._drain_mailbox()
                if self._watches and self._state.round == round_:
                    self._executor.last = result
                    # A signal to all has reached the workers, and will reach us in a moment.
                    if (preempted := self._preempted_by(reached)) is not None:
                        yield preempted
                    yield WorkersFailed(cause, reached, self._workers.restart_limit())
            case WorkerState.HEALTHY:
                pass
            case lost:
                raise RuntimeError(
                    f"[{group.spec.role}] the worker group is in state {lost.value}; the agent has lost track"
                )
