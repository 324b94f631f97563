"""The agent's loop: everything that happens becomes one event, and the policy says what to do about it.

One thread waits for mail (notices of the rendezvous, signals), for exits of workers, for their acknowledgements and for
a stop that is under way, and does nothing else between events. What the steps mean for workers is up to the `Crew`.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from signal import SIGKILL, SIGTERM, Signals
from typing import TYPE_CHECKING

from rallypoint.agent.board import NoticeBoard
from rallypoint.agent.crew import Crew, Minding
from rallypoint.agent.membership import Membership
from rallypoint.agent.policy import Phase, Status, decide
from rallypoint.agent.spec import RunResult, WorkerState
from rallypoint.agent.steps import (
    AnnounceDeparture,
    AnnounceFailure,
    AnnounceSuccess,
    Ask,
    AskOthers,
    AwaitSignal,
    Depart,
    Drain,
    End,
    Event,
    Finish,
    Forewarn,
    GiveUp,
    Join,
    Kill,
    Leave,
    LeaveOver,
    NoSignal,
    PassOn,
    SignalArrived,
    Start,
    Step,
    Stop,
    Tell,
    Withdraw,
    WorkersFailed,
    WorkersStopped,
    WorkersSucceeded,
)
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import NodeLeft, SignalException
from rallypoint.base.kernel import check_kernel
from rallypoint.base.log import get_logger
from rallypoint.base.mailbox import Mailbox
from rallypoint.base.signals import Bell, signal_name, signals_to
from rallypoint.base.waiting import until_readable
from rallypoint.failures.cause import Cause
from rallypoint.notices import PREEMPTION
from rallypoint.rendezvous.elastic import ASK_FIRST, ASK_MOST
from rallypoint.rendezvous.errors import RendezvousClosedError, error_of
from rallypoint.rendezvous.state import Outcome
from rallypoint.workers.stop import Stopping

if TYPE_CHECKING:
    from rallypoint.health.pulse import Pulse

log = get_logger(__name__)

_SIGNAL_COMES = 1.0
"""Seconds that a signal to all processes may take to reach this one, when it has reached others. It takes microseconds,
unless the machine is in trouble."""

_LEAVING, _LEAVING_EVERY = 1.0, 0.2
"""Seconds for which a job must go on without this node, to be believed that it does, and between the questions. Who
ends a whole job on many nodes may reach the last of them so much later."""

_SAFETY_CHECK = 60.0
"""Seconds between looks at workers whose ends wake us, in case one did not; longer if the monitor interval is."""


class AgentLoop:
    """One run of an agent, from the first join to the end of the job."""

    def __init__(
        self, crew: Crew, membership: Membership, clock: Clock = SYSTEM_CLOCK, pulse: Pulse | None = None
    ) -> None:
        check_kernel()
        self._crew = crew
        self._pulse = pulse
        self._membership = membership
        self._clock = clock
        self._board = NoticeBoard(clock)
        self._mailbox: Mailbox[Event] = Mailbox()
        self._bell: Bell | None = None
        self._status = Status(notice=membership.notice_timeout)
        self._stopping: Stopping | None = None
        self._starting: Start | None = None
        self._last: RunResult | None = None
        self._result: RunResult | None = None
        self._announced: Cause | None = None
        """The last failure of this node's workers."""
        self._ask_at = 0.0
        self._ask_every = ASK_FIRST
        self._leave_by = math.inf
        self._look_at = 0.0
        self._finished_at = 0.0
        self._held: RunResult | None = None
        """How the workers were found, while it is not settled whether they failed."""
        self._signal_by = math.inf

    def run(self, signals: Iterable[int]) -> RunResult:
        """Run until the job ends. Whatever happens, no worker is left.

        Args:
            signals: the numbers of the signals that this agent handles.

        Raises:
            RendezvousError: no round could be agreed on.
            SignalException: one of `signals` came that asks this agent to end.
        """
        try:
            # The handlers stay until the workers are gone: a further signal must not end us in the middle of that.
            with signals_to(lambda number: self._mailbox.post(SignalArrived(number)), signals) as self._bell:
                number = SIGTERM
                try:
                    return self._until_the_end()
                except KeyboardInterrupt:  # where SIGINT is not among `signals`
                    number = SIGTERM if self._stopping is None else SIGKILL
                    raise
                finally:
                    self._leave_nothing(number)
        finally:
            self._membership.listen(None)
            self._mailbox.close()

    def _until_the_end(self) -> RunResult:
        self._membership.listen(self._mailbox.post)
        self._do(Join())
        while self._result is None:
            for event in self._events():
                self._status, steps = decide(self._status, event)
                for step in steps:
                    self._do(step)
        return self._result

    def _leave_nothing(self, number: int) -> None:
        try:
            self._crew.shutdown(number)
        except BaseException:  # a ^C that nobody handles, say: it must not cost us what it interrupted
            self._crew.shutdown(SIGKILL)
            raise
        finally:
            self._board.clear()
            self._crew.ended(self._last)

    # Events

    def _events(self) -> Iterator[Event]:
        """Wait until something has happened, and give it out one by one."""
        self._wait()
        yield from self._mail()
        yield from self._look_at_stop()
        for minder in self._minders():
            minder.step()
        self._start_once_warm()
        if self._watches:
            yield from self._look_at_workers()
        if self._clock.monotonic() >= self._signal_by:
            self._signal_by = math.inf
            yield NoSignal()
        yield from self._board.look(self._crew.running)
        yield from self._look_at_others()
        if self._waits_for_others and self._clock.monotonic() >= self._ask_at:
            self._ask_every = min(2 * self._ask_every, ASK_MOST)
            self._ask_at = self._clock.monotonic() + self._ask_every
            self._membership.ask_progress()

    def _wait(self) -> None:
        """Sleep until a descriptor is readable or something is due."""
        fds, wake_at = [self._mailbox.fileno(), *self._board.fds()], min(self._board.wake_at(), self._signal_by)
        if self._bell is not None:
            fds.append(self._bell.fileno())
        if self._stopping is not None:
            fds += self._stopping.fds()
            wake_at = min(wake_at, self._stopping.wake_at())
        for minder in self._minders():
            fds += minder.fds()
            wake_at = min(wake_at, minder.wake_at())
        if self._watches:
            fds += self._crew.exit_fds() or []
            wake_at = min(wake_at, self._look_at)
        elif self._waits_for_others or self._status.phase is Phase.LEAVING:
            wake_at = min(wake_at, self._ask_at)
        if self._pulse is not None:
            self._pulse.sleeps(wake_at, self._crew.shown())
        until_readable(fds, wake_at - self._clock.monotonic())
        if self._pulse is not None:
            self._pulse.wakes()
        if self._bell is not None:
            self._bell.hush()

    @property
    def _waits_for_others(self) -> bool:
        return self._status.phase is Phase.FORMING and self._stopping is None

    @property
    def _watches(self) -> bool:
        """Whether the ends of workers are news."""
        return self._status.phase is Phase.RUNNING and self._status.held is None and self._starting is None

    def _minders(self) -> list[Minding]:
        found = (self._crew.minder(), self._crew.warmth(), self._crew.forwarding())
        return [each for each in found if each is not None]

    def _mail(self) -> Iterator[Event]:
        for event in self._mailbox.drain():
            if isinstance(event, SignalArrived) and event.number == SIGTERM:
                yield event._replace(notice=self._crew.terminated())
            else:
                yield event

    def _look_at_others(self) -> Iterator[Event]:
        if self._status.phase is not Phase.LEAVING or self._clock.monotonic() < self._ask_at:
            return
        if self._ask_at >= self._leave_by:
            yield LeaveOver()
        else:
            self._ask_at = min(self._ask_at + _LEAVING_EVERY, self._leave_by)
            self._membership.leave(asks=True)

    def _look_at_stop(self) -> Iterator[Event]:
        if self._stopping is not None and self._stopping.step():
            self._stopping = None
            yield self._stopped()

    def _stopped(self) -> WorkersStopped:
        self._board.clear()
        self._crew.group.state = WorkerState.STOPPED
        self._crew.ended(self._last)
        return WorkersStopped(self._crew.in_order())

    def _look_at_workers(self) -> Iterator[Event]:
        group = self._crew.group
        result = self._crew.look()
        every = group.spec.monitor_interval
        if self._crew.exit_fds() is not None:
            every = max(every, _SAFETY_CHECK)
        self._look_at = self._clock.monotonic() + every
        group.state = result.state
        match result.state:
            case WorkerState.SUCCEEDED:
                self._last = result
                yield WorkersSucceeded()
            case WorkerState.FAILED | WorkerState.UNHEALTHY:
                cause = self._first_cause(result)
                reached = frozenset[int]() if cause.exitcode == -SIGKILL else self._crew.reached()
                # A signal that came since the mail was read is older than what it has done to the workers.
                round_ = self._status.round
                yield from self._mail()
                if self._watches and self._status.round == round_:
                    self._last = result
                    yield WorkersFailed(cause, reached)
            case WorkerState.HEALTHY:
                pass
            case lost:
                raise RuntimeError(
                    f"[{group.spec.role}] the worker group is in state {lost.value}; the agent has lost track"
                )

    def _first_cause(self, result: RunResult) -> Cause:
        host = socket.gethostname()  # not getfqdn: a name server that is away must not hold up the news
        if not result.failures:
            return Cause(-1, -1, host, os.getpid(), 0, f"worker group {result.state.value}", "", time.time(), "")
        rank, failure = min(result.failures.items(), key=lambda entry: entry[1].moment)
        return Cause.of(failure, rank, host)

    # Steps: the rounds

    def _do(self, step: Step) -> None:
        self._HOW[type(step)](self, step)

    def _do_join(self, _step: Join) -> None:
        spec = self._crew.group.spec
        self._ask_every = ASK_FIRST
        self._crew.group.joined_at = self._clock.monotonic()
        self._ask_at = self._crew.group.joined_at + self._ask_every
        log.info("[%s] Rendezvous'ing worker group", spec.role)
        self._membership.join(spec.role, spec.local_world_size, spec.max_restarts, spec.get_program_name())

    def _do_start(self, step: Start) -> None:
        self._last = self._held = None
        self._signal_by = math.inf
        self._crew.group.notices = self._board.renew()
        self._starting = step
        self._start_once_warm()

    def _start_once_warm(self) -> None:
        """Start the workers, if they are to start; but not while what they are forked from gets ready."""
        warmth = self._crew.warmth()
        if self._starting is None or (warmth is not None and warmth.importing):
            return
        step, self._starting = self._starting, None
        self._crew.start(step.placement)

    def _do_await_signal(self, _step: AwaitSignal) -> None:
        self._last, self._held = None, self._last
        self._signal_by = self._clock.monotonic() + _SIGNAL_COMES

    def _do_announce_failure(self, step: AnnounceFailure) -> None:
        spec, cause = self._crew.group.spec, step.cause
        self._last = self._held or self._last
        if cause.rank >= 0:
            log.error(
                "failed (exitcode: %d) local_rank: %d (pid: %d) of binary: %s",
                cause.exitcode,
                cause.local_rank,
                cause.pid,
                spec.get_entrypoint_name(),
            )
        log.info("[%s] Worker group %s; telling the other agents", spec.role, self._crew.group.state.value)
        self._announced = step.cause
        self._membership.report_failure(self._status.round, step.cause, self._crew.allowed())

    def _do_announce_success(self, _step: AnnounceSuccess) -> None:
        self._finished_at = self._clock.monotonic()
        self._crew.finished()

    def _do_announce_departure(self, step: AnnounceDeparture) -> None:
        self._membership.preempt(self._status.round, step.seconds)

    def _do_drain(self, step: Drain) -> None:
        if step.waiting:
            log.info(
                "[%s] Detected %d new node%s from group_rank=%s; will restart worker group%s",
                self._crew.group.spec.role,
                step.waiting,
                "" if step.waiting == 1 else "s",
                self._crew.group.group_rank,
                f" with {step.names}" if step.names else "",
            )
        self._membership.drain(self._status.round)

    def _do_tell(self, step: Tell) -> None:
        (log.warning if step.loud else log.info)("[%s] %s", self._crew.group.spec.role, step.text)

    # Steps: the workers

    def _do_stop(self, step: Stop) -> None:
        self._starting = None
        self._stopping = self._crew.stop(step)
        if self._stopping is None or self._stopping.step():
            self._stopping = None
            self._mailbox.post(self._stopped())

    def _do_kill(self, _step: Kill) -> None:
        log.warning("Killing the workers")
        if self._stopping is not None:
            self._stopping.hurry()

    def _do_pass_on(self, step: PassOn) -> None:
        log.info("Received %s for the workers", signal_name(step.signal))
        self._crew.pass_on(step.signal)

    def _do_ask(self, step: Ask) -> None:
        self._board.post(step.reason, step.node, self._status.round, step.seconds, waits=True)

    def _do_withdraw(self, _step: Withdraw) -> None:
        self._board.withdraw()

    def _do_forewarn(self, _step: Forewarn) -> None:
        self._board.post(PREEMPTION, "", self._status.round, self._crew.grace(), waits=False)

    # Steps: the end

    def _do_leave(self, step: Leave) -> None:
        log.warning("Received %s; ending the workers and leaving the job", signal_name(step.signal))
        self._membership.leave()

    def _do_ask_others(self, _step: AskOthers) -> None:
        self._ask_at = self._clock.monotonic()
        self._leave_by = self._ask_at + _LEAVING

    def _do_end(self, step: End) -> None:
        verdict, group = step.verdict.verdict, self._crew.group
        last = self._last or RunResult(group.state)
        if verdict.outcome is Outcome.SUCCEEDED:
            self._succeed(last)
        elif verdict.outcome is Outcome.FAILED:
            if verdict.detail:
                log.error("[%s] The job ends with restarts left: %s", group.spec.role, verdict.detail)
            group.state = WorkerState.FAILED
            own = verdict.cause is not None and verdict.cause.is_of(self._announced)
            self._result = RunResult(
                WorkerState.FAILED,
                failures=last.failures,
                cause=verdict.cause,
                stopped=self._crew.stopped(),
                restarts=verdict.restarts,
                told_elsewhere=not own and not self._membership.hosts_coordinator,
            )
        else:
            raise RendezvousClosedError("the job was ended on request before its workers had finished")

    def _do_give_up(self, step: GiveUp) -> None:
        error = error_of(step.notice)
        assert error is not None
        raise error

    def _do_depart(self, step: Depart) -> None:
        name = signal_name(step.signal)
        if step.job:
            raise NodeLeft(f"this node has left the job after {name}; the job {step.job}", Signals(step.signal))
        raise SignalException(f"Process {os.getpid()} got signal {name}", Signals(step.signal))

    def _do_finish(self, _step: Finish) -> None:
        self._succeed(self._last or RunResult(WorkerState.SUCCEEDED))

    def _succeed(self, last: RunResult) -> None:
        log.info("Done waiting for other agents. Elapsed: %.3f seconds", self._clock.monotonic() - self._finished_at)
        self._crew.group.state = WorkerState.SUCCEEDED
        self._result = RunResult(WorkerState.SUCCEEDED, last.return_values)

    _HOW: dict[type, Callable[..., None]] = {  # noqa: RUF012 - a table, never changed
        Join: _do_join,
        Start: _do_start,
        AwaitSignal: _do_await_signal,
        AnnounceFailure: _do_announce_failure,
        AnnounceSuccess: _do_announce_success,
        AnnounceDeparture: _do_announce_departure,
        Drain: _do_drain,
        Tell: _do_tell,
        Stop: _do_stop,
        Kill: _do_kill,
        PassOn: _do_pass_on,
        Ask: _do_ask,
        Withdraw: _do_withdraw,
        Forewarn: _do_forewarn,
        Leave: _do_leave,
        AskOthers: _do_ask_others,
        End: _do_end,
        GiveUp: _do_give_up,
        Depart: _do_depart,
        Finish: _do_finish,
    }
