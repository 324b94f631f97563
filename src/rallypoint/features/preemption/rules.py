"""A node's rules when the whole job is preempted: its workers save, then it ends. Pure.

Laws:

1. A notified node informs the coordinator, and notifies its own workers at once; the coordinator informs the other
   nodes.
2. From then on, only the verdict ends the job: membership changes do not, and no failure restarts it.
3. A notified node ends as preempted, whatever happens to the control plane. If no verdict arrives soon after the
   workers' deadline, none will.
4. Workers that acknowledged have saved but not finished, whatever their exit code; workers that succeed without
   acknowledging are done.
5. No more workers start: a node with a place in a round that it has not started consents at once.
6. SIGTERM means that the time is up. The node then ends without a requeue, because the user might have cancelled the
   job.
"""

from __future__ import annotations

from signal import SIGTERM

from rallypoint.agent import steps
from rallypoint.agent.policy import (
    INTERRUPTS,
    LEAVES,
    STARTED,
    Decision,
    Phase,
    PolicyState,
    PostedNotice,
    Rule,
    end,
    leave_job,
    warning,
)
from rallypoint.agent.signals import FORWARDED_SIGNALS
from rallypoint.agent.steps import FeatureEvent, FeatureStep, SetTimer, SignalArrived, Timer, TimerFired
from rallypoint.base.light_dataclasses import dataclass
from rallypoint.control.membership.state import Drain, Outcome, PreemptJob, Succeed, Verdict
from rallypoint.control.protocol import messages
from rallypoint.control.protocol.messages import JobEnded, LeaveRequest, LinkLost
from rallypoint.failures.cause import Ending
from rallypoint.notices import PREEMPTION

NOTED = "preemption"
"""Key in `PolicyState.noted` of the notified node, and how it was notified."""
_VERDICT_COMES = 5.0
"""Seconds for the verdict to arrive after the workers' deadline. It takes a moment, or a lease if a node or the control
plane was lost."""
_WITHOUT_WORKERS = frozenset({Phase.FORMING, Phase.CHECKING})


@dataclass(frozen=True, slots=True)
class PreemptionRequested(FeatureEvent):
    """This node was notified that the whole job will be preempted, as `why` describes ("received SIGUSR2").

    The workers have `seconds` to save.
    """

    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class RequeueJob(FeatureStep):
    """Ask the scheduler to start the preempted job again, if requested."""


def _note(status: PolicyState, text: str) -> PolicyState:
    return status._replace(noted={**status.noted, NOTED: text})


def _consent(status: PolicyState) -> Drain:
    """This node's consent to end the round cleanly."""
    return Drain(status.round, needs_consent=True)


def _on_preemption_requested(status: PolicyState, event: PreemptionRequested) -> Decision:
    """Handle a notice to this node that the whole job will be preempted."""
    if NOTED in status.noted or status.phase in LEAVES:
        return status, ()
    status = _note(status, f"this node {event.why}")
    tell = PreemptJob(event.seconds, event.why)
    if status.phase in _WITHOUT_WORKERS:
        line = warning(f"this node {event.why}: the job is being preempted; no workers are running here")
        return status._replace(pending_placement=None), (line, tell, _await_verdict(0.0))
    status, then = _ask_workers(status, "this node", "", event.seconds, event.why)
    return status, (tell, *then)


def _on_job_preempted(status: PolicyState, event: messages.Preempted) -> Decision | None:
    """Handle a notice to a node, perhaps this one, that the whole job will be preempted."""
    if not event.whole_job:  # one node leaves, which no longer matters once the whole job ends
        return (status, ()) if NOTED in status.noted else None
    if status.phase in _WITHOUT_WORKERS:  # the node will never start its round's workers
        line = warning(f"{event.node} {event.why}: the job is being preempted; no workers are running here")
        forming = _note(status, f"{event.node} {event.why}")._replace(pending_placement=None)
        return forming, (line, _await_verdict(event.seconds), Drain(event.round, needs_consent=True))
    if status.phase not in STARTED or event.round != status.round:
        return status, ()
    known, status = NOTED in status.noted, _note(status, f"{event.node} {event.why}")
    return (status, ()) if known else _ask_workers(status, event.node, event.node, event.seconds, event.why)


def _await_verdict(seconds: float) -> SetTimer:
    return SetTimer(Timer.VERDICT, seconds + _VERDICT_COMES)


def _ask_workers(status: PolicyState, who: str, node: str, seconds: float, why: str) -> Decision:
    line = warning(f"{who} {why}: the job is being preempted; the workers have {seconds:g} s to save and acknowledge")
    wait = _await_verdict(seconds)
    if status.phase is not Phase.RUNNING:
        return status, (line, wait)
    if status.posted_notice is not None and status.posted_notice.ready:
        return status._replace(posted_notice=PostedNotice(PREEMPTION, ready=True)), (line, wait, _consent(status))
    post = steps.PostNotice(PREEMPTION, node, seconds)
    return status._replace(posted_notice=PostedNotice(PREEMPTION)), (line, wait, post)


def _on_workers_ready_preempted(status: PolicyState, event: steps.WorkersReady) -> Decision:
    if status.phase is not Phase.RUNNING or status.posted_notice is None or status.posted_notice.ready:
        return status, ()
    late = (warning("not all workers on this node acknowledged in time"),) if event.is_late else ()
    posted = status.posted_notice._replace(ready=True, is_late=event.is_late)
    return status._replace(posted_notice=posted), (*late, _consent(status))


def _on_workers_succeeded_preempted(status: PolicyState, event: steps.WorkersSucceeded) -> Decision:
    if status.phase is not Phase.RUNNING:
        return status, ()
    posted = status.posted_notice
    if not event.acknowledged and not (posted is not None and posted.ready and not posted.is_late):
        return status._replace(phase=Phase.FINISHED, posted_notice=None), (Succeed(status.round),)
    saved = status._replace(phase=Phase.FINISHED, posted_notice=PostedNotice(PREEMPTION, ready=True))
    return saved, () if posted is not None and posted.ready else (_consent(status),)


def _on_job_ended_preempted(status: PolicyState, event: JobEnded) -> Decision:
    posted = status.posted_notice
    saved = None if posted is None else posted.ready and not posted.is_late
    requeue = (RequeueJob(),) if event.is_delegate else ()
    failed = event.verdict.outcome is Outcome.FAILED
    return end(status, steps.End(event, saved=saved), *requeue, failed=failed and posted is None)


def _without_verdict(status: PolicyState, *before: steps.Step) -> Decision:
    verdict = Verdict(Outcome.STOPPED, detail=status.noted[NOTED], ending=Ending.PREEMPTED)
    ending, then = _on_job_ended_preempted(status, JobEnded(verdict))
    return ending, (*before, *then)


def _on_timer_preempted(status: PolicyState, event: TimerFired) -> Decision | None:
    if event.timer is not Timer.VERDICT:
        return None
    line = warning("the end of the preempted job was not announced in time, so this node is exiting on its own")
    return _without_verdict(status, line, RequeueJob())


def _on_refused_preempted(status: PolicyState, event: messages.JoinRefused) -> Decision:
    if status.phase is not Phase.FORMING:
        return status, ()
    return _without_verdict(
        status, warning(f"the job is being preempted, and this node has no place in it: {event.detail}")
    )


def _on_link_lost_preempted(status: PolicyState, event: LinkLost) -> Decision:
    line = warning(f"{event.detail}; the job is being preempted, so this node is exiting on its own")
    return _without_verdict(status, line, RequeueJob())


def _on_signal_preempted(status: PolicyState, event: SignalArrived) -> Decision:
    if event.number in FORWARDED_SIGNALS:
        return status, (steps.ForwardSignal(event.number),)
    if event.number != SIGTERM:
        return leave_job(status._replace(interrupted=event.number in INTERRUPTS), event.number)
    line = warning("Received SIGTERM before the end of the preempted job was announced; ending the workers")
    return _without_verdict(status, line, LeaveRequest())


def _ignore(status: PolicyState, _event: steps.Event) -> Decision:
    return status, ()


def _on_job_ended(status: PolicyState, event: JobEnded) -> Decision | None:
    """Requeue the ending job if this node must do so and knew of no preemption."""
    if not event.is_delegate:
        return None
    return end(
        status,
        steps.End(event),
        RequeueJob(),
        failed=event.verdict.outcome is Outcome.FAILED and status.posted_notice is None,
    )


_WHEN_PREEMPTED: dict[type, Rule] = {
    steps.WorkersReady: _on_workers_ready_preempted,
    steps.WorkersSucceeded: _on_workers_succeeded_preempted,
    TimerFired: _on_timer_preempted,
    SignalArrived: _on_signal_preempted,
    JobEnded: _on_job_ended_preempted,
    messages.JoinRefused: _on_refused_preempted,
    LinkLost: _on_link_lost_preempted,
    messages.NodesWaiting: _ignore,
    messages.Placed: _ignore,
    steps.DrainArrived: _ignore,
}
"""Rules that apply once the job is known to be preempted."""


def _once_preempted(rule: Rule, otherwise: Rule | None = None) -> Rule:
    def chosen(status: PolicyState, event: steps.Event) -> Decision | None:
        if NOTED in status.noted:
            return rule(status, event)
        return None if otherwise is None else otherwise(status, event)

    return chosen


RULES: dict[type, Rule] = {
    **{kind: _once_preempted(rule) for kind, rule in _WHEN_PREEMPTED.items()},
    JobEnded: _once_preempted(_on_job_ended_preempted, _on_job_ended),
    PreemptionRequested: _on_preemption_requested,
    messages.Preempted: _on_job_preempted,
}
