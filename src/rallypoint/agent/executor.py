"""Carries out the policy's steps on the workers of this node and its rendezvous client.

Laws:

1. Nothing here waits. Whatever takes time is begun here, and driven by the loop: `fds`, `wake_at` and `stop_events`.
2. Only the policy knows which phase the agent is in; this has only what was begun and is not yet done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from signal import Signals

from rallypoint.agent import steps
from rallypoint.agent.confirmation import Confirmation
from rallypoint.agent.controller import WorkerController
from rallypoint.agent.notice_directory import NoticeDirectory
from rallypoint.agent.rendezvous_client import RendezvousClient, joining
from rallypoint.agent.spec import RunResult, WorkerState, node_failure
from rallypoint.agent.waiting import WaitingForOthers
from rallypoint.base.clock import Clock
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name
from rallypoint.failures.cause import Cause, Ending
from rallypoint.membership.operations import Drain, Fail, Preempt, PreemptJob, Succeed
from rallypoint.membership.state import Outcome
from rallypoint.notices import PREEMPTION
from rallypoint.protocol.messages import LeaveRequest

if TYPE_CHECKING:
    from rallypoint.agent.collect import StatusReporter
    from rallypoint.agent.preemption.preempted_job import PreemptedJob
    from rallypoint.agent.stopping import Stopping

log = get_logger(__name__)

_SIGNAL_COMES = 1.0
"""Seconds that a signal to all processes may take to reach this one, after it has reached others. It takes
microseconds, unless the machine is overloaded.
"""


class StepExecutor:
    """Carries out steps for one agent's loop.

    Args:
        workers: the workers of this node.
        rendezvous: this node's client of the rendezvous.
        clock: of the loop.
        post: takes an event that a step causes at once.
    """

    def __init__(
        self, workers: WorkerController, rendezvous: RendezvousClient, clock: Clock, post: Callable[[steps.Event], None]
    ) -> None:
        self._workers = workers
        self._rendezvous = rendezvous
        self._events = workers.events.log
        self._clock = clock
        self._post = post
        self._notices = NoticeDirectory(clock)
        self._round = -1
        self._stopping: Stopping | None = None
        self.starting: steps.StartWorkers | None = None
        """The start that is due as soon as its preparations are done, and it is certain that its round still stands."""
        fence = workers.fence if workers.group.spec.features.recovery.fence else None
        self._confirmation = Confirmation(rendezvous, fence=fence)
        self.waiting = WaitingForOthers(rendezvous, clock)
        self.result: RunResult | None = None
        """The result of the run, once it ends."""
        self.last: RunResult | None = None
        """The result of the round's workers, as it was found."""
        self._held: RunResult | None = None
        """The result that was found, while it is not decided whether the workers failed."""
        self._signal_by = math.inf
        self._reporter: StatusReporter | None = None
        self._announced: Cause | None = None
        """The last failure of this node's workers."""
        self._finished_at = 0.0
        self._preempted: PreemptedJob | None = None

    def carry_out(self, step: steps.Step, round_: int) -> None:
        """Carry out a step of the policy, which belongs to this round."""
        self._round = round_
        self._HOW[type(step)](self, step)

    # What was begun, for the loop to drive

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        return [*self._notices.fds(), *(() if self._stopping is None else self._stopping.fds())]

    def wake_at(self) -> float:
        """The time of the next thing to do, on the clock; infinite for never."""
        waits = self._confirmation.awaited or self._workers.preparing()
        start_at = math.inf if self.starting is None or waits else -math.inf
        begun = (each.wake_at() for each in (self._stopping, self._preempted) if each is not None)
        ask_at = self._clock.monotonic() + self._confirmation.wake_in()
        return min(self._notices.wake_at(), self._signal_by, start_at, ask_at, *begun)

    @property
    def stops(self) -> bool:
        """Whether a stop of the workers is in progress."""
        return self._stopping is not None and self._stopping.stop is not None

    def heard(self, event: steps.Event) -> None:
        """An event has occurred, whatever the policy makes of it."""
        self._confirmation.heard(event)

    def stop_events(self) -> Iterator[steps.Event]:
        """Continue the stop in progress, and the running check of this node."""
        if self._stopping is not None:
            yield from self._stopping.events()

    def start_events(self) -> Iterator[steps.Event]:
        """Start the workers, if that is due and no preparation is left; or report why they cannot start."""
        self._confirmation.step()
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

    def notice_events(self) -> Iterator[steps.Event]:
        """Events for a signal or verdict that did not arrive, and for acknowledgements of the notice to the workers."""
        if self._preempted is not None:
            yield from self._preempted.events()
        if self._clock.monotonic() >= self._signal_by:
            self._signal_by = math.inf
            yield steps.SignalTimedOut()
        yield from self._notices.poll(self._workers.running)

    def has_fenced(self) -> bool:
        """Whether the reaper has killed the workers because the coordinator's last word is too old (`--fence`)."""
        return self._confirmation.has_fenced()

    def acknowledged(self) -> bool:
        """Whether a worker of this node has acknowledged a notice."""
        return self._notices.any_acknowledged()

    def leave_nothing(self, number: int) -> None:
        """End whatever runs by this signal, and return when it is gone."""
        self.waiting.end()
        try:
            if self._stopping is not None and self._stopping.check is not None:
                self._stopping.check.end(number)
            self._workers.shutdown(number)
        except BaseException:  # an unhandled ^C, say, must not cut the shutdown short
            self._workers.shutdown(Signals.SIGKILL)
            raise
        finally:
            self._ended()

    def _stopped(self) -> steps.WorkersStopped:
        self._workers.group.state = WorkerState.STOPPED
        self._ended()
        if self._events is not None:
            self._events.stopped()
        return steps.WorkersStopped(self._workers.ended_in_order(), waiting=bool(self._workers.survivors()))

    def _ended(self) -> None:
        self._notices.clear(keep=bool(self._workers.survivors()))
        self._confirmation.workers_ended()
        self._workers.events.workers_ended(self.last, self._workers.succeeded())

    # Steps: the rounds

    def _do_join(self, _step: steps.RequestJoin) -> None:
        spec = self._workers.group.spec
        self._workers.report_progress()
        if self._events is not None:
            self._events.joins()
        self._workers.group.join_requested_at = self.waiting.begin()
        log.info("[%s] Rendezvous'ing worker group", spec.role)
        self._confirmation.requests_place()
        self._rendezvous.join(joining(spec, restarts_workers=self._workers.restarts_workers()))

    def _do_start(self, step: steps.StartWorkers) -> None:
        self.last = self._held = None
        self._signal_by = math.inf
        self._workers.group.notices = self._notices.reset(keep=bool(self._workers.survivors()))
        self.starting = step
        if self._events is not None:
            self._events.starts()
        self._workers.begin_round(step.placement)
        if self._workers.preparation_failure() is None:  # otherwise it is reported when the loop asks for events
            list(self.start_events())

    def _do_await_signal(self, _step: steps.AwaitSignal) -> None:
        self.last, self._held = None, self.last
        self._signal_by = self._clock.monotonic() + _SIGNAL_COMES

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
        if self._events is not None:
            self._events.failed(cause)
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
        if step.live[0] and self.waiting.shows_live(step.live):
            return
        (log.warning if step.warning else log.info)("[%s] %s", self._workers.group.spec.role, step.text)

    # Steps: the workers

    def _do_check(self, _step: steps.CheckNode) -> None:
        self._made_stopping().begin_check()

    def _do_stop(self, step: steps.StopWorkers) -> None:
        stopping = self._made_stopping()
        if stopping.check is not None:
            stopping.check.begin_stop(step.signal)
            return
        self.starting = None
        self._confirmation.cancel()
        self._workers.cancel_preparations()
        self._workers.report_progress()
        if self._events is not None:
            self._events.stops()
        if (stopped := stopping.begin_stop(step)) is not None:
            self._post(stopped)

    def _do_keep_nobody(self, step: steps.KeepNobody) -> None:
        self._workers.keep_nobody(step)

    def _do_kill(self, _step: steps.KillWorkers) -> None:
        log.warning("Killing the workers")
        if self._stopping is not None:
            self._stopping.kill()

    def _made_stopping(self) -> Stopping:
        if self._stopping is None:
            from rallypoint.agent.stopping import Stopping

            self._stopping = Stopping(self._workers, self._stopped)
        return self._stopping

    def _do_forward(self, step: steps.ForwardSignal) -> None:
        log.info("Received %s for the workers", signal_name(step.signal))
        self._workers.forward(step.signal)

    def _do_post_notice(self, step: steps.PostNotice) -> None:
        self._notices.post(step.reason, step.node, self._round, step.seconds, waits=True)

    def _do_withdraw_notice(self, _step: steps.WithdrawNotice) -> None:
        self._notices.withdraw()

    def _do_post_stop_notice(self, _step: steps.PostStopNotice) -> None:
        self._notices.post(PREEMPTION, "", self._round, self._workers.grace.of(failed=False), waits=False)

    def _preempted_job(self) -> PreemptedJob:
        if self._preempted is None:
            from rallypoint.agent.preemption.preempted_job import PreemptedJob

            self._preempted = PreemptedJob(self._workers.group.spec.features.preemption, self._clock)
        return self._preempted

    def _do_preempt(self, step: steps.AwaitVerdict | steps.RequeueJob) -> None:
        self._preempted_job().carry_out(step)

    # Steps: for those who watch

    def _do_report(self, step: steps.ReportStatus | steps.Collect | steps.AddToReport) -> None:
        if self._reporter is None:
            from rallypoint.agent.collect import StatusReporter

            self._reporter = StatusReporter(self._workers, self._rendezvous.send)
        self._reporter.carry_out(step, self._round)

    # Steps: the end

    def _do_query_standing(self, _step: steps.QueryStanding) -> None:
        self.waiting.begin_leaving()

    def _do_end_with_verdict(self, step: steps.EndWithVerdict) -> None:
        verdict, group = step.verdict.verdict, self._workers.group
        last = self.last or RunResult(group.state)
        if verdict.outcome is Outcome.SUCCEEDED:
            self._succeed(last)
            return
        if verdict.ending is Ending.PREEMPTED:
            raise self._preempted_job().error(step)
        from rallypoint.agent.endings import result_of

        own = verdict.cause is not None and verdict.cause.is_of(self._announced)
        elsewhere = not own and not self._rendezvous.hosts_coordinator
        if own:
            verdict = verdict._replace(cause=self._announced)
        self.result = result_of(verdict, last, self._workers, reported_elsewhere=elsewhere)

    def _do_raise(self, step: steps.EndWithError | steps.EndUnfit | steps.EndBySignal) -> None:
        from rallypoint.agent.endings import ending_error

        raise ending_error(step)

    def _do_end_in_success(self, _step: steps.EndInSuccess) -> None:
        self._succeed(self.last or RunResult(WorkerState.SUCCEEDED))

    def _succeed(self, last: RunResult) -> None:
        log.info("Done waiting for other agents. Elapsed: %.3f seconds", self._clock.monotonic() - self._finished_at)
        self._workers.group.state = WorkerState.SUCCEEDED
        self.result = RunResult(WorkerState.SUCCEEDED, last.return_values)

    _HOW: dict[type, Callable[..., None]] = {  # noqa: RUF012 - a table, never changed
        steps.RequestJoin: _do_join,
        steps.StartWorkers: _do_start,
        steps.AwaitSignal: _do_await_signal,
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
        **dict.fromkeys((steps.AwaitVerdict, steps.RequeueJob), _do_preempt),
        steps.QueryStanding: _do_query_standing,
        **dict.fromkeys((steps.ReportStatus, steps.Collect, steps.AddToReport), _do_report),
        steps.EndWithVerdict: _do_end_with_verdict,
        **dict.fromkeys((steps.EndWithError, steps.EndUnfit, steps.EndBySignal), _do_raise),
        steps.EndInSuccess: _do_end_in_success,
    }
