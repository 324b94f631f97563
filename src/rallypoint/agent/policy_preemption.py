"""Decides what an agent does about a job that is preempted as a whole: workers save, then it ends. Pure; see `policy`.

Laws:

1. A node that is notified tells the coordinator, and notifies its own workers at once; the coordinator tells the
   others.
2. From then on only the verdict ends the job: changes of membership do not, and no failure restarts it.
3. A node that knows of it ends so, whatever happens to the control plane. If no verdict has arrived some time after the
   workers' time is over, none will.
4. Workers that have acknowledged have saved and not finished, whatever their exit code; those that end with success
   without acknowledging are done.
5. No workers are started any more: a node with a place that has not begun consents at once.
6. SIGTERM means that the time is over. The node then ends, and requeues nothing: the user may have cancelled the job.
"""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGTERM

from rallypoint.agent import steps
from rallypoint.agent.policy_notices import drain
from rallypoint.agent.policy_state import (
    INTERRUPTS,
    LEAVES,
    STARTED,
    Decision,
    Phase,
    PolicyState,
    PostedNotice,
    end,
    leave_job,
    warning,
)
from rallypoint.agent.signal_set import FORWARDED_SIGNALS
from rallypoint.failures.cause import Ending
from rallypoint.membership.operations import Drain, PreemptJob, Succeed
from rallypoint.membership.state import Outcome, Verdict
from rallypoint.notices import PREEMPTION
from rallypoint.protocol import messages
from rallypoint.protocol.messages import LeaveRequest

_WITHOUT_WORKERS = frozenset({Phase.FORMING, Phase.CHECKING})


def on_requested(status: PolicyState, event: steps.PreemptionRequested) -> Decision:
    """This node was told that the whole job will be taken away."""
    if status.preemption or status.phase in LEAVES:
        return status, ()
    status = status._replace(preemption=f"this node {event.why}")
    tell = PreemptJob(event.seconds, event.why)
    if status.phase in _WITHOUT_WORKERS:
        line = warning(f"this node {event.why}: the job is preempted; no workers run here")
        return status._replace(pending_placement=None), (line, tell, steps.AwaitVerdict(0.0))
    status, then = _ask_workers(status, "this node", "", event.seconds, event.why)
    return status, (tell, *then)


def on_job_preempted(status: PolicyState, event: messages.Preempted) -> Decision:
    """A node was told that the whole job will be taken away; it may be this one."""
    if status.phase in _WITHOUT_WORKERS:  # it has a place in a round whose workers it will never start
        line = warning(f"{event.node} {event.why}: the job is preempted; no workers run here")
        forming = status._replace(preemption=f"{event.node} {event.why}", pending_placement=None)
        return forming, (line, steps.AwaitVerdict(event.seconds), Drain(event.round, needs_consent=True))
    if status.phase not in STARTED or event.round != status.round:
        return status, ()
    known, status = status.preemption, status._replace(preemption=f"{event.node} {event.why}")
    return (status, ()) if known else _ask_workers(status, event.node, event.node, event.seconds, event.why)


def _ask_workers(status: PolicyState, who: str, node: str, seconds: float, why: str) -> Decision:
    line = warning(f"{who} {why}: the job is preempted; the workers have {seconds:g} s to save and acknowledge")
    wait = steps.AwaitVerdict(seconds)
    if status.phase is not Phase.RUNNING:
        return status, (line, wait)
    if status.posted_notice is not None and status.posted_notice.ready:
        return status._replace(posted_notice=PostedNotice(PREEMPTION, ready=True)), (line, wait, drain(status))
    post = steps.PostNotice(PREEMPTION, node, seconds)
    return status._replace(posted_notice=PostedNotice(PREEMPTION)), (line, wait, post)


def _on_workers_ready(status: PolicyState, event: steps.WorkersReady) -> Decision:
    if status.phase is not Phase.RUNNING or status.posted_notice is None or status.posted_notice.ready:
        return status, ()
    late = (warning("not all workers of this node have acknowledged in time"),) if event.is_late else ()
    posted = status.posted_notice._replace(ready=True, is_late=event.is_late)
    return status._replace(posted_notice=posted), (*late, drain(status))


def _on_workers_succeeded(status: PolicyState, event: steps.WorkersSucceeded) -> Decision:
    if status.phase is not Phase.RUNNING:
        return status, ()
    posted = status.posted_notice
    if not event.acknowledged and not (posted is not None and posted.ready and not posted.is_late):
        return status._replace(phase=Phase.FINISHED, posted_notice=None), (Succeed(status.round),)
    saved = status._replace(phase=Phase.FINISHED, posted_notice=PostedNotice(PREEMPTION, ready=True))
    return saved, () if posted is not None and posted.ready else (drain(status),)


def _on_job_ended(status: PolicyState, event: messages.JobEnded) -> Decision:
    posted = status.posted_notice
    saved = None if posted is None else posted.ready and not posted.is_late
    requeue = (steps.RequeueJob(),) if event.is_delegate else ()
    failed = event.verdict.outcome is Outcome.FAILED
    return end(status, steps.EndWithVerdict(event, saved), *requeue, failed=failed and posted is None)


def _without_verdict(status: PolicyState, *before: steps.Step) -> Decision:
    verdict = Verdict(Outcome.STOPPED, detail=status.preemption, ending=Ending.PREEMPTED)
    ending, then = _on_job_ended(status, messages.JobEnded(verdict))
    return ending, (*before, *then)


def _on_verdict_timed_out(status: PolicyState, _event: steps.VerdictTimedOut) -> Decision:
    line = warning("the end of the preempted job was not announced in time; this node ends by itself")
    return _without_verdict(status, line, steps.RequeueJob())


def _on_refused(status: PolicyState, event: messages.JoinRefused) -> Decision:
    if status.phase is not Phase.FORMING:
        return status, ()
    return _without_verdict(status, warning(f"the job is preempted, and this node has no place in it: {event.detail}"))


def _on_link_lost(status: PolicyState, event: messages.LinkLost) -> Decision:
    line = warning(f"{event.detail}; the job is preempted, and this node ends by itself")
    return _without_verdict(status, line, steps.RequeueJob())


def _on_signal(status: PolicyState, event: steps.SignalArrived) -> Decision:
    if event.number in FORWARDED_SIGNALS:
        return status, (steps.ForwardSignal(event.number),)
    if event.number != SIGTERM:
        return leave_job(status._replace(interrupted=event.number in INTERRUPTS), event.number)
    line = warning("Received SIGTERM before the end of the preempted job was announced; ending the workers")
    return _without_verdict(status, line, LeaveRequest())


def _ignore(status: PolicyState, _event: steps.Event) -> Decision:
    return status, ()


RULES: dict[type, Callable[..., Decision]] = {
    steps.WorkersReady: _on_workers_ready,
    steps.WorkersSucceeded: _on_workers_succeeded,
    steps.VerdictTimedOut: _on_verdict_timed_out,
    steps.SignalArrived: _on_signal,
    messages.JobEnded: _on_job_ended,
    messages.JoinRefused: _on_refused,
    messages.LinkLost: _on_link_lost,
    messages.NodesWaiting: _ignore,
    messages.Placed: _ignore,
    messages.DrainRequested: _ignore,
}
"""Rules that differ for a preempted job; for all other events the rules of `policy` apply."""
