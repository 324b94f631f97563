"""Decides what an agent does about an event. Pure: state and event in, next state and steps out.

    CHECKING  the user's node check is running, or will run when the previous round's workers are gone
    FORMING   waits for a placement; the previous round's workers might still be stopping
    RUNNING   its workers are running
    BROKEN    its workers failed, and this was announced; waits for the round or the job to end
    FINISHED  its workers all succeeded; waits for the other nodes (the exit barrier)
    ENDING    its end is decided; its workers are being stopped
    LEAVING   a signal ends it, and its workers ended cleanly; asks whether the job continues without it
    ENDED     nothing more happens

Laws:

1. A failure is announced before anything is stopped, so that all nodes stop at the same time.
2. The agent requests the next round before it stops the last round's workers: the round forms while they stop. A node
   that keeps its place (`RoundEnded.keeps_place`) has already requested it.
3. Workers are started only for a placement, and only when the previous round's workers are gone, or have left it and
   are waiting. A placement that arrives earlier waits, and is dropped if its round ends first.
4. Only a verdict, a signal or the loss of the rendezvous ends the agent. Other nodes that leave never end it.
5. Notifications about past rounds change nothing. If the agent missed its own round, it joins again.
6. One stop at a time: an event while workers stop adds a leave request or a signal to the stop, never a second stop. If
   the agent ends while workers stop for a restart, those that would continue in their processes are stopped too.
7. The agent takes its last step when no worker is left. Workers that wait for another round get the same grace period
   as all others. The first event that ends the agent decides the last step, once.
8. A signal that ends this agent makes it leave whatever the phase, and the agent announces this at once. SIGTERM first
   gives workers time to save, but only if they get notices. A second interrupt kills.
9. After a failure, or the loss of a node, workers get the short grace period, unless a notice asked them to save.
10. Workers get a notice only while all of them are running; the round is drained when they consent or at the deadline.
11. A worker killed by a signal that this agent also received was stopped. It did not fail, whichever is noticed first.
12. If SIGTERM makes this node leave, its workers end cleanly, and the job continues elsewhere, the agent succeeds. It
   first watches for a moment whether the job continues, because all its nodes might be ending.
13. Workers killed by the fence did not fail: their round is drained, and uses up no restart.
14. If the user has a node check, it must pass before the agent requests a place: at first, and after a failure of this
   node's own workers ended a round. The check runs when these workers are gone, since it might need their devices; none
   continues in its process. If it does not pass, the node leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from signal import SIGINT, SIGQUIT, SIGTERM

from rallypoint.agent import steps
from rallypoint.agent.signals import FORWARDED_SIGNALS
from rallypoint.agent.steps import SetTimer, SignalArrived, Timer, TimerFired
from rallypoint.base.light_typing import Any, NamedTuple
from rallypoint.base.signals import exit_codes_of, signal_name
from rallypoint.control.membership.state import (
    Drain,
    Fail,
    Outcome,
    Preempt,
    Reason,
    RoundEnd,
    Succeed,
    Verdict,
    join_names,
)
from rallypoint.control.protocol import messages
from rallypoint.control.protocol.messages import JobEnded, LeaveReply, LeaveRequest, LinkDown, LinkLost, Placement
from rallypoint.failures.cause import Cause, Ending
from rallypoint.notices import PREEMPTION, SCALE

_SIGNAL_COMES = 1.0
"""Seconds within which a signal to all processes reaches this one after it reached others. It takes microseconds unless
the machine is overloaded."""
_LEAVING, _LEAVING_EVERY = 1.0, 0.2
"""Seconds for which a job must continue without this node before the agent believes it, and between queries. A command
that ends a whole job on many nodes might reach the last of them this much later."""

_UNKNOWN = "the control plane does not answer, so it is unknown whether the job continues"
_SHOWN = 16
"""Maximum number of rank ranges in a log line."""

INTERRUPTS = frozenset({SIGINT, SIGQUIT})
"""Signals from the keyboard; the second one kills at once."""


class Phase(Enum):
    CHECKING = auto()
    FORMING = auto()
    RUNNING = auto()
    BROKEN = auto()
    FINISHED = auto()
    ENDING = auto()
    LEAVING = auto()
    ENDED = auto()


STARTED = frozenset({Phase.RUNNING, Phase.BROKEN, Phase.FINISHED})
"""Phases in which a round's workers have been started."""
LEAVES = frozenset({Phase.ENDING, Phase.LEAVING, Phase.ENDED})
"""Phases in which this agent's end is decided."""


class PostedNotice(NamedTuple):
    """A posted notice. `ready`: this node consents, because all workers acknowledged or the deadline passed
    (`is_late`)."""

    reason: str
    ready: bool = False
    is_late: bool = False


class PolicyState(NamedTuple):
    """The whole state of an agent.

    `round` and `group_rank` are its current place; -1 before the first. `notice_timeout` is the number of seconds that
    workers get before the round is drained; 0 drains at once. `checks_node`: whether the user has a node check. These
    last two never change during a run.
    """

    phase: Phase = Phase.FORMING
    round: int = -1
    group_rank: int = -1
    notice_timeout: float = 0.0
    checks_node: bool = False
    stopping: int = 0
    """The signal that stops the workers; 0 if they are not being stopped."""
    waiting: bool = False
    """Whether some of the previous round's workers are waiting in their processes for the next round."""
    ended_with_0: bool = False
    """Whether all workers exited with 0: in FORMING those of the previous round, in LEAVING those of the last one."""
    pending_placement: Placement | None = None
    """The placement that waits for the previous round's workers to be gone."""
    final_step: steps.End | None = None
    """In ENDING, the step to end with."""
    failure: Cause | None = None
    """In BROKEN, why this node's workers failed."""
    held_failure: steps.WorkersFailed | None = None
    """In RUNNING, a failure held back while waiting for the signal that may have caused it."""
    posted_notice: PostedNotice | None = None
    leave_signal: int = 0
    """The signal that makes this node leave when the round ends or at the notice's deadline; else 0."""
    drained_by: str = ""
    """The operator who drains this node, which then leaves as if after SIGTERM; else empty."""
    interrupted: bool = False
    """Whether an interrupt arrived."""
    link_down: bool = False
    """Whether the control plane is unreachable."""
    noted: Mapping[str, str] = {}
    """What features remember about the job, by name; kept across rounds."""

    def anew(self, phase: Phase, round_: int, group_rank: int = -1) -> PolicyState:
        """The state of an agent that enters a phase; everything else is reset."""
        return PolicyState(
            phase,
            round_,
            group_rank,
            self.notice_timeout,
            checks_node=self.checks_node,
            link_down=self.link_down,
            noted=self.noted,
        )

    @property
    def has_workers(self) -> bool:
        """Whether a round's workers, or a node check, may exist; valid until the end is decided."""
        return self.phase is not Phase.FORMING or self.waiting or bool(self.stopping)

    @property
    def can_notify_workers(self) -> bool:
        """Whether any workers can be notified, and have time to react."""
        return bool(self.notice_timeout) and self.phase is Phase.RUNNING and self.held_failure is None


Decision = tuple[PolicyState, tuple[steps.Step, ...]]
Rule = Callable[[PolicyState, Any], Decision | None]
Rules = Mapping[type, Rule]
"""Rules for events, by event type. A feature's rule returns None for events that it does not handle."""


def warning(text: str) -> steps.LogLine:
    """A step that logs a warning."""
    return steps.LogLine(text, warning=True)


def begin(status: PolicyState) -> Decision:
    """The initial state of an agent, and its first step."""
    if status.checks_node:
        return status._replace(phase=Phase.CHECKING), (steps.CheckNode(),)
    return status, (steps.RequestJoin(),)


def decide(status: PolicyState, event: steps.Event, features: Iterable[Rules] = ()) -> Decision:
    """Decide what follows from an event.

    Args:
        status: the state before.
        event: the event.
        features: the rules of features, tried first. If one returns None, the next one is tried, and the policy last.
            Ignored once the end of the agent is decided.

    Returns:
        The next state, and the steps to take.
    """
    kind = type(event)
    for rules in features if status.phase not in LEAVES else ():
        rule = rules.get(kind)
        if rule is not None and (decision := rule(status, event)) is not None:
            return decision
    found = _RULES[status.phase].get(kind)
    return (status, ()) if found is None else found(status, event)


# Transitions shared by several rules


def start_workers(status: PolicyState, placement: Placement) -> Decision:
    """Start the workers of a round in which this node has a place. Those of the previous round are gone."""
    running = status.anew(Phase.RUNNING, placement.round, placement.group_rank)
    return running, (steps.StartWorkers(placement),)


def end(status: PolicyState, last: steps.End, *before: steps.Step, by: int = SIGTERM, failed: bool = False) -> Decision:
    """Decide the end. If the workers are not stopping yet, first stop them with the signal `by`."""
    if status.stopping:
        ending = status._replace(phase=Phase.ENDING, final_step=last, pending_placement=None)
        return ending, (*before, steps.StopHeld(by, failed))
    if status.has_workers:
        stop = steps.StopWorkers(by, failed=failed, shared=isinstance(last.event, SignalArrived))
        return status._replace(phase=Phase.ENDING, final_step=last, stopping=by, waiting=False), (*before, stop)
    return take_final_step(status, last, *before, in_order=True)


def take_final_step(status: PolicyState, last: steps.End, *before: steps.Step, in_order: bool) -> Decision:
    """Take the last step; no worker is left."""
    if isinstance(last.event, SignalArrived) and last.event.number == SIGTERM and in_order and not status.link_down:
        return status._replace(phase=Phase.LEAVING, stopping=0, final_step=last), (
            *before,
            *_query_standing(status),
            SetTimer(Timer.LEAVE, _LEAVING),
        )
    if last.drained_by:
        killed = "its workers did not end in time and were killed"
        last = last._replace(unasked=_UNKNOWN if status.link_down else killed)
    return status._replace(phase=Phase.ENDED, stopping=0), (*before, last)


def _query_standing(status: PolicyState) -> tuple[steps.Step, ...]:
    """Query the state of the job without this node, now and again later."""
    return LeaveRequest(wants_reply=True, ended_with_0=status.ended_with_0), SetTimer(Timer.QUERY, _LEAVING_EVERY)


def _why_it_leaves(status: PolicyState, number: int) -> str:
    return f"{status.drained_by} is draining this node" if status.drained_by else f"Received {signal_name(number)}"


def notify_before_leaving(status: PolicyState, seconds: float) -> Decision:
    """Give the workers this many seconds to save before this node leaves."""
    line = warning(f"{_why_it_leaves(status, SIGTERM)}; the workers have {seconds:g} s to save and acknowledge")
    told = Preempt(status.round, seconds, f"is being drained by {status.drained_by}" if status.drained_by else "")
    then = (line, told, steps.PostNotice(PREEMPTION, "", seconds))
    return status._replace(posted_notice=PostedNotice(PREEMPTION), leave_signal=SIGTERM), then


def leave_job(status: PolicyState, number: int, *, saved: bool = False) -> Decision:
    """Leave the job to the other nodes, because of this signal or a drain.

    `saved`: whether all workers of the round acknowledged the notice.
    """
    by = status.drained_by
    text = f"{_why_it_leaves(status, number)}; ending the workers and leaving the job"
    if number in INTERRUPTS and status.has_workers:
        text += "; another interrupt will kill them at once"
    before: list[steps.Step] = [warning(text), LeaveRequest(why=f"drained by {by}" if by else "")]
    if status.phase is Phase.RUNNING and number == SIGTERM:
        before.append(steps.PostStopNotice())
    if status.stopping and number != status.stopping:
        before.append(steps.ForwardSignal(number))
    return end(status, steps.End(SignalArrived(number), saved=saved, drained_by=by), *before, by=number)


# Rounds


def _on_placed(status: PolicyState, event: messages.Placed) -> Decision:
    if not status.stopping:
        return start_workers(status, event.placement)
    return status._replace(pending_placement=event.placement), ()


def _check_once_stopped(status: PolicyState, event: steps.WorkersStopped) -> Decision:
    return status._replace(stopping=0, waiting=event.waiting), (steps.CheckNode(),)


def _on_workers_stopped(status: PolicyState, event: steps.WorkersStopped) -> Decision:
    gone = status._replace(stopping=0, pending_placement=None, waiting=event.waiting, ended_with_0=event.ended_with_0)
    if not status.stopping or status.pending_placement is None:
        return gone, ()
    return start_workers(gone, status.pending_placement)


def _on_node_checked(status: PolicyState, event: steps.NodeChecked) -> Decision:
    if event.failure:
        return status._replace(phase=Phase.ENDED), (LeaveRequest(), steps.End(event))
    return status._replace(phase=Phase.FORMING), (steps.RequestJoin(),)


def _note_round(status: PolicyState, event: messages.RoundEnded) -> Decision:
    return status._replace(round=max(event.end.round, status.round)), ()


def _on_missed_round(status: PolicyState, event: messages.RoundEnded) -> Decision:
    """Join the next round: our own may have ended before the agent learned about its place or could take it."""
    over, pending = event.end.round, status.pending_placement
    missed = over > status.round if pending is None else over >= pending.round
    join = steps.RequestJoin(event.keeps_place)
    return (status._replace(round=over, pending_placement=None), (join,)) if missed else (status, ())


def _on_round_ended(status: PolicyState, event: messages.RoundEnded) -> Decision:
    if event.end.round != status.round:
        return status, ()
    if status.leave_signal:
        ending, then = leave_job(status, status.leave_signal, saved=event.end.reason is Reason.DRAINED)
        return ending, (warning(_log_round_end(event, "this node is leaving the job")), *then)
    failed = event.end.reason in (Reason.FAILURE, Reason.LOST) and status.posted_notice is None
    # All nodes might have received the signal that makes one leave.
    shared = event.end.reason is Reason.DEPARTED
    stop = steps.StopWorkers(SIGTERM, restarts=True, failed=failed, shared=shared)
    if status.checks_node and event.end.cause is not None and event.end.cause.is_of(status.failure):
        line = warning(_log_round_end(event, "this node will be checked before it rejoins"))
        checking = status.anew(Phase.CHECKING, status.round)._replace(stopping=SIGTERM)
        return checking, (line, stop._replace(ends_all=True))
    line = warning(_log_round_end(event, _next_round(event.end)))
    join = steps.RequestJoin(event.keeps_place)
    return status.anew(Phase.FORMING, status.round)._replace(stopping=SIGTERM), (line, join, stop)


def _log_round_end(event: messages.RoundEnded, then: str) -> str:
    over = event.end
    why = _REASONS[over.reason](over) if over.cause is None else over.cause.headline
    return f"round {over.round} ended: {why}; {then}"


def _next_round(end: RoundEnd) -> str:
    which = f" (restart {end.restarts})" if end.restarts.allowed else ""
    if not end.missing_nodes:
        return f"restarting the workers{which}"
    nodes = "node has" if end.missing_nodes == 1 else "nodes have"
    return f"the workers are stopped until {end.missing_nodes} more {nodes} joined{which}"


_REASONS: dict[Reason, Callable[[RoundEnd], str]] = {
    Reason.FAILURE: lambda end: f"{end.node or 'a node'} failed",
    Reason.LOST: lambda end: f"{end.node or 'a node'} was lost" + (f" ({end.detail})" if end.detail else ""),
    Reason.DEPARTED: lambda end: f"{end.node or 'a node'} left" + (f" ({end.detail})" if end.detail else ""),
    Reason.GAVE_UP: lambda end: f"{end.node or 'a node'} gave up",
    Reason.REQUESTED: lambda end: f"{end.node} requested a restart",
    Reason.DRAINED: lambda end: end.detail or end.reason.value,
    Reason.FORGOTTEN: lambda end: end.reason.value,
}
"""Texts on why a round ended without a failed worker."""

# Workers


def _on_workers_succeeded(status: PolicyState, _event: steps.WorkersSucceeded) -> Decision:
    # Workers that finished need no notice.
    consent = (_drain(status),) if status.posted_notice is not None and not status.posted_notice.ready else ()
    return status._replace(phase=Phase.FINISHED, posted_notice=None), (Succeed(status.round), *consent)


def _on_workers_failed(status: PolicyState, event: steps.WorkersFailed) -> Decision:
    if status.held_failure is not None:
        return status, ()
    if status.leave_signal and event.cause.exitcode in exit_codes_of(status.leave_signal):
        return leave_job(status, status.leave_signal)
    if event.shared_signals - FORWARDED_SIGNALS and not status.leave_signal:
        return status._replace(held_failure=event), (SetTimer(Timer.SIGNAL, _SIGNAL_COMES),)
    return _fail(status, event)


def _on_workers_fenced(status: PolicyState, _event: steps.WorkersFenced) -> Decision:
    text = "the control plane was silent for a whole lease; the workers were killed (--fence)"
    return status._replace(phase=Phase.BROKEN, held_failure=None), (warning(text), Drain(status.round))


def _fail(status: PolicyState, event: steps.WorkersFailed) -> Decision:
    broken = status._replace(phase=Phase.BROKEN, failure=event.cause, held_failure=None)
    return broken, (Fail(status.round, event.cause, event.max_restarts),)


def _on_timer(status: PolicyState, event: TimerFired) -> Decision:
    if event.timer is Timer.SIGNAL and status.held_failure is not None:
        return _fail(status, status.held_failure)
    if event.timer is Timer.NOTICE and status.leave_signal:  # at the deadline a leaving node stops waiting
        return leave_job(status, status.leave_signal)
    return status, ()


# End of the agent


def _on_job_ended(status: PolicyState, event: JobEnded) -> Decision:
    spare = f"the job has {event.verdict.outcome.value}; this spare was not needed"
    return end(
        status,
        steps.End(event),
        *((warning(spare),) if event.is_spare else ()),
        failed=event.verdict.outcome is Outcome.FAILED and status.posted_notice is None,
    )


def _on_refused(status: PolicyState, event: messages.JoinRefused) -> Decision:
    return end(status, steps.End(event))


def _succeed_without_verdict(status: PolicyState, event: LinkLost) -> Decision:
    line = warning(f"{event.detail}; all workers on this node had succeeded")
    return end(status, steps.End(JobEnded(Verdict(Outcome.SUCCEEDED))), line)


def _on_link_lost(status: PolicyState, event: LinkLost) -> Decision:
    failure = status.failure or (status.held_failure and status.held_failure.cause)
    if failure is not None:  # the link's failure must not hide the workers' failure
        line = warning(f"{event.detail}; this node is ending the job with the failure of its own workers")
        verdict = Verdict(Outcome.FAILED, failure, ending=Ending.INFRASTRUCTURE)  # as on the nodes that keep running
        return end(status, steps.End(JobEnded(verdict)), line, failed=True)
    return end(status, steps.End(event))


def _on_signal(status: PolicyState, event: SignalArrived) -> Decision:
    number = event.number
    if number in FORWARDED_SIGNALS:
        return status, (steps.ForwardSignal(number),)
    if number == SIGTERM and status.leave_signal:
        return status, ()
    if number == SIGTERM and status.can_notify_workers:
        return notify_before_leaving(status, min(status.notice_timeout, event.notice))
    return leave_job(status._replace(interrupted=number in INTERRUPTS), number)


# Link to the other nodes


def _on_link_down(status: PolicyState, event: LinkDown) -> Decision:
    if status.link_down:
        return status, ()
    then = "this node waits until it is back" if status.phase is Phase.FORMING else "the workers keep running"
    lines = (warning(f"{event.detail}; {then}"),) if _is_told(event.brief) else ()
    return status._replace(link_down=True), lines


def _is_told(brief: int) -> bool:
    """Whether to log the loss or return of a session after this many short losses: the 1st, 2nd, 4th, ..."""
    return brief & (brief - 1) == 0


def _on_link_up(status: PolicyState, event: messages.LinkUp) -> Decision:
    again = (steps.RequestJoin(),) if event.join_lost and status.phase is Phase.FORMING else ()
    if not status.link_down:
        return status, again
    lines = (warning("the control plane is reachable again"),) if _is_told(event.brief) else ()
    return status._replace(link_down=False), (*lines, *again)


def _on_progress_text(status: PolicyState, event: messages.ProgressText) -> Decision:
    if status.stopping:  # this node is still waiting for its own workers
        return status, ()
    text = event.text
    if event.is_short and status.ended_with_0:
        from rallypoint.agent.ends import WAITING_IN_VAIN

        text += WAITING_IN_VAIN
    return status, (steps.LogLine(text, warning=event.warning),)


# Notices to workers


def _drain_before_start(status: PolicyState, event: messages.NodesWaiting) -> Decision:
    """Drain a round for waiting nodes before its workers start: no worker has anything to save."""
    pending = status.pending_placement
    if pending is None or pending.round != event.round or not event.waiting:
        return status, ()
    line = steps.LogLine(_log_new_nodes(event, pending.group_rank))
    return status, (line, Drain(pending.round, needs_consent=status.notice_timeout > 0))


def _on_waiting(status: PolicyState, event: messages.NodesWaiting) -> Decision:
    """Drain the round, since nodes are waiting to join. If the workers get notices, first ask them to save."""
    if event.round != status.round:
        return status, ()
    if not event.waiting:
        if status.posted_notice is None or status.posted_notice.reason != SCALE:
            return status, ()
        return status._replace(posted_notice=None), (steps.WithdrawNotice(),)
    if (not status.notice_timeout and status.posted_notice is None) or status.phase is not Phase.RUNNING:
        return status, (steps.LogLine(_log_new_nodes(event, status.group_rank)), _drain(status))
    if status.posted_notice is not None:
        return status, ()
    who = join_names(event.names) or f"{event.waiting} more"
    wait = "waits" if event.waiting == 1 else "wait"
    line = steps.LogLine(f"{who} {wait} to join; the workers have {status.notice_timeout:g} s to save and acknowledge")
    return status._replace(posted_notice=PostedNotice(SCALE)), (
        line,
        steps.PostNotice(SCALE, "", status.notice_timeout),
    )


def _on_nodes_succeeded(status: PolicyState, event: messages.NodesSucceeded) -> Decision:
    ranks = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in event.succeeded[:_SHOWN])
    more = ", ..." if len(event.succeeded) > _SHOWN else ""
    return status, (steps.LogLine(f"nodes that succeeded in round {event.round}: {ranks}{more}", warning=False),)


def _log_new_nodes(event: messages.NodesWaiting, group_rank: int) -> str:
    nodes = f"{event.waiting} new node{'' if event.waiting == 1 else 's'}"
    names = f" with {join_names(event.names)}" if event.names else ""
    return f"Detected {nodes} from group_rank={group_rank}; will restart worker group{names}"


def _drain(status: PolicyState) -> Drain:
    """Drain the round; if workers get notices, this is the node's consent."""
    return Drain(status.round, needs_consent=status.notice_timeout > 0 or status.posted_notice is not None)


def _on_node_preempted(status: PolicyState, event: messages.Preempted) -> Decision:
    """Ask the workers to save: a node will be taken away."""
    if event.round != status.round or status.leave_signal:
        return status, ()
    if status.phase is not Phase.RUNNING or (status.posted_notice is not None and status.posted_notice.ready):
        return status._replace(posted_notice=PostedNotice(PREEMPTION, ready=True)), (_drain(status),)
    why = event.why or "is being preempted"
    line = warning(f"{event.node} {why}; the workers have {event.seconds:g} s to save and acknowledge")
    return status._replace(posted_notice=PostedNotice(PREEMPTION)), (
        line,
        steps.PostNotice(PREEMPTION, event.node, event.seconds),
    )


def _on_workers_ready(status: PolicyState, event: steps.WorkersReady) -> Decision:
    """Consent: all workers of this node saved, or the deadline passed."""
    if status.posted_notice is None or status.posted_notice.ready:
        return status, ()
    if status.leave_signal and event.is_late:  # this node leaves now, but the others must not count it as saved
        return status, ()
    return status._replace(posted_notice=status.posted_notice._replace(ready=True)), (_drain(status),)


def _on_drain(status: PolicyState, event: steps.DrainArrived) -> Decision:
    """Leave because an operator drains this node."""
    if status.leave_signal:
        return status, ()
    drained = status._replace(drained_by=event.by)
    if event.notice and status.phase is Phase.RUNNING and status.held_failure is None:
        return notify_before_leaving(drained, event.notice)
    return leave_job(drained, SIGTERM)


# After the end is decided


def _on_final_stop(status: PolicyState, event: steps.WorkersStopped) -> Decision:
    assert status.final_step is not None, "an agent that ends knows how"
    if event.waiting:  # the stop was complete when the end was decided
        cause = status.final_step.event
        number = cause.number if isinstance(cause, SignalArrived) else SIGTERM
        return status._replace(stopping=number), (steps.StopWorkers(number, failed=True),)
    ended = status._replace(ended_with_0=event.ended_with_0)
    return take_final_step(ended, status.final_step, in_order=event.ended_in_order)


def _on_left(status: PolicyState, event: LeaveReply) -> Decision:
    assert status.final_step is not None, "an agent that leaves knows how"
    if event.goes_on:
        more = f"continues on {event.others} other node{'s' if event.others > 1 else ''}"
        return status._replace(final_step=status.final_step._replace(standing=more)), ()
    succeeded = "has succeeded" if event.outcome is Outcome.SUCCEEDED else ""
    return status._replace(phase=Phase.ENDED), (status.final_step._replace(standing=succeeded),)


def _on_timer_when_leaving(status: PolicyState, event: TimerFired) -> Decision:
    assert status.final_step is not None, "an agent that leaves knows how"
    if event.timer is Timer.QUERY:
        return status, _query_standing(status)
    return (status._replace(phase=Phase.ENDED), (status.final_step,)) if event.timer is Timer.LEAVE else (status, ())


def _leave_without_answer(status: PolicyState, _event: steps.Event) -> Decision:
    """Leave without knowing the state of the job: it can no longer be learned, or the agent does not wait for it."""
    assert status.final_step is not None, "an agent that leaves knows how"
    last = status.final_step._replace(standing="")
    return status._replace(phase=Phase.ENDED), (last._replace(unasked=_UNKNOWN) if last.drained_by else last,)


def _on_signal_when_ending(status: PolicyState, event: SignalArrived) -> Decision:
    if event.number in FORWARDED_SIGNALS:
        return status, (steps.ForwardSignal(event.number),)
    if event.number not in INTERRUPTS:
        return status, ()
    if status.interrupted:
        return status, (steps.KillWorkers(),)
    told = steps.LogLine("the workers are being stopped; another interrupt will kill them at once", warning=True)
    return status._replace(interrupted=True), (told,)


def _on_signal_when_leaving(status: PolicyState, event: SignalArrived) -> Decision:
    return (status, ()) if event.number in FORWARDED_SIGNALS | {SIGTERM} else _leave_without_answer(status, event)


# Table of rules. An event not listed for a phase changes nothing

_ANYWHERE: dict[type, Callable[..., Decision]] = {
    JobEnded: _on_job_ended,
    LinkLost: _on_link_lost,
    LinkDown: _on_link_down,
    messages.LinkUp: _on_link_up,
    messages.NodesSucceeded: _on_nodes_succeeded,
    SignalArrived: _on_signal,
    steps.DrainArrived: _on_drain,
}
"""Rules until the end of the agent is decided."""

_STARTED: dict[type, Callable[..., Decision]] = _ANYWHERE | {
    messages.RoundEnded: _on_round_ended,
    messages.NodesWaiting: _on_waiting,
    messages.Preempted: _on_node_preempted,
    TimerFired: _on_timer,
}
"""Rules while a round's workers are running, or ended in it."""

_RULES: dict[Phase, dict[type, Callable[..., Decision]]] = {
    Phase.CHECKING: _ANYWHERE
    | {
        messages.RoundEnded: _note_round,
        steps.WorkersStopped: _check_once_stopped,
        steps.NodeChecked: _on_node_checked,
    },
    Phase.FORMING: _ANYWHERE
    | {
        messages.Placed: _on_placed,
        messages.RoundEnded: _on_missed_round,
        messages.JoinRefused: _on_refused,
        messages.NodesWaiting: _drain_before_start,
        messages.ProgressText: _on_progress_text,
        steps.WorkersStopped: _on_workers_stopped,
    },
    Phase.RUNNING: _STARTED
    | {
        steps.WorkersSucceeded: _on_workers_succeeded,
        steps.WorkersFailed: _on_workers_failed,
        steps.WorkersFenced: _on_workers_fenced,
        steps.WorkersReady: _on_workers_ready,
    },
    Phase.BROKEN: _STARTED,
    Phase.FINISHED: _STARTED | {LinkLost: _succeed_without_verdict},
    Phase.ENDING: {
        steps.WorkersStopped: _on_final_stop,
        SignalArrived: _on_signal_when_ending,
    },
    Phase.LEAVING: {
        LeaveReply: _on_left,
        TimerFired: _on_timer_when_leaving,
        SignalArrived: _on_signal_when_leaving,
        LinkDown: _leave_without_answer,
        LinkLost: _leave_without_answer,
    },
    Phase.ENDED: {},
}
