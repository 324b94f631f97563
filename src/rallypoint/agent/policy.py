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
6. One stop at a time: whatever comes while workers stop adds a goodbye or a signal to it, never another stop or grace.
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

from rallypoint.agent.handled import PASSED_ON
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
    Last,
    Leave,
    LeaveOver,
    NoSignal,
    NoticeOver,
    PassOn,
    SignalArrived,
    Start,
    Step,
    Stop,
    Tell,
    Withdraw,
    WorkersFailed,
    WorkersReady,
    WorkersStopped,
    WorkersSucceeded,
)
from rallypoint.base.signals import endings_by
from rallypoint.failures.cause import Cause
from rallypoint.notices import PREEMPTION, SCALE
from rallypoint.rendezvous.messages import (
    Differs,
    JobEnded,
    JoinRefused,
    Left,
    LinkDown,
    LinkLost,
    LinkUp,
    NodesWaiting,
    Placed,
    Placement,
    Preempted,
    RoundEnded,
    Waiting,
)
from rallypoint.rendezvous.state import Outcome, Reason, RoundEnd, Verdict, in_words

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


class Asked(NamedTuple):
    """A notice is out. `ready`: the workers have acknowledged or had their time, and the consent is given."""

    reason: str
    ready: bool = False


class Status(NamedTuple):
    """All that the agent knows of itself.

    `round` is the one it holds a place in, -1 before the first. `notice` is how many seconds workers are asked for
    before the round is drained; 0 drains at once, and is the same for the whole run.
    """

    phase: Phase = Phase.FORMING
    round: int = -1
    notice: float = 0.0
    stopping: int = 0
    """The signal with which the workers were asked to stop, while they do; else 0."""
    kept: Placement | None = None
    """The place that waits for the workers of the round before to be gone."""
    last: Last | None = None
    """The step to end with, in ENDING."""
    failure: Cause | None = None
    """Why this node's workers have failed, in BROKEN."""
    held: Cause | None = None
    """The same in RUNNING, while the signal that may have ended them is awaited."""
    asked: Asked | None = None
    leaving: int = 0
    """The signal after which this node departs when the round ends or the time of the notice is over; else 0."""
    interrupted: bool = False
    """Whether an interrupt has come."""
    cut_off: bool = False
    """Whether the control plane is out of reach."""


Decision = tuple[Status, tuple[Step, ...]]

_STARTED = frozenset({Phase.RUNNING, Phase.BROKEN, Phase.FINISHED})


def decide(status: Status, event: Event) -> Decision:
    """What follows from `event` for an agent that stands at `status`."""
    if status.phase is Phase.ENDED:
        return status, ()
    rule = _RULES_BY_PHASE.get(status.phase, _RULES).get(type(event))
    return (status, ()) if rule is None else rule(status, event)


# Beginning and ending


def _start(status: Status, placement: Placement) -> Decision:
    running = Status(Phase.RUNNING, placement.round, status.notice, cut_off=status.cut_off)
    return running, (Start(placement),)


def _end(status: Status, last: Last, *before: Step, by: int = SIGTERM, failed: bool = False) -> Decision:
    """Settle the end: first the workers are stopped, with the signal `by` unless they have been asked already."""
    if status.phase is not Phase.FORMING:
        stop = Stop(by, failed=failed, shared=isinstance(last, Depart))
        return status._replace(phase=Phase.ENDING, last=last, stopping=by), (*before, stop)
    if status.stopping:
        return status._replace(phase=Phase.ENDING, last=last, kept=None), before
    return _take_last(status, last, *before, in_order=True)


def _take_last(status: Status, last: Last, *before: Step, in_order: bool) -> Decision:
    """No worker is left."""
    if isinstance(last, Depart) and last.signal == SIGTERM and in_order and not status.cut_off:
        return status._replace(phase=Phase.LEAVING, stopping=0, last=last), (*before, AskOthers())
    return status._replace(phase=Phase.ENDED, stopping=0), (*before, last)


def _depart(status: Status, number: int) -> Decision:
    before: list[Step] = [Leave(number)]
    if status.phase is Phase.RUNNING and number == SIGTERM:
        before.append(Forewarn())
    if status.stopping and number != status.stopping:
        before.append(PassOn(number))
    return _end(status, Depart(number), *before, by=number)


# The rounds


def _on_placed(status: Status, event: Placed) -> Decision:
    if status.phase is not Phase.FORMING:
        return status, ()
    if not status.stopping:
        return _start(status, event.placement)
    return status._replace(kept=event.placement), ()


def _on_workers_stopped(status: Status, _event: WorkersStopped) -> Decision:
    gone = status._replace(stopping=0, kept=None)
    if not status.stopping or status.kept is None:
        return gone, ()
    return _start(gone, status.kept)


def _on_round_ended(status: Status, event: RoundEnded) -> Decision:
    over = event.end.round
    if status.phase is Phase.FORMING:
        # Our own round came and went before we heard of our place in it, or could take it: ask for one in the next.
        missed = over > status.round if status.kept is None else over >= status.kept.round
        return (status._replace(round=over, kept=None), (Join(),)) if missed else (status, ())
    if over != status.round:
        return status, ()
    if status.leaving:
        ending, steps = _depart(status, status.leaving)
        return ending, (Tell(_account(event, "this node leaves"), loud=True), *steps)
    forming = Status(Phase.FORMING, status.round, status.notice, stopping=SIGTERM, cut_off=status.cut_off)
    told = Tell(_account(event, _next_round(event.end)), loud=True)
    failed = event.end.reason in (Reason.FAILURE, Reason.LOST) and status.asked is None
    # Where one node has been told to leave, all may be about to be.
    shared = event.end.reason is Reason.DEPARTED
    return forming, (told, Join(), Stop(SIGTERM, again=True, failed=failed, shared=shared))


def _account(event: RoundEnded, then: str) -> str:
    end = event.end
    if end.cause is None:
        return f"round {end.round} is over: {_WHY[end.reason](end)}; {then}"
    return f"round {end.round} is over: {end.cause.headline}; {then}"


def _next_round(end: RoundEnd) -> str:
    which = f" (restart {end.restarts})" if end.restarts.allowed else ""
    if not end.short:
        return f"the workers are restarted{which}"
    return f"the workers are stopped until {end.short} more node{' has' if end.short == 1 else 's have'} come{which}"


_WHY: dict[Reason, Callable[[RoundEnd], str]] = {
    Reason.FAILURE: lambda end: f"{end.node or 'a node'} has failed",
    Reason.LOST: lambda end: f"{end.node or 'a node'} was lost" + (f" ({end.detail})" if end.detail else ""),
    Reason.DEPARTED: lambda end: f"{end.node or 'a node'} has left",
    Reason.GAVE_UP: lambda end: f"{end.node or 'a node'} has given up",
    Reason.DRAINED: lambda end: end.detail or end.reason.value,
    Reason.FORGOTTEN: lambda end: end.reason.value,
}
"""Why a round ended, for people; the failures of workers are told in other words."""

# Changes of membership


def _on_waiting(status: Status, event: NodesWaiting) -> Decision:
    if status.phase not in _STARTED or event.round != status.round:
        return status, ()
    if not event.waiting:
        if status.asked is None or status.asked.reason != SCALE:
            return status, ()
        return status._replace(asked=None), (Withdraw(),)
    if not status.notice or status.phase is not Phase.RUNNING:
        return status, (Drain(event.waiting, in_words(event.names)),)
    if status.asked is not None:
        return status, ()
    who = in_words(event.names) or f"{event.waiting} more"
    wait = "waits" if event.waiting == 1 else "wait"
    told = Tell(f"{who} {wait} to be taken in; the workers have {status.notice:g} s to save and acknowledge")
    return status._replace(asked=Asked(SCALE)), (told, Ask(SCALE, "", status.notice))


def _on_preempted(status: Status, event: Preempted) -> Decision:
    if status.phase not in _STARTED or event.round != status.round or status.leaving:
        return status, ()
    if status.phase is not Phase.RUNNING or (status.asked is not None and status.asked.ready):
        return status._replace(asked=Asked(PREEMPTION, ready=True)), (Drain(),)
    told = Tell(
        f"{event.node} will be taken away; the workers have {event.seconds:g} s to save and acknowledge", loud=True
    )
    return status._replace(asked=Asked(PREEMPTION)), (told, Ask(PREEMPTION, event.node, event.seconds))


def _on_workers_ready(status: Status, _event: WorkersReady) -> Decision:
    if status.phase is not Phase.RUNNING or status.asked is None or status.asked.ready:
        return status, ()
    return status._replace(asked=status.asked._replace(ready=True)), (Drain(),)


def _on_notice_over(status: Status, _event: NoticeOver) -> Decision:
    return _depart(status, status.leaving) if status.leaving else (status, ())


# The workers


def _on_workers_succeeded(status: Status, _event: WorkersSucceeded) -> Decision:
    if status.phase is not Phase.RUNNING:
        return status, ()
    # Workers that are done need no asking.
    consent = (Drain(),) if status.asked is not None and not status.asked.ready else ()
    return status._replace(phase=Phase.FINISHED, asked=None), (AnnounceSuccess(), *consent)


def _on_workers_failed(status: Status, event: WorkersFailed) -> Decision:
    if status.phase is not Phase.RUNNING or status.held is not None:
        return status, ()
    if status.leaving and event.cause.exitcode in endings_by(status.leaving):
        return _depart(status, status.leaving)
    if event.reached - PASSED_ON and not status.leaving:
        return status._replace(held=event.cause), (AwaitSignal(),)
    return _fail(status, event.cause)


def _fail(status: Status, cause: Cause) -> Decision:
    return status._replace(phase=Phase.BROKEN, failure=cause, held=None), (AnnounceFailure(cause),)


def _on_no_signal(status: Status, _event: NoSignal) -> Decision:
    return (status, ()) if status.held is None else _fail(status, status.held)


# The end


def _on_job_ended(status: Status, event: JobEnded) -> Decision:
    return _end(status, End(event), failed=event.verdict.outcome is Outcome.FAILED and status.asked is None)


def _on_refused(status: Status, event: JoinRefused) -> Decision:
    return _end(status, GiveUp(event)) if status.phase is Phase.FORMING else (status, ())


def _on_link_lost(status: Status, event: LinkLost) -> Decision:
    if status.phase is Phase.FINISHED:
        return _end(status, Finish(), Tell(f"{event.detail}; this node's workers had all succeeded", loud=True))
    failure = status.failure or status.held
    if failure is not None:  # the failure of the line must not hide that of the workers
        told = Tell(f"{event.detail}; the job ends here with the failure of this node's workers", loud=True)
        return _end(status, End(JobEnded(Verdict(Outcome.FAILED, failure))), told, failed=True)
    return _end(status, GiveUp(event))


def _on_signal(status: Status, event: SignalArrived) -> Decision:
    number = event.number
    if number in PASSED_ON:
        return status, (PassOn(number),)
    if number == SIGTERM and status.leaving:
        return status, ()
    if number == SIGTERM and status.notice and status.phase is Phase.RUNNING and status.held is None:
        seconds = min(status.notice, event.notice)
        told = Tell(f"Received SIGTERM; the workers have {seconds:g} s to save and acknowledge", loud=True)
        asked = (told, AnnounceDeparture(seconds), Ask(PREEMPTION, "", seconds))
        return status._replace(asked=Asked(PREEMPTION), leaving=number), asked
    return _depart(status._replace(interrupted=number in INTERRUPTS), number)


def _on_last_stopped(status: Status, event: WorkersStopped) -> Decision:
    assert status.last is not None, "an agent that ends knows how"
    return _take_last(status, status.last, in_order=event.in_order)


def _on_left(status: Status, event: Left) -> Decision:
    assert isinstance(status.last, Depart), "only who departs asks that"
    if event.goes_on:
        more = f"goes on on {event.others} other node{'s' if event.others > 1 else ''}"
        return status._replace(last=Depart(status.last.signal, more)), ()
    succeeded = "has succeeded" if event.outcome is Outcome.SUCCEEDED else ""
    return status._replace(phase=Phase.ENDED), (Depart(status.last.signal, succeeded),)


def _on_leave_over(status: Status, _event: LeaveOver) -> Decision:
    assert status.last is not None, "an agent that leaves knows how"
    return status._replace(phase=Phase.ENDED), (status.last,)


def _leave_unasked(status: Status, _event: Event) -> Decision:
    """Nobody can say any more how the job stands, or nobody wants to wait for that."""
    assert isinstance(status.last, Depart), "only who departs asks that"
    return status._replace(phase=Phase.ENDED), (Depart(status.last.signal),)


def _on_signal_when_ending(status: Status, event: SignalArrived) -> Decision:
    if event.number in PASSED_ON:
        return status, (PassOn(event.number),)
    if event.number not in INTERRUPTS:
        return status, ()
    if status.interrupted:
        return status, (Kill(),)
    return status._replace(interrupted=True), (Tell("the workers are being stopped; once more kills them", loud=True),)


def _on_signal_when_leaving(status: Status, event: SignalArrived) -> Decision:
    return (status, ()) if event.number in PASSED_ON | {SIGTERM} else _leave_unasked(status, event)


# The line to the others


def _on_link_down(status: Status, event: LinkDown) -> Decision:
    if status.cut_off:
        return status, ()
    then = "this node waits for it to come back" if status.phase is Phase.FORMING else "what runs here runs on"
    return status._replace(cut_off=True), (Tell(f"{event.detail}; {then}", loud=True),)


def _on_link_up(status: Status, event: LinkUp) -> Decision:
    again = (Join(),) if event.join_lost and status.phase is Phase.FORMING else ()
    if not status.cut_off:
        return status, again
    return status._replace(cut_off=False), (Tell("the control plane is in reach again", loud=True), *again)


def _on_waiting_in_words(status: Status, event: Waiting) -> Decision:
    if status.phase is not Phase.FORMING or status.stopping:  # what this node waits for then is its own workers
        return status, ()
    return status, (Tell(event.text, loud=event.loud),)


def _on_differs(status: Status, event: Differs) -> Decision:
    told = (f"{each.told('this node')}; give all nodes of a job the same" for each in event.differences)
    return status, tuple(Tell(each, loud=True) for each in told)


_RULES: dict[type, Callable[..., Decision]] = {
    Placed: _on_placed,
    WorkersStopped: _on_workers_stopped,
    RoundEnded: _on_round_ended,
    NodesWaiting: _on_waiting,
    Preempted: _on_preempted,
    WorkersReady: _on_workers_ready,
    NoticeOver: _on_notice_over,
    WorkersSucceeded: _on_workers_succeeded,
    WorkersFailed: _on_workers_failed,
    NoSignal: _on_no_signal,
    JobEnded: _on_job_ended,
    JoinRefused: _on_refused,
    LinkLost: _on_link_lost,
    SignalArrived: _on_signal,
    LinkDown: _on_link_down,
    LinkUp: _on_link_up,
    Differs: _on_differs,
    Waiting: _on_waiting_in_words,
}
"""Events that are not named here change nothing."""

_RULES_WHEN_ENDING: dict[type, Callable[..., Decision]] = {
    WorkersStopped: _on_last_stopped,
    SignalArrived: _on_signal_when_ending,
}
"""The same, once the end is settled."""

_RULES_WHEN_LEAVING: dict[type, Callable[..., Decision]] = {
    Left: _on_left,
    LeaveOver: _on_leave_over,
    SignalArrived: _on_signal_when_leaving,
    LinkDown: _leave_unasked,
    LinkLost: _leave_unasked,
}
"""The same, when nothing is left but the question how the job stands."""

_RULES_BY_PHASE = {Phase.ENDING: _RULES_WHEN_ENDING, Phase.LEAVING: _RULES_WHEN_LEAVING}
