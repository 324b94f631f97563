"""Decides what an agent does about an event. Pure: state and event in, next state and steps out.

    CHECKING the user's check of this node runs, or will when the workers of the previous round are gone
    FORMING waits for a placement; the workers of the previous round may still be stopping
    RUNNING   its workers run
    BROKEN its workers have failed, which was announced; waits for the end of the round or the job
    FINISHED  its workers have all succeeded; waits for the others (the exit barrier)
    ENDING its end is decided; its workers are being stopped
    LEAVING   a signal ends it, and its workers have ended in order; queries whether the job goes on without it
    ENDED     nothing more happens

Laws:

1. A failure is announced before anything is stopped, so that all nodes stop at the same time.
2. The next round is requested before the workers of the last one are stopped: it forms while they stop.
3. Workers are started only for a placement, and only after those of the previous round are gone, or have left it and
   wait: a placement that arrives while they stop is kept until then, and dropped if its round ends first.
4. Only a verdict, a signal or the loss of the rendezvous ends the agent; other nodes leaving never does.
5. Notifications of past rounds change nothing; after a missed round of ours, the agent joins again.
6. One stop at a time: an event while workers stop adds a leave request or a signal to it, never another stop. If the
   agent ends while they stop for a restart, no worker goes on in its process: those that would are stopped at once.
7. The last step is taken when no worker is left, including those that wait for a next round, which have a grace period
   like any other. That step is decided once, by the first event that ends the agent.
8. A signal that ends this agent makes it leave at any moment, announced at once; only if workers are given notice,
   SIGTERM first gives them its time. A second interrupt kills.
9. After a failure, or the loss of a node, workers have the short grace period, unless a notice has asked them to save.
10. Workers are given notice while all of them run; the round is drained when they consent or their time is over.
11. A worker that ends by a signal that this agent was sent too was stopped and has not failed, whichever is seen first.
12. To leave by SIGTERM a job that goes on elsewhere, with workers that end in order, is a success. The job must be seen
    to go on for a moment, because all its nodes may be ending.
13. Workers that the fence has killed have not failed: their round is drained, at no cost to the restarts.
14. If the user has a check of the node, no place is requested before it has passed: at first, and after a round that
    was ended by a failure of this node's own workers, once these are gone: none goes on in its process, since the check
    may need its devices. If it does not pass, the node leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGTERM

from rallypoint.agent import policy_notices, steps
from rallypoint.agent.policy_notices import drain
from rallypoint.agent.policy_state import (
    INTERRUPTS,
    Decision,
    Phase,
    PolicyState,
    end,
    leave_job,
    notify_before_leaving,
    start_workers,
    warning,
)
from rallypoint.agent.signal_set import FORWARDED_SIGNALS
from rallypoint.base.light_typing import get_args
from rallypoint.base.signals import exit_codes_of
from rallypoint.failures.cause import Ending
from rallypoint.membership.operations import Drain, Fail, Succeed
from rallypoint.membership.state import Outcome, Reason, RoundEnd, Verdict
from rallypoint.protocol import messages
from rallypoint.protocol.messages import LeaveRequest


def begin(status: PolicyState) -> Decision:
    """The initial state of an agent, and its first step."""
    if status.checks_node:
        return status._replace(phase=Phase.CHECKING), (steps.CheckNode(),)
    return status, (steps.RequestJoin(),)


def decide(status: PolicyState, event: steps.Event) -> Decision:
    """Decide what follows from `event` in the state `status`: the next state, and the steps to take."""
    if status.phase is Phase.ENDED:
        return status, ()
    rules = _RULES
    if status.phase in (Phase.ENDING, Phase.LEAVING):
        from rallypoint.agent.policy_ending import RULES_BY_PHASE

        rules = RULES_BY_PHASE[status.phase]
    elif status.preemption:
        from rallypoint.agent.policy_preemption import RULES

        rules = _RULES | RULES
    rule = rules.get(type(event))
    return (status, ()) if rule is None else rule(status, event)


# The rounds


def _on_placed(status: PolicyState, event: messages.Placed) -> Decision:
    if status.phase is not Phase.FORMING:
        return status, ()
    if not status.stopping:
        return start_workers(status, event.placement)
    return status._replace(pending_placement=event.placement), ()


def _on_workers_stopped(status: PolicyState, event: steps.WorkersStopped) -> Decision:
    gone = status._replace(stopping=0, pending_placement=None, waiting=event.waiting)
    if status.phase is Phase.CHECKING:
        return gone, (steps.CheckNode(),)
    if not status.stopping or status.pending_placement is None:
        return gone, ()
    return start_workers(gone, status.pending_placement)


def _on_node_checked(status: PolicyState, event: steps.NodeChecked) -> Decision:
    if status.phase is not Phase.CHECKING:
        return status, ()
    if event.failure:
        return status._replace(phase=Phase.ENDED), (LeaveRequest(), steps.EndUnfit(event.failure))
    return status._replace(phase=Phase.FORMING), (steps.RequestJoin(),)


def _on_round_ended(status: PolicyState, event: messages.RoundEnded) -> Decision:
    over = event.end.round
    if status.phase is Phase.CHECKING:
        return status._replace(round=max(over, status.round)), ()
    if status.phase is Phase.FORMING:
        # Our own round ended before we knew our place in it, or could take it: join the next.
        missed = over > status.round if status.pending_placement is None else over >= status.pending_placement.round
        return (status._replace(round=over, pending_placement=None), (steps.RequestJoin(),)) if missed else (status, ())
    if over != status.round:
        return status, ()
    if status.leave_signal:
        ending, then = leave_job(status, status.leave_signal, saved=event.end.reason is Reason.DRAINED)
        return ending, (warning(_log_round_end(event, "this node leaves")), *then)
    failed = event.end.reason in (Reason.FAILURE, Reason.LOST) and status.posted_notice is None
    # A signal that makes one node leave may have been sent to all.
    shared = event.end.reason is Reason.DEPARTED
    stop = steps.StopWorkers(SIGTERM, restarts=True, failed=failed, shared=shared)
    if status.checks_node and event.end.cause is not None and event.end.cause.is_of(status.failure):
        line = warning(_log_round_end(event, "this node is checked before it comes back"))
        checking = status.anew(Phase.CHECKING, status.round)._replace(stopping=SIGTERM)
        return checking, (line, stop._replace(ends_all=True))
    line = warning(_log_round_end(event, _next_round(event.end)))
    return status.anew(Phase.FORMING, status.round)._replace(stopping=SIGTERM), (line, steps.RequestJoin(), stop)


def _log_round_end(event: messages.RoundEnded, then: str) -> str:
    over = event.end
    why = _REASONS[over.reason](over) if over.cause is None else over.cause.headline
    return f"round {over.round} is over: {why}; {then}"


def _next_round(end: RoundEnd) -> str:
    which = f" (restart {end.restarts})" if end.restarts.allowed else ""
    if not end.missing_nodes:
        return f"the workers are restarted{which}"
    nodes = "node has" if end.missing_nodes == 1 else "nodes have"
    return f"the workers are stopped until {end.missing_nodes} more {nodes} come{which}"


_REASONS: dict[Reason, Callable[[RoundEnd], str]] = {
    Reason.FAILURE: lambda end: f"{end.node or 'a node'} has failed",
    Reason.LOST: lambda end: f"{end.node or 'a node'} was lost" + (f" ({end.detail})" if end.detail else ""),
    Reason.DEPARTED: lambda end: f"{end.node or 'a node'} has left",
    Reason.GAVE_UP: lambda end: f"{end.node or 'a node'} has given up",
    Reason.REQUESTED: lambda end: f"{end.node} asks for a restart",
    Reason.DRAINED: lambda end: end.detail or end.reason.value,
    Reason.FORGOTTEN: lambda end: end.reason.value,
}
"""Texts for why a round ended if no worker failed."""

# The workers


def _on_workers_succeeded(status: PolicyState, _event: steps.WorkersSucceeded) -> Decision:
    if status.phase is not Phase.RUNNING:
        return status, ()
    # Workers that are done need no notice.
    consent = (drain(status),) if status.posted_notice is not None and not status.posted_notice.ready else ()
    return status._replace(phase=Phase.FINISHED, posted_notice=None), (Succeed(status.round), *consent)


def _on_workers_failed(status: PolicyState, event: steps.WorkersFailed) -> Decision:
    if status.phase is not Phase.RUNNING or status.held_failure is not None:
        return status, ()
    if status.leave_signal and event.cause.exitcode in exit_codes_of(status.leave_signal):
        return leave_job(status, status.leave_signal)
    if event.shared_signals - FORWARDED_SIGNALS and not status.leave_signal:
        return status._replace(held_failure=event), (steps.AwaitSignal(),)
    return _fail(status, event)


def _on_workers_fenced(status: PolicyState, _event: steps.WorkersFenced) -> Decision:
    if status.phase is not Phase.RUNNING:
        return status, ()
    text = "nothing was heard from the control plane for the lease: the workers have been ended (--fence)"
    return status._replace(phase=Phase.BROKEN, held_failure=None), (warning(text), Drain(status.round))


def _fail(status: PolicyState, event: steps.WorkersFailed) -> Decision:
    broken = status._replace(phase=Phase.BROKEN, failure=event.cause, held_failure=None)
    return broken, (Fail(status.round, event.cause, event.max_restarts),)


def _on_signal_timed_out(status: PolicyState, _event: steps.SignalTimedOut) -> Decision:
    return (status, ()) if status.held_failure is None else _fail(status, status.held_failure)


# The end


def _on_job_ended(status: PolicyState, event: messages.JobEnded) -> Decision:
    return end(
        status,
        steps.EndWithVerdict(event),
        *((steps.RequeueJob(),) if event.is_delegate else ()),
        failed=event.verdict.outcome is Outcome.FAILED and status.posted_notice is None,
    )


def _on_refused(status: PolicyState, event: messages.JoinRefused) -> Decision:
    return end(status, steps.EndWithError(event)) if status.phase is Phase.FORMING else (status, ())


def _on_link_lost(status: PolicyState, event: messages.LinkLost) -> Decision:
    if status.phase is Phase.FINISHED:
        return end(
            status,
            steps.EndInSuccess(),
            warning(f"{event.detail}; this node's workers had all succeeded"),
        )
    failure = status.failure or (status.held_failure and status.held_failure.cause)
    if failure is not None:  # the failure of the line must not hide that of the workers
        line = warning(f"{event.detail}; the job ends here with the failure of this node's workers")
        verdict = Verdict(Outcome.FAILED, failure, ending=Ending.INFRASTRUCTURE)  # as on the nodes that keep running
        return end(status, steps.EndWithVerdict(messages.JobEnded(verdict)), line, failed=True)
    return end(status, steps.EndWithError(event))


def _on_signal(status: PolicyState, event: steps.SignalArrived) -> Decision:
    number = event.number
    if number in FORWARDED_SIGNALS:
        return status, (steps.ForwardSignal(number),)
    if number == SIGTERM and status.leave_signal:
        return status, ()
    if number == SIGTERM and status.can_notify_workers:
        return notify_before_leaving(status, "Received SIGTERM", event.notice)
    return leave_job(status._replace(interrupted=number in INTERRUPTS), number)


def _on_preempted(status: PolicyState, event: messages.Preempted) -> Decision:
    if not event.whole_job:
        if status.preemption:
            return status, ()
        return policy_notices.on_preempted(status, event)
    from rallypoint.agent.policy_preemption import on_job_preempted

    return on_job_preempted(status, event)


def _on_preemption_requested(status: PolicyState, event: steps.PreemptionRequested) -> Decision:
    from rallypoint.agent.policy_preemption import on_requested

    return on_requested(status, event)


# The link to the other nodes


def _on_link_down(status: PolicyState, event: messages.LinkDown) -> Decision:
    if status.link_down:
        return status, ()
    then = "this node waits for it to come back" if status.phase is Phase.FORMING else "the running workers continue"
    return status._replace(link_down=True), (warning(f"{event.detail}; {then}"),)


def _on_link_up(status: PolicyState, event: messages.LinkUp) -> Decision:
    again = (steps.RequestJoin(),) if event.join_lost and status.phase is Phase.FORMING else ()
    if not status.link_down:
        return status, again
    return status._replace(link_down=False), (
        warning("the control plane is reachable again"),
        *again,
    )


def _on_progress_text(status: PolicyState, event: messages.ProgressText) -> Decision:
    if status.phase is not Phase.FORMING or status.stopping:  # then this node waits for its own workers
        return status, ()
    return status, (steps.LogLine(event.text, warning=event.warning, live=event.live),)


def _on_differs(status: PolicyState, event: messages.ConfigDiffers) -> Decision:
    lines = (f"{each.sentence('this node')}; give all nodes of a job the same" for each in event.differences)
    return status, tuple(warning(each) for each in lines)


def _on_operator_action(status: PolicyState, event: messages.OperatorAction) -> Decision:
    return status, (warning(event.text),)


def _on_report_requested(status: PolicyState, _event: messages.ReportRequested) -> Decision:
    return status, (steps.ReportStatus(),)


def _on_collect_requested(status: PolicyState, event: messages.CollectRequested) -> Decision:
    return status, (steps.Collect(event),)


def _on_hang(status: PolicyState, event: messages.HangNotification) -> Decision:
    from rallypoint.agent.policy_hang import on_hang

    return on_hang(status, event)


_RULES: dict[type, Callable[..., Decision]] = {
    messages.Placed: _on_placed,
    steps.WorkersStopped: _on_workers_stopped,
    steps.NodeChecked: _on_node_checked,
    messages.RoundEnded: _on_round_ended,
    messages.NodesWaiting: policy_notices.on_waiting,
    messages.Preempted: _on_preempted,
    steps.WorkersReady: policy_notices.on_workers_ready,
    steps.NoticeExpired: policy_notices.on_notice_expired,
    steps.WorkersSucceeded: _on_workers_succeeded,
    steps.WorkersFailed: _on_workers_failed,
    steps.WorkersFenced: _on_workers_fenced,
    steps.SignalTimedOut: _on_signal_timed_out,
    messages.JobEnded: _on_job_ended,
    messages.JoinRefused: _on_refused,
    messages.LinkLost: _on_link_lost,
    steps.SignalArrived: _on_signal,
    steps.PreemptionRequested: _on_preemption_requested,
    messages.LinkDown: _on_link_down,
    messages.LinkUp: _on_link_up,
    messages.ConfigDiffers: _on_differs,
    messages.ProgressText: _on_progress_text,
    messages.DrainRequested: policy_notices.on_drain_requested,
    messages.OperatorAction: _on_operator_action,
    messages.ReportRequested: _on_report_requested,
    messages.CollectRequested: _on_collect_requested,
    **dict.fromkeys(get_args(messages.HangNotification), _on_hang),
}
"""Events that are not listed here change nothing."""
