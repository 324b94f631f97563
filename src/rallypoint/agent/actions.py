"""Carries out the policy's steps on the workers of this node and its rendezvous.

Laws:

1. Nothing here waits. Whatever takes time is begun here, and driven by the loop as a `Source`.
2. Only the policy knows which phase the agent is in; this has only what was begun and is not yet done.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from signal import SIGKILL, Signals

from rallypoint.agent import steps
from rallypoint.agent.notice_directory import NoticeDirectory
from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.agent.sources import Source
from rallypoint.agent.spec import RunResult, WorkerState, node_failure
from rallypoint.agent.steps import Timer
from rallypoint.agent.waiting import Confirmation, WaitingForOthers
from rallypoint.agent.workers import WorkerController
from rallypoint.base.clock import Clock
from rallypoint.base.errors import JobPreempted, NodeLeftInOrder, PreflightError, SignalException
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name
from rallypoint.control.membership.state import Drain, Fail, NodeInfo, Outcome, Preempt, PreemptJob, Succeed, Verdict
from rallypoint.control.protocol import messages
from rallypoint.control.protocol.errors import RendezvousClosedError, error_of
from rallypoint.control.protocol.messages import ConfigDiffers, JobEnded, LeaveRequest
from rallypoint.failures.cause import Cause, Ending
from rallypoint.notices import PREEMPTION

if TYPE_CHECKING:
    from rallypoint.agent.features.node_check import NodeCheck
    from rallypoint.agent.features.preemption import SlurmRequeue
    from rallypoint.agent.features.reports import Reporter, Request
    from rallypoint.workers.stop import StopInProgress

log = get_logger(__name__)


class Actions(Source):
    """Carries out steps for one agent's loop, and drives what they have begun.

    Args:
        workers: the workers of this node.
        rendezvous: this node's client of the rendezvous.
        clock: of the loop.
        post: takes an event that a step causes at once.
        waits: whether the node waits for others to form a round.
    """

    def __init__(
        self,
        workers: WorkerController,
        rendezvous: RendezvousClient,
        clock: Clock,
        post: Callable[[steps.Event], None],
        waits: Callable[[], bool],
    ) -> None:
        self._workers = workers
        self._rendezvous = rendezvous
        self._clock = clock
        self._post = post
        self._round = -1
        self.notices = NoticeDirectory(workers.running, clock)
        self.waiting = WaitingForOthers(rendezvous, clock, waits)
        fence = workers.fence if workers.group.spec.features.recovery.fence else None
        self._confirmation = Confirmation(rendezvous, fence=fence)
        self._timers: dict[Timer, float] = {}
        """When each fires, on the clock."""
        self.stop: StopInProgress | None = None
        """The stop of the workers in progress."""
        self._check: NodeCheck | None = None
        """The user's check of this node, while it runs."""
        self.starting: steps.StartWorkers | None = None
        """The start that is due as soon as its preparations are done, and it is certain that its round still stands."""
        self.result: RunResult | None = None
        """The result of the run, once it ends."""
        self.last: RunResult | None = None
        """The result of the round's workers, as it was found."""
        self._held: RunResult | None = None
        """The result that was found, while it is not decided whether the workers failed."""
        self._announced: Cause | None = None
        """The last failure of this node's workers."""
        self._finished_at = 0.0
        self._reporter: Reporter | None = None
        self._requeue: SlurmRequeue | None = None

    def carry_out(self, step: steps.Step, round_: int) -> None:
        """Carry out a step of the policy, which belongs to this round."""
        self._round = round_
        self._HOW[type(step)](self, step)

    def hear(self, event: steps.Event, round_: int) -> None:
        """Do what follows from an event whatever the policy decides. `round_`: the present one."""
        self._confirmation.heard(event)
        match event:
            case messages.OperatorAction(text=text):
                self._log(text)
            case ConfigDiffers(differences=differences):
                for difference in differences:
                    self._log(f"{difference.sentence('this node')}; give all nodes of a job the same")
            case (
                messages.ReportRequested()
                | messages.CollectRequested()
                | messages.CollectedPart()
                | messages.CollectionEnded()
            ):
                self._report(event, round_)
            case _:
                pass

    def _report(self, request: Request, round_: int) -> None:
        if self._reporter is None:
            from rallypoint.agent.features.reports import Reporter

            self._reporter = Reporter(self._workers, self._rendezvous.send)
        self._reporter.take(request, round_)

    # What was begun, for the loop to drive

    def fds(self) -> list[int]:
        return [fd for ending in (self.stop, self._check) if ending is not None for fd in ending.fds()]

    def wake_at(self) -> float:
        waits = self.starting is None or self._confirmation.awaited or self._workers.preparing()
        endings = (ending.wake_at() for ending in (self.stop, self._check) if ending is not None)
        ask_at = self._clock.monotonic() + self._confirmation.wake_in()
        return min((math.inf if waits else -math.inf, ask_at, *self._timers.values(), *endings))

    def step(self) -> Iterator[steps.Event]:
        if self.stop is not None and self.stop.step():
            self.stop = None
            yield self._stopped()
        if self._check is not None and self._check.step():
            check, self._check = self._check, None
            yield check.outcome()
        self._confirmation.step()
        yield from self._start_if_ready()
        now = self._clock.monotonic()
        for timer in [timer for timer, at in self._timers.items() if at <= now]:
            if self._timers.pop(timer, None) is not None:
                yield steps.TimerFired(timer)

    def _start_if_ready(self) -> Iterator[steps.Event]:
        """Start the workers, if that is due and no preparation is left; or report why they cannot start."""
        if self.starting is None or self._workers.preparing():
            return
        cause = self._workers.preparation_failure()
        if cause is None and self._confirmation.holds():
            return
        step, self.starting = self.starting, None
        if cause is None:
            self._confirmation.workers_start()
            self._workers.start(step.placement)
        else:
            yield steps.WorkersFailed(cause, max_restarts=self._workers.restart_limit())

    def has_fenced(self) -> bool:
        """Whether the reaper has killed the workers because the coordinator's last word is too old (`--fence`)."""
        return self._confirmation.has_fenced()

    def leave_nothing(self, number: int) -> None:
        """End whatever runs by this signal, and return when it is gone."""
        self.waiting.end()
        try:
            if self._check is not None:
                self._check.end(number)
            self._workers.shutdown(number)
        except BaseException:  # an unhandled ^C, say, must not cut the shutdown short
            self._workers.shutdown(SIGKILL)
            raise
        finally:
            self._ended()

    def _stopped(self) -> steps.WorkersStopped:
        self._workers.group.state = WorkerState.STOPPED
        self._ended()
        return steps.WorkersStopped(self._workers.ended_in_order(), waiting=bool(self._workers.survivors()))

    def _ended(self) -> None:
        self.notices.clear(keep=bool(self._workers.survivors()))
        self._confirmation.workers_ended()
        self._workers.events.workers_ended(self.last, self._workers.succeeded())

    # Steps: the rounds

    def _do_join(self, _step: steps.RequestJoin) -> None:
        spec = self._workers.group.spec
        self._workers.report_progress()
        self._workers.group.join_requested_at = self.waiting.begin()
        log.info("[%s] Rendezvous'ing worker group", spec.role)
        self._confirmation.requests_place()
        self._rendezvous.join(
            NodeInfo(
                *(spec.role, spec.local_world_size, "", 0),  # its rendezvous adds where it listens
                max_restarts=spec.max_restarts,
                program=spec.get_program_name(),
                restarts_workers=self._workers.restarts_workers(),
            )
        )

    def _do_start(self, step: steps.StartWorkers) -> None:
        self.last = self._held = None
        self._timers.pop(Timer.SIGNAL, None)
        self._workers.group.notices = self.notices.reset(keep=bool(self._workers.survivors()))
        self.starting = step
        self._workers.begin_round(step.placement)
        if self._workers.preparation_failure() is None:  # otherwise it is reported when the loop asks for events
            list(self._start_if_ready())

    def _do_set_timer(self, step: steps.SetTimer) -> None:
        self._timers[step.timer] = self._clock.monotonic() + step.seconds
        if step.timer is Timer.SIGNAL:
            self.last, self._held = None, self.last

    def _do_fail(self, step: Fail) -> None:
        spec, cause = self._workers.group.spec, step.cause
        self.last = self._held or self.last
        if cause.rank >= 0:
            log.error(
                "failed (exitcode: %d) local_rank: %d (pid: %d) of binary: %s",
                *(cause.exitcode, cause.local_rank, cause.pid),
                spec.get_entrypoint_name(),
            )
        log.info("[%s] Worker group %s; notifying the other agents", spec.role, self._workers.group.state.value)
        self._announced = cause
        self._workers.report_progress()
        self._rendezvous.send(step)
        self._settle(cause)

    def _settle(self, cause: Cause) -> None:
        """The failure is announced: find out what would have delayed that, for the log and the report of this node."""
        for rank, failure in () if self.last is None else self.last.failures.items():
            if failure.settle():
                log.warning("the kernel's log explains the failure of rank %d: %s", rank, failure.text)
                if rank == cause.rank:
                    self._announced = cause._replace(message=failure.text)

    def _do_fail_hung(self, step: steps.FailHung) -> None:
        cause = node_failure(step.text, Ending.HANG, exitcode=1)
        self._do_fail(Fail(step.round, cause, 0 if step.ends_job else self._workers.restart_limit()))

    def _do_succeed(self, _step: Succeed) -> None:
        self._finished_at = self._clock.monotonic()
        self._workers.report_progress()
        log.info("Local worker group finished (%s). Waiting for the other agents.", self._workers.group.state.value)
        self._workers.on_succeeded()

    def _do_send(self, step: Drain | Preempt | PreemptJob | LeaveRequest) -> None:
        self._rendezvous.send(step)

    def _do_log(self, step: steps.LogLine) -> None:
        if not (step.live[0] and self.waiting.shows_live(step.live)):
            self._log(step.text, warning=step.warning)

    def _log(self, text: str, *, warning: bool = True) -> None:
        (log.warning if warning else log.info)("[%s] %s", self._workers.group.spec.role, text)

    # Steps: the workers

    def _do_check(self, _step: steps.CheckNode) -> None:
        assert self._workers.begin_check is not None, "only where the user has a check"
        self._check = self._workers.begin_check()

    def _do_stop(self, step: steps.StopWorkers) -> None:
        if self._check is not None:
            self._check.begin_stop(step.signal)
            return
        self.starting = None
        self._confirmation.cancel()
        self._workers.cancel_preparations()
        self._workers.report_progress()
        self.stop = self._workers.stop(step)
        if self.stop is None or self.stop.step():
            self.stop = None
            self._post(self._stopped())

    def _do_keep_nobody(self, step: steps.KeepNobody) -> None:
        self._workers.keep_nobody(step.signal, failed=step.failed)

    def _do_kill(self, _step: steps.KillWorkers) -> None:
        log.warning("Killing the workers")
        for ending in (self.stop, self._check):
            if ending is not None:
                ending.kill_now()

    def _do_forward(self, step: steps.ForwardSignal) -> None:
        log.info("Received %s for the workers", signal_name(step.signal))
        self._workers.forward(step.signal)

    def _do_post_notice(self, step: steps.PostNotice) -> None:
        self.notices.post(step.reason, step.node, self._round, step.seconds, waits=True)

    def _do_withdraw_notice(self, _step: steps.WithdrawNotice) -> None:
        self.notices.withdraw()

    def _do_post_stop_notice(self, _step: steps.PostStopNotice) -> None:
        self.notices.post(PREEMPTION, "", self._round, self._workers.grace.of(failed=False), waits=False)

    def _do_requeue(self, _step: steps.RequeueJob) -> None:
        preemption = self._workers.group.spec.features.preemption
        if preemption.requeue:
            from rallypoint.agent.features.preemption import SlurmRequeue

            self._requeue = SlurmRequeue(preemption.requeue, os.environ)

    # The end

    def _do_end(self, step: steps.End) -> None:
        match step.event:
            case JobEnded(verdict=verdict):
                self._end_with(verdict, step.saved)
            case steps.NodeChecked(failure=failure):
                raise PreflightError(failure)
            case steps.SignalArrived(number=number):
                name = signal_name(number)
                if step.standing:
                    left = f"this node has left the job after {name}; the job {step.standing}"
                    raise NodeLeftInOrder(left, Signals(number))
                text = f"Process {os.getpid()} got signal {name}"
                raise SignalException(text, Signals(number), saved=bool(step.saved))
            case failed:
                error = error_of(failed)
                assert error is not None
                raise error

    def _end_with(self, verdict: Verdict, saved: bool | None) -> None:
        group = self._workers.group
        last = self.last or RunResult(group.state)
        if verdict.outcome is Outcome.SUCCEEDED:
            took = self._clock.monotonic() - self._finished_at
            log.info("Done waiting for other agents. Elapsed: %.3f seconds", took)
            group.state = WorkerState.SUCCEEDED
            self.result = RunResult(WorkerState.SUCCEEDED, last.return_values)
        elif verdict.ending is Ending.PREEMPTED:
            raise self._preempted(verdict, saved)
        elif verdict.outcome is not Outcome.FAILED:
            request = verdict.detail or "the job was ended on request"
            raise RendezvousClosedError(f"{request} before its workers had finished", ending=verdict.ending)
        else:
            self.result = self._failed(verdict, last)

    def _preempted(self, verdict: Verdict, saved: bool | None) -> JobPreempted:
        text = f"the job was preempted, since {verdict.detail}"
        if saved is not None:
            text += f"; {'all' if saved else 'not all'} workers of this node have saved"
        return JobPreempted(text if self._requeue is None else f"{text}; {self._requeue.finish()}")

    def _failed(self, verdict: Verdict, last: RunResult) -> RunResult:
        group = self._workers.group
        if verdict.detail:
            log.error("[%s] The job ends with restarts left: %s", group.spec.role, verdict.detail)
        group.state = WorkerState.FAILED
        own = verdict.cause is not None and verdict.cause.is_of(self._announced)
        return RunResult(
            WorkerState.FAILED,
            failures=last.failures,
            cause=self._announced if own else verdict.cause,
            stopped=self._workers.stopped(),
            restarts=verdict.restarts,
            reported_elsewhere=not own and not self._rendezvous.hosts_coordinator,
            ending=verdict.ending,
        )

    _HOW: dict[type, Callable[..., None]] = {  # noqa: RUF012 - a table, never changed
        steps.RequestJoin: _do_join,
        steps.StartWorkers: _do_start,
        steps.SetTimer: _do_set_timer,
        Fail: _do_fail,
        steps.FailHung: _do_fail_hung,
        Succeed: _do_succeed,
        **dict.fromkeys((Drain, Preempt, PreemptJob, LeaveRequest), _do_send),
        steps.LogLine: _do_log,
        steps.CheckNode: _do_check,
        steps.StopWorkers: _do_stop,
        steps.KeepNobody: _do_keep_nobody,
        steps.KillWorkers: _do_kill,
        steps.ForwardSignal: _do_forward,
        steps.PostNotice: _do_post_notice,
        steps.WithdrawNotice: _do_withdraw_notice,
        steps.PostStopNotice: _do_post_stop_notice,
        steps.RequeueJob: _do_requeue,
        steps.End: _do_end,
    }
