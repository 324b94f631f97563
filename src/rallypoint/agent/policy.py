"""What an agent does about what happens. Pure: where it stands and an event in, steps and where it stands next out.

    FORMING   waits for a place in a round; the workers of the round before may still be stopping
    RUNNING   its workers run
    BROKEN    its workers have failed, all have been told; waits to hear whether the round or the job ends
    FINISHED  its workers have all succeeded; waits for the others (the exit barrier)
    ENDING    how it ends is settled; its workers are being stopped
    LEAVING   it was told to end, and its workers have ended in order; asks whether the job goes on without it
    ENDED     nothing more happens

Laws:

1. A failure is announced before anything is stopped, so that all nodes stop side by side.
2. The next round is asked for before the workers of the last one are stopped: it forms while they stop.
3. Workers are started only for a placement, and only after those of the round before are gone: a placement that comes
   while they stop is kept until then, and forgotten if its round ends first.
4. Only a verdict, a signal or the loss of the rendezvous ends the agent. A departure of others never does.
5. Notices of rounds that are over change nothing; but a round of ours that went by unseen is followed by another join.
6. One stop at a time: whatever comes while workers stop adds a leave or a signal to it, never another stop or grace.
7. The last step is taken when no worker is left. What it will be is settled once, by whatever came first.
8. A signal that asks this agent to end is a departure at any moment, said to the others at once; only where workers are
   asked first, SIGTERM gives them the time of the notice before that. A second interrupt kills.
9. After a failure, or the loss of a node, workers are given the short grace, unless a notice has asked them to save.
10. Workers are asked while all of them run, and the round is drained with their consent or when their time is over.
11. Who ends by a signal that this agent was sent too was stopped and has not failed, whichever is seen first.
12. Who leaves by SIGTERM a job that goes on elsewhere, with workers that end in order, has done what it was asked: that
    end is a success. That the job goes on must hold for a moment, for all its nodes may be ending.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from signal import SIGINT, SIGQUIT, SIGTERM
from typing import NamedTuple

from rallypoint.agent.signal_set import FORWARDED_SIGNALS
from rallypoint.agent.steps import (
    AnnounceFailure,
    AnnouncePreemption,
    AnnounceSuccess,
    AwaitSignal,
    EndBySignal,
    EndInSuccess,
    EndWithError,
    EndWithVerdict,
    Event,
    FinalStep,
    ForwardSignal,
    KillWorkers,
    LeaveTimedOut,
    LogLine,
    NoticeExpired,
    PostNotice,
    PostStopNotice,
    QueryStanding,
    RequestDrain,
    RequestJoin,
    RequestLeave,
    SignalArrived,
    SignalTimedOut,
    StartWorkers,
    Step,
    StopWorkers,
    WithdrawNotice,
    WorkersFailed,
    WorkersReady,
    WorkersStopped,
    WorkersSucceeded,
)
from rallypoint.base.signals import exit_codes_of
from rallypoint.failures.cause import Cause
from rallypoint.membership.state import Outcome, Reason, RoundEnd, Verdict, join_names
from rallypoint.notices import PREEMPTION, SCALE
from rallypoint.protocol.messages import (
    ConfigDiffers,
    JobEnded,
    JoinRefused,
    LeaveReply,
    LinkDown,
    LinkLost,
    LinkUp,
    NodesWaiting,
    Placed,
    Placement,
    Preempted,
    ProgressText,
    RoundEnded,
)

INTERRUPTS = frozenset({SIGINT, SIGQUIT})
"""What a person types; typed again, it means now."""


class Phase(Enum):
    """Where an agent stands."""

    FORMING = auto()
    RUNNING = auto()
    BROKEN = auto()
    FINISHED = auto()
    ENDING = auto()
    LEAVING = auto()
    ENDED = auto()


class PostedNotice(NamedTuple):
    """A notice is out. `ready`: the workers have acknowledged or had their time, and the consent is given."""

    reason: str
    ready: bool = False


class PolicyState(NamedTuple):
    """All that the agent knows of itself.

    `round` is the one it holds a place in, -1 before the first. `notice` is how many seconds workers are asked for
    before the round is drained; 0 drains at once, and is the same for the whole run.
    """

    phase: Phase = Phase.FORMING
    round: int = -1
    notice_timeout: float = 0.0
    stopping: int = 0
    """The signal with which the workers were asked to stop, while they do; else 0."""
    pending_placement: Placement | None = None
    """The place that waits for the workers of the round before to be gone."""
    final_step: FinalStep | None = None
    """The step to end with, in ENDING."""
    failure: Cause | None = None
    """Why this node's workers have failed, in BROKEN."""
    held_failure: Cause | None = None
    """The same in RUNNING, while the signal that may have ended them is awaited."""
    posted_notice: PostedNotice | None = None
    leave_signal: int = 0
    """The signal after which this node departs when the round ends or the time of the notice is over; else 0."""
    interrupted: bool = False
    """Whether an interrupt has come."""
    link_down: bool = False
    """Whether the control plane is out of reach."""


Decision = tuple[PolicyState, tuple[Step, ...]]

_STARTED = frozenset({Phase.RUNNING, Phase.BROKEN, Phase.FINISHED})


def decide(status: PolicyState, event: Event) -> Decision:
    """What follows from `event` for an agent that stands at `status`."""
    if status.phase is Phase.ENDED:
        return status, ()
    rule = _RULES_BY_PHASE.get(status.phase, _RULES).get(type(event))
    return (status, ()) if rule is None else rule(status, event)


# Beginning and ending


def _start(status: PolicyState, placement: Placement) -> Decision:
    running = PolicyState(Phase.RUNNING, placement.round, status.notice_timeout, link_down=status.link_down)
    return running, (StartWorkers(placement),)


def _end(status: PolicyState, last: FinalStep, *before: Step, by: int = SIGTERM, failed: bool = False) -> Decision:
    """Settle the end: first the workers are stopped, with the signal `by` unless they have been asked already."""
    if status.phase is not Phase.FORMING:
        stop = StopWorkers(by, failed=failed, shared=isinstance(last, EndBySignal))
        return status._replace(phase=Phase.ENDING, final_step=last, stopping=by), (*before, stop)
    if status.stopping:
        return status._replace(phase=Phase.ENDING, final_step=last, pending_placement=None), before
    return _take_final_step(status, last, *before, in_order=True)


def _take_final_step(status: PolicyState, last: FinalStep, *before: Step, in_order: bool) -> Decision:
    """No worker is left."""
    if isinstance(last, EndBySignal) and last.signal == SIGTERM and in_order and not status.link_down:
        return status._replace(phase=Phase.LEAVING, stopping=0, final_step=last), (*before, QueryStanding())
    return status._replace(phase=Phase.ENDED, stopping=0), (*before, last)


def _leave_job(status: PolicyState, number: int) -> Decision:
    before: list[Step] = [RequestLeave(number)]
    if status.phase is Phase.RUNNING and number == SIGTERM:
        before.append(PostStopNotice())
    if status.stopping and number != status.stopping:
        before.append(ForwardSignal(number))
    return _end(status, EndBySignal(number), *before, by=number)


# The rounds


def _on_placed(status: PolicyState, event: Placed) -> Decision:
    if status.phase is not Phase.FORMING:
        return status, ()
    if not status.stopping:
        return _start(status, event.placement)
    return status._replace(pending_placement=event.placement), ()


def _on_workers_stopped(status: PolicyState, _event: WorkersStopped) -> Decision:
    gone = status._replace(stopping=0, pending_placement=None)
    if not status.stopping or status.pending_placement is None:
        return gone, ()
    return _start(gone, status.pending_placement)


def _on_round_ended(status: PolicyState, event: RoundEnded) -> Decision:
    over = event.end.round
    if status.phase is Phase.FORMING:
        # Our own round came and went before we heard of our place in it, or could take it: ask for one in the next.
        missed = over > status.round if status.pending_placement is None else over >= status.pending_placement.round
        return (status._replace(round=over, pending_placement=None), (RequestJoin(),)) if missed else (status, ())
    if over != status.round:
        return status, ()
    if status.leave_signal:
        ending, steps = _leave_job(status, status.leave_signal)
        return ending, (LogLine(_log_round_end(event, "this node leaves"), warning=True), *steps)
    forming = PolicyState(
        Phase.FORMING, status.round, status.notice_timeout, stopping=SIGTERM, link_down=status.link_down
    )
    told = LogLine(_log_round_end(event, _next_round(event.end)), warning=True)
    failed = event.end.reason in (Reason.FAILURE, Reason.LOST) and status.posted_notice is None
    # Where one node has been told to leave, all may be about to be.
    shared = event.end.reason is Reason.DEPARTED
    return forming, (told, RequestJoin(), StopWorkers(SIGTERM, restarts=True, failed=failed, shared=shared))


def _log_round_end(event: RoundEnded, then: str) -> str:
    end = event.end
    if end.cause is None:
        return f"round {end.round} is over: {_DRAIN_REASONS[end.reason](end)}; {then}"
    return f"round {end.round} is over: {end.cause.headline}; {then}"


def _next_round(end: RoundEnd) -> str:
    which = f" (restart {end.restarts})" if end.restarts.allowed else ""
    if not end.missing_nodes:
        return f"the workers are restarted{which}"
    nodes = "node has" if end.missing_nodes == 1 else "nodes have"
    return f"the workers are stopped until {end.missing_nodes} more {nodes} come{which}"


_DRAIN_REASONS: dict[Reason, Callable[[RoundEnd], str]] = {
    Reason.FAILURE: lambda end: f"{end.node or 'a node'} has failed",
    Reason.LOST: lambda end: f"{end.node or 'a node'} was lost" + (f" ({end.detail})" if end.detail else ""),
    Reason.DEPARTED: lambda end: f"{end.node or 'a node'} has left",
    Reason.GAVE_UP: lambda end: f"{end.node or 'a node'} has given up",
    Reason.DRAINED: lambda end: end.detail or end.reason.value,
    Reason.FORGOTTEN: lambda end: end.reason.value,
}
"""Why a round ended, for people; the failures of workers are told in other words."""

# Changes of membership


def _on_waiting(status: PolicyState, event: NodesWaiting) -> Decision:
    if status.phase not in _STARTED or event.round != status.round:
        return status, ()
    if not event.waiting:
        if status.posted_notice is None or status.posted_notice.reason != SCALE:
            return status, ()
        return status._replace(posted_notice=None), (WithdrawNotice(),)
    if not status.notice_timeout or status.phase is not Phase.RUNNING:
        return status, (RequestDrain(event.waiting, join_names(event.names)),)
    if status.posted_notice is not None:
        return status, ()
    who = join_names(event.names) or f"{event.waiting} more"
    wait = "waits" if event.waiting == 1 else "wait"
    told = LogLine(f"{who} {wait} to be taken in; the workers have {status.notice_timeout:g} s to save and acknowledge")
    return status._replace(posted_notice=PostedNotice(SCALE)), (told, PostNotice(SCALE, "", status.notice_timeout))


def _on_preempted(status: PolicyState, event: Preempted) -> Decision:
    if status.phase not in _STARTED or event.round != status.round or status.leave_signal:
        return status, ()
    if status.phase is not Phase.RUNNING or (status.posted_notice is not None and status.posted_notice.ready):
        return status._replace(posted_notice=PostedNotice(PREEMPTION, ready=True)), (RequestDrain(),)
    told = LogLine(
        f"{event.node} will be taken away; the workers have {event.seconds:g} s to save and acknowledge", warning=True
    )
    return status._replace(posted_notice=PostedNotice(PREEMPTION)), (
        told,
        PostNotice(PREEMPTION, event.node, event.seconds),
    )


def _on_workers_ready(status: PolicyState, _event: WorkersReady) -> Decision:
    if status.phase is not Phase.RUNNING or status.posted_notice is None or status.posted_notice.ready:
        return status, ()
    return status._replace(posted_notice=status.posted_notice._replace(ready=True)), (RequestDrain(),)


def _on_notice_expired(status: PolicyState, _event: NoticeExpired) -> Decision:
    return _leave_job(status, status.leave_signal) if status.leave_signal else (status, ())


# The workers


def _on_workers_succeeded(status: PolicyState, _event: WorkersSucceeded) -> Decision:
    if status.phase is not Phase.RUNNING:
        return status, ()
    # Workers that are done need no asking.
    consent = (RequestDrain(),) if status.posted_notice is not None and not status.posted_notice.ready else ()
    return status._replace(phase=Phase.FINISHED, posted_notice=None), (AnnounceSuccess(), *consent)


def _on_workers_failed(status: PolicyState, event: WorkersFailed) -> Decision:
    if status.phase is not Phase.RUNNING or status.held_failure is not None:
        return status, ()
    if status.leave_signal and event.cause.exitcode in exit_codes_of(status.leave_signal):
        return _leave_job(status, status.leave_signal)
    if event.shared_signals - FORWARDED_SIGNALS and not status.leave_signal:
        return status._replace(held_failure=event.cause), (AwaitSignal(),)
    return _fail(status, event.cause)


def _fail(status: PolicyState, cause: Cause) -> Decision:
    return status._replace(phase=Phase.BROKEN, failure=cause, held_failure=None), (AnnounceFailure(cause),)


def _on_signal_timed_out(status: PolicyState, _event: SignalTimedOut) -> Decision:
    return (status, ()) if status.held_failure is None else _fail(status, status.held_failure)


# The end


def _on_job_ended(status: PolicyState, event: JobEnded) -> Decision:
    return _end(
        status, EndWithVerdict(event), failed=event.verdict.outcome is Outcome.FAILED and status.posted_notice is None
    )


def _on_refused(status: PolicyState, event: JoinRefused) -> Decision:
    return _end(status, EndWithError(event)) if status.phase is Phase.FORMING else (status, ())


def _on_link_lost(status: PolicyState, event: LinkLost) -> Decision:
    if status.phase is Phase.FINISHED:
        return _end(
            status, EndInSuccess(), LogLine(f"{event.detail}; this node's workers had all succeeded", warning=True)
        )
    failure = status.failure or status.held_failure
    if failure is not None:  # the failure of the line must not hide that of the workers
        told = LogLine(f"{event.detail}; the job ends here with the failure of this node's workers", warning=True)
        return _end(status, EndWithVerdict(JobEnded(Verdict(Outcome.FAILED, failure))), told, failed=True)
    return _end(status, EndWithError(event))


def _on_signal(status: PolicyState, event: SignalArrived) -> Decision:
    number = event.number
    if number in FORWARDED_SIGNALS:
        return status, (ForwardSignal(number),)
    if number == SIGTERM and status.leave_signal:
        return status, ()
    if number == SIGTERM and status.notice_timeout and status.phase is Phase.RUNNING and status.held_failure is None:
        seconds = min(status.notice_timeout, event.notice)
        told = LogLine(f"Received SIGTERM; the workers have {seconds:g} s to save and acknowledge", warning=True)
        asked = (told, AnnouncePreemption(seconds), PostNotice(PREEMPTION, "", seconds))
        return status._replace(posted_notice=PostedNotice(PREEMPTION), leave_signal=number), asked
    return _leave_job(status._replace(interrupted=number in INTERRUPTS), number)


def _on_final_stop(status: PolicyState, event: WorkersStopped) -> Decision:
    assert status.final_step is not None, "an agent that ends knows how"
    return _take_final_step(status, status.final_step, in_order=event.ended_in_order)


def _on_left(status: PolicyState, event: LeaveReply) -> Decision:
    assert isinstance(status.final_step, EndBySignal), "only who departs asks that"
    if event.goes_on:
        more = f"goes on on {event.others} other node{'s' if event.others > 1 else ''}"
        return status._replace(final_step=EndBySignal(status.final_step.signal, more)), ()
    succeeded = "has succeeded" if event.outcome is Outcome.SUCCEEDED else ""
    return status._replace(phase=Phase.ENDED), (EndBySignal(status.final_step.signal, succeeded),)


def _on_leave_timed_out(status: PolicyState, _event: LeaveTimedOut) -> Decision:
    assert status.final_step is not None, "an agent that leaves knows how"
    return status._replace(phase=Phase.ENDED), (status.final_step,)


def _leave_without_answer(status: PolicyState, _event: Event) -> Decision:
    """Nobody can say any more how the job stands, or nobody wants to wait for that."""
    assert isinstance(status.final_step, EndBySignal), "only who departs asks that"
    return status._replace(phase=Phase.ENDED), (EndBySignal(status.final_step.signal),)


def _on_signal_when_ending(status: PolicyState, event: SignalArrived) -> Decision:
    if event.number in FORWARDED_SIGNALS:
        return status, (ForwardSignal(event.number),)
    if event.number not in INTERRUPTS:
        return status, ()
    if status.interrupted:
        return status, (KillWorkers(),)
    return status._replace(interrupted=True), (
        LogLine("the workers are being stopped; once more kills them", warning=True),
    )


def _on_signal_when_leaving(status: PolicyState, event: SignalArrived) -> Decision:
    return (status, ()) if event.number in FORWARDED_SIGNALS | {SIGTERM} else _leave_without_answer(status, event)


# The line to the others


def _on_link_down(status: PolicyState, event: LinkDown) -> Decision:
    if status.link_down:
        return status, ()
    then = "this node waits for it to come back" if status.phase is Phase.FORMING else "what runs here runs on"
    return status._replace(link_down=True), (LogLine(f"{event.detail}; {then}", warning=True),)


def _on_link_up(status: PolicyState, event: LinkUp) -> Decision:
    again = (RequestJoin(),) if event.join_lost and status.phase is Phase.FORMING else ()
    if not status.link_down:
        return status, again
    return status._replace(link_down=False), (LogLine("the control plane is in reach again", warning=True), *again)


def _on_progress_text(status: PolicyState, event: ProgressText) -> Decision:
    if status.phase is not Phase.FORMING or status.stopping:  # what this node waits for then is its own workers
        return status, ()
    return status, (LogLine(event.text, warning=event.warning),)


def _on_differs(status: PolicyState, event: ConfigDiffers) -> Decision:
    told = (f"{each.sentence('this node')}; give all nodes of a job the same" for each in event.differences)
    return status, tuple(LogLine(each, warning=True) for each in told)


_RULES: dict[type, Callable[..., Decision]] = {
    Placed: _on_placed,
    WorkersStopped: _on_workers_stopped,
    RoundEnded: _on_round_ended,
    NodesWaiting: _on_waiting,
    Preempted: _on_preempted,
    WorkersReady: _on_workers_ready,
    NoticeExpired: _on_notice_expired,
    WorkersSucceeded: _on_workers_succeeded,
    WorkersFailed: _on_workers_failed,
    SignalTimedOut: _on_signal_timed_out,
    JobEnded: _on_job_ended,
    JoinRefused: _on_refused,
    LinkLost: _on_link_lost,
    SignalArrived: _on_signal,
    LinkDown: _on_link_down,
    LinkUp: _on_link_up,
    ConfigDiffers: _on_differs,
    ProgressText: _on_progress_text,
}
"""Events that are not named here change nothing."""

_RULES_WHEN_ENDING: dict[type, Callable[..., Decision]] = {
    WorkersStopped: _on_final_stop,
    SignalArrived: _on_signal_when_ending,
}
"""The same, once the end is settled."""

_RULES_WHEN_LEAVING: dict[type, Callable[..., Decision]] = {
    LeaveReply: _on_left,
    LeaveTimedOut: _on_leave_timed_out,
    SignalArrived: _on_signal_when_leaving,
    LinkDown: _leave_without_answer,
    LinkLost: _leave_without_answer,
}
"""The same, when nothing is left but the question how the job stands."""

_RULES_BY_PHASE = {Phase.ENDING: _RULES_WHEN_ENDING, Phase.LEAVING: _RULES_WHEN_LEAVING}
