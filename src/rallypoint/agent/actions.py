"""Carries out the policy's steps, on this node's workers and its rendezvous.

Laws:

1. Nothing here waits. A step that takes time is only started here; the loop drives it as a `Source`.
2. Only the policy knows the agent's phase. This module knows only which steps are unfinished.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from signal import SIGKILL, Signals

from rallypoint.agent import steps
from rallypoint.agent.confirmation import Confirmation
from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.agent.sources import Source, guarded
from rallypoint.agent.spec import RunResult, WorkerState, node_failure
from rallypoint.agent.steps import Timer
from rallypoint.agent.stopping import WorkersStop
from rallypoint.agent.workers import WorkerController
from rallypoint.base.clock import Clock
from rallypoint.base.errors import (
    JobPreempted,
    NodeLeftInOrder,
    PreflightError,
    RallypointError,
    SignalException,
)
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name
from rallypoint.control.membership.state import Drain, Fail, NodeInfo, Outcome, Preempt, PreemptJob, Succeed, Verdict
from rallypoint.control.protocol import messages
from rallypoint.control.protocol.errors import RendezvousClosedError, RendezvousError, error_of
from rallypoint.control.protocol.messages import ConfigDiffers, JobEnded, LeaveRequest, LinkDown, ProgressRequest
from rallypoint.failures.cause import Cause, Ending
from rallypoint.notices import PREEMPTION
from rallypoint.rendezvous.handler import FIRST_PROGRESS_REQUEST, MAX_PROGRESS_INTERVAL
from rallypoint.workers.process import is_shortage

if TYPE_CHECKING:
    from rallypoint.agent.sources import Gate

log = get_logger(__name__)

_NO_START = RallypointError, OSError, RuntimeError, MemoryError
"""Errors that mean that workers cannot be started: `can't start new thread` is a RuntimeError."""
_SHORTAGE_TIMEOUT, _SHORTAGE_PAUSE = 3.0, 0.25
"""Seconds to retry a start if this machine is out of a resource, and the pause between tries. Workers that ended a
moment ago may have used it."""


class Actions(Source):
    """Carries out steps for one agent's loop, and drives those that take time.

    Args:
        workers: the workers of this node.
        rendezvous: this node's rendezvous client.
        clock: the loop's clock.
        post: called with an event that a step causes at once.
    """

    def __init__(
        self,
        workers: WorkerController,
        rendezvous: RendezvousClient,
        clock: Clock,
        post: Callable[[steps.Event], None],
    ) -> None:
        self._workers = workers
        self._rendezvous = rendezvous
        self._clock = clock
        self._post = post
        fenced = workers.group.spec.features.recovery.fence
        self._confirmation = Confirmation(rendezvous, fence=workers.fence if fenced else None)
        self.fence = self._confirmation if fenced else None
        self._query_every = FIRST_PROGRESS_REQUEST
        """Seconds between queries for other nodes' progress."""
        self.timers: dict[Timer, float] = {}
        """When each timer fires, on the clock."""
        self.workers_stop = WorkersStop(self._stopped)
        """The stop in progress or the last one."""
        self._gate: Gate | None = None
        """The running check that must pass before this node requests a place."""
        self.starting: steps.StartWorkers | None = None
        """The start to make once preparations are done and the coordinator has confirmed the round."""
        self._start_failure: Cause | None = None
        """Why this node cannot even begin its round."""
        self._start_at = -math.inf
        """When to retry a start that failed for lack of resources."""
        self._start_until = math.inf
        """When to stop retrying and report failure; infinite before the first try."""
        self.result: RunResult | None = None
        """The result of the run, once it ends."""
        self.last: RunResult | None = None
        """The last result of polling the round's workers."""
        self._held: RunResult | None = None
        """That result, while it is undecided whether it is a failure."""
        self._announced: Cause | None = None
        """The last failure of this node's workers."""
        self._finished_at = 0.0
        self.at_end: list[Callable[[], str]] = []
        """Texts to append to the final reason; each may wait for its facts."""
        self.round = -1
        """The round that the current steps belong to."""

        self.steps: dict[type, Callable[[Any], object]] = {
            steps.LogLine: lambda step: self._log(step.text, warning=step.warning),
            steps.RequestJoin: self._join,
            steps.StartWorkers: self._start,
            **dict.fromkeys((Drain, Preempt, PreemptJob, LeaveRequest), rendezvous.send),
            steps.SetTimer: self._set_timer,
            Fail: self._fail,
            steps.FailNode: self._fail_node,
            Succeed: self._succeed,
            steps.CheckNode: self._check_node,
            steps.StopWorkers: self._stop,
            steps.StopHeld: lambda step: workers.stop_held(step.signal, failed=step.failed),
            steps.KillWorkers: self._kill,
            steps.ForwardSignal: self._forward,
            steps.PostNotice: self._post_notice,
            steps.PostStopNotice: self._post_stop_notice,
            steps.WithdrawNotice: lambda _step: workers.folder.withdraw(),
            steps.End: self._end,
        }
        """Functions that carry out a step of the policy or of a feature's rules, by step type; features add theirs."""
        self.handlers: dict[type, list[Callable[[Any], object]]] = {
            **{kind: [self._confirmation.on_event] for kind in (messages.Confirmed, LinkDown, messages.LinkUp)},
            messages.OperatorAction: [lambda event: self._log(event.text)],
            ConfigDiffers: [self._on_config_differs],
        }
        """Functions to call for an event regardless of the policy, by event type; features add theirs."""

    def _on_config_differs(self, event: ConfigDiffers) -> None:
        for difference in event.differences:
            self._log(f"{difference.sentence('this node')}; use the same value on all nodes")

    def _set_timer(self, step: steps.SetTimer) -> None:
        self.timers[step.timer] = self._clock.monotonic() + step.seconds
        if step.timer is Timer.SIGNAL:
            self.last, self._held = None, self.last

    def _check_node(self, _step: steps.CheckNode) -> None:
        assert self._workers.gate is not None, "only where something has to pass"
        self._gate = self._workers.gate()

    def _kill(self, _step: steps.KillWorkers) -> None:
        log.warning("Killing the workers")
        self.workers_stop.kill_now()
        if self._gate is not None:
            self._gate.kill_now()

    def _forward(self, step: steps.ForwardSignal) -> None:
        log.info("Received %s for the workers", signal_name(step.signal))
        self._workers.forward(step.signal)

    def _post_notice(self, step: steps.PostNotice) -> None:
        self._workers.folder.post(step.reason, step.node, self.round, step.seconds, waits=True)

    def _post_stop_notice(self, _step: steps.PostStopNotice) -> None:
        seconds = self._workers.grace.seconds(failed=False)
        self._workers.folder.post(PREEMPTION, "", self.round, seconds, waits=False)

    # Work in progress, driven by the loop

    def fds(self) -> list[int]:
        return [*self.workers_stop.fds(), *(self._gate.fds() if self._gate is not None else ())]

    def wake_at(self) -> float:
        waits = self.starting is None or self._confirmation.awaited or self._workers.preparations.preparing()
        waits = waits and self._start_failure is None
        check_at = math.inf if self._gate is None else self._gate.wake_at()
        ask_at = math.inf if self.fence is None else self._clock.monotonic() + self.fence.wake_in()
        return min(
            (
                math.inf if waits else self._start_at,
                ask_at,
                *self.timers.values(),
                self.workers_stop.wake_at(),
                check_at,
            )
        )

    def step(self) -> Iterator[steps.Event]:
        yield from self.workers_stop.step()
        for outcome in () if self._gate is None else self._gate.step():
            self._gate = None
            yield outcome
        if self.fence is not None:
            self.fence.step()
        yield from self._start_if_ready()
        now = self._clock.monotonic()
        for timer in [timer for timer, at in self.timers.items() if at <= now]:
            # The loop handles each event before this generator continues: it may have cancelled the next timer.
            if self.timers.pop(timer, None) is None:
                continue
            if timer is Timer.PROGRESS:
                self._query_progress(now)
            else:
                yield steps.TimerFired(timer)

    def _start_if_ready(self) -> Iterator[steps.Event]:
        """Start the workers if a start is due and no preparation is in progress, or report why they cannot start."""
        if self.starting is None or self._clock.monotonic() < self._start_at:
            return
        preparations, cause = self._workers.preparations, self._start_failure
        if cause is None and preparations.preparing():
            return
        if cause is None and (failed := preparations.failed()) is not None:
            cause = node_failure(failed.failure, Ending.INFRASTRUCTURE, exitcode=1, host=failed.failed_node)
        if cause is None and self._confirmation.must_wait():
            return
        # Cleared before the start, not after it: an exception in the first round ends the run, and the shutdown must
        # not find a pending start.
        step, self.starting, self._start_failure = self.starting, None, None
        if cause is None:
            cause = self._try_start(step)
        if cause is not None:
            yield steps.WorkersFailed(cause, max_restarts=self._workers.restart_limit())
        elif self.starting is None:
            # Import both modules and open the store now, ahead of the next failure, while nobody waits for this node:
            #   1. a worker fails, and all nodes wait for the coordinator's `RoundEnded`;
            #   2. importing then would delay all of them (20 ms on a busy disk);
            #   3. opening the store then would cost another round trip to the coordinator.
            if self._rendezvous.hosts_coordinator:
                import rallypoint.control.membership.endings
                import rallypoint.control.membership.many_gone  # noqa: F401
            if step.placement.group_rank == 0 and self._workers.remaining():
                self._rendezvous.tell_next_store(step.placement.round)
            yield steps.WorkersStarted(step.placement.round)

    def _try_start(self, step: steps.StartWorkers) -> Cause | None:
        """Start the workers. Returns why they cannot start; None if they did, or if `starting` will be retried.

        Raises:
            RallypointError, OSError: the start failed in this node's first round. The user most likely made a mistake
            and is still watching.
        """
        if self.fence is not None:
            self.fence.workers_start()
        try:
            self._workers.start()
            import rallypoint.agent.causes
            import rallypoint.agent.ends  # noqa: F401 - both now, while nobody waits for them
        except _NO_START as error:
            cause, now = self._failed_start(error), self._clock.monotonic()
            self._start_until = min(self._start_until, now + _SHORTAGE_TIMEOUT)
            if is_shortage(error) and now < self._start_until:
                self.starting, self._start_at = step, now + _SHORTAGE_PAUSE
                self._log(f"the workers cannot be started yet; trying again: {error}")
                return None
            return cause
        return None

    def _failed_start(self, error: Exception) -> Cause:
        """Return the cause of a failed start, or raise the error if it ends this node."""
        if isinstance(error, (RendezvousError, SignalException)) or not self._workers.started_at:
            raise error
        return node_failure(f"its workers cannot be started: {error}", Ending.INFRASTRUCTURE, exitcode=1)

    # While waiting for other nodes

    def _query_progress(self, now: float) -> None:
        if not self.workers_stop.in_progress:  # otherwise this node is waiting for its own workers
            self._rendezvous.send(ProgressRequest())
            self._query_every = min(2 * self._query_every, MAX_PROGRESS_INTERVAL)
        self.timers[Timer.PROGRESS] = now + self._query_every

    # Shutdown

    def end_everything(self, number: int) -> None:
        """End everything that is running with this signal; return when it is gone."""
        self.timers.pop(Timer.PROGRESS, None)  # or we would wait for a pass of the loop that never comes
        try:
            if self._gate is not None:
                self._gate.end(number)
            self._workers.shutdown(number)
        except BaseException:  # such as an unhandled ^C, which must not cut the shutdown short
            self._workers.shutdown(SIGKILL)
            raise
        finally:
            self._ended()
            for on_workers_gone in self._workers.hooks.on_workers_gone:
                guarded("a feature's final report", on_workers_gone)

    def _stopped(self) -> steps.WorkersStopped:
        self._workers.group.state = WorkerState.STOPPED
        self._ended()
        from rallypoint.agent.ends import ended_with_0

        workers = self._workers
        return steps.WorkersStopped(
            workers.ended_in_order(),
            bool(workers.survivors()),
            ended_with_0(workers.pcontext, len(workers.group.workers)),
        )

    def _ended(self) -> None:
        self._workers.folder.clear(keep=self._workers.keeps_folder())
        if self.fence is not None:
            self.fence.workers_ended()

    # Steps: the rounds

    def _join(self, step: steps.RequestJoin) -> None:
        spec = self._workers.group.spec
        # Report progress before the request, which may complete the round at once:
        #   1. the workers are at step 41, but the coordinator knows only step 1; another node fails;
        #   2. our request is the last, and the round begins with the progress known to the coordinator: step 1;
        #   3. if we reported 41 now, the new workers' first report, step 31, would not count as progress.
        self._workers.folder.end_round()
        now = self._workers.group.join_requested_at = self._clock.monotonic()
        self._query_every = FIRST_PROGRESS_REQUEST
        self.timers[Timer.PROGRESS] = now + self._query_every
        log.info("[%s] Rendezvous'ing worker group", spec.role)
        if step.keeps_place:
            self._rendezvous.keep_place()
            return
        self._confirmation.requests_place()
        node = NodeInfo(
            *(spec.role, spec.local_world_size, "", 0),  # its rendezvous adds its address
            max_restarts=spec.max_restarts,
            program=spec.get_program_name(),
            restarts_workers=self._workers.restarts_all(),
        )
        for describe in self._workers.hooks.node_info:
            node = describe(node)
        self._rendezvous.join(node, keeps_place=self._workers.gate is None)

    def _start(self, step: steps.StartWorkers) -> None:
        # Forget the previous round's leftovers: a result held back until its signal arrived, and the timer of that
        # wait.
        self.last = self._held = None
        self.timers.pop(Timer.SIGNAL, None)
        self._workers.group.notices = self._workers.folder.reset(keep=self._workers.keeps_folder())
        self.starting, self._start_at, self._start_until = step, -math.inf, math.inf
        try:
            self._workers.enter_round(step.placement)
            for preparation in self._workers.preparations:
                preparation.begin(self._workers.group)
        except _NO_START as error:
            self._start_failure = self._failed_start(error)

    def _fail(self, step: Fail) -> None:
        spec, cause = self._workers.group.spec, step.cause
        self.last = self._held or self.last
        self._announced = cause
        self._workers.folder.end_round()
        self._rendezvous.send(step._replace(restarts_workers=self._workers.restarts_all()))
        # The failure is announced. Now do the slow look-ups for the log and the report: the other nodes are stopping
        # their workers, and could not finish anyway.
        if cause.rank >= 0:
            log.error(
                "failed (exitcode: %d) local_rank: %d (pid: %d) of binary: %s",
                *(cause.exitcode, cause.local_rank, cause.pid),
                spec.get_entrypoint_name(),
            )
        log.info("[%s] Worker group %s; notifying the other agents", spec.role, self._workers.group.state.value)
        for rank, failure in () if self.last is None else self.last.failures.items():
            if found := failure.settle():
                log.warning("the kernel log explains why rank %d failed: %s", rank, found)
                if rank == cause.rank:
                    explained = Cause.from_failure(failure, rank, cause.host)
                    self._announced = cause._replace(message=explained.message, traceback=explained.traceback)

    def _fail_node(self, step: steps.FailNode) -> None:
        limit = 0 if step.ends_job else self._workers.restart_limit()
        self._fail(Fail(step.round, node_failure(step.text, step.ending, exitcode=1), limit))

    def _succeed(self, _step: Succeed) -> None:
        self._finished_at = self._clock.monotonic()
        self._workers.folder.end_round()
        self._workers.on_succeeded()
        log.info("Local worker group finished (%s). Waiting for the other agents.", self._workers.group.state.value)

    def _log(self, text: str, *, warning: bool = True) -> None:
        (log.warning if warning else log.info)("[%s] %s", self._workers.group.spec.role, text)

    # Steps: the workers

    def _stop(self, step: steps.StopWorkers) -> None:
        if self._gate is not None:
            self._gate.begin_stop(step.signal)
            return
        self.starting = self._start_failure = None
        self._confirmation.awaited = False
        for preparation in self._workers.preparations:
            preparation.cancel()
        self._workers.folder.end_round()
        if (stopped := self.workers_stop.begin(self._workers.stop(step))) is not None:
            self._post(stopped)

    # End of the run

    def _end(self, step: steps.End) -> None:
        match step.event:
            case JobEnded(verdict=verdict):
                self._end_with(verdict, step.saved)
            case steps.NodeChecked(failure=failure):
                raise PreflightError(failure)
            case steps.SignalArrived(number=number):
                raise _left_by(step, Signals(number))
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
            raise RendezvousClosedError(f"{request} before its workers finished", ending=verdict.ending)
        else:
            self.result = self._result_of_failure(verdict, last)

    def _preempted(self, verdict: Verdict, saved: bool | None) -> JobPreempted:
        text = f"the job was preempted, since {verdict.detail}"
        if saved is not None:
            text += f"; {'all' if saved else 'not all'} workers of this node have saved"
        return JobPreempted("; ".join([text, *(more() for more in self.at_end)]))

    def _result_of_failure(self, verdict: Verdict, last: RunResult) -> RunResult:
        group = self._workers.group
        if verdict.detail:
            log.error("[%s] The job is ending although restarts are left: %s", group.spec.role, verdict.detail)
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


def _left_by(step: steps.End, number: Signals) -> SignalException:
    by, saved = step.drained_by, bool(step.saved)
    if step.standing:
        how = f"was drained by {by} and left the job" if by else f"left the job after {signal_name(number)}"
        return NodeLeftInOrder(f"this node {how}; the job {step.standing}", number, saved=saved, drained=bool(by))
    if by:
        text = f"this node was drained by {by}{f'; {why}' if (why := step.unasked) else ', and the job ends with it'}"
        return SignalException(text, number, saved=saved, drained=True)
    return SignalException(f"Process {os.getpid()} got signal {signal_name(number)}", number, saved=saved)
