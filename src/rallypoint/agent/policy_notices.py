"""Decides what an agent does if its workers are given notice before a stop. Pure; the laws are in `policy`."""

from __future__ import annotations

from signal import SIGTERM

from rallypoint.agent import steps
from rallypoint.agent.policy_state import (
    LEAVES,
    STARTED,
    Decision,
    Phase,
    PolicyState,
    PostedNotice,
    leave_job,
    notify_before_leaving,
)
from rallypoint.membership.operations import Drain
from rallypoint.membership.state import join_names
from rallypoint.notices import PREEMPTION, SCALE
from rallypoint.protocol import messages


def on_waiting(status: PolicyState, event: messages.NodesWaiting) -> Decision:
    """Nodes wait to join: the workers are asked to save, if they are given notice, and the round is drained."""
    pending = status.pending_placement
    if pending is not None and pending.round == event.round and event.waiting:
        # The workers of the round before are still stopping: this round has none yet that could save anything.
        line = steps.LogLine(_log_new_nodes(event, pending.group_rank))
        return status, (line, Drain(pending.round, needs_consent=status.notice_timeout > 0))
    if status.phase not in STARTED or event.round != status.round:
        return status, ()
    if not event.waiting:
        if status.posted_notice is None or status.posted_notice.reason != SCALE:
            return status, ()
        return status._replace(posted_notice=None), (steps.WithdrawNotice(),)
    if not status.notice_timeout or status.phase is not Phase.RUNNING:
        return status, (steps.LogLine(_log_new_nodes(event, status.group_rank)), drain(status))
    if status.posted_notice is not None:
        return status, ()
    who = join_names(event.names) or f"{event.waiting} more"
    wait = "waits" if event.waiting == 1 else "wait"
    line = steps.LogLine(
        f"{who} {wait} to be taken in; the workers have {status.notice_timeout:g} s to save and acknowledge"
    )
    return status._replace(posted_notice=PostedNotice(SCALE)), (
        line,
        steps.PostNotice(SCALE, "", status.notice_timeout),
    )


def _log_new_nodes(event: messages.NodesWaiting, group_rank: int) -> str:
    nodes = f"{event.waiting} new node{'' if event.waiting == 1 else 's'}"
    names = f" with {join_names(event.names)}" if event.names else ""
    return f"Detected {nodes} from group_rank={group_rank}; will restart worker group{names}"


def drain(status: PolicyState) -> Drain:
    """End the round in order; if workers are given notice, this is the node's consent."""
    return Drain(status.round, needs_consent=status.notice_timeout > 0 or bool(status.preemption))


def on_preempted(status: PolicyState, event: messages.Preempted) -> Decision:
    """A node will be taken away: the workers are asked to save."""
    if status.phase not in STARTED or event.round != status.round or status.leave_signal:
        return status, ()
    if status.phase is not Phase.RUNNING or (status.posted_notice is not None and status.posted_notice.ready):
        return status._replace(posted_notice=PostedNotice(PREEMPTION, ready=True)), (drain(status),)
    line = steps.LogLine(
        f"{event.node} will be taken away; the workers have {event.seconds:g} s to save and acknowledge", warning=True
    )
    return status._replace(posted_notice=PostedNotice(PREEMPTION)), (
        line,
        steps.PostNotice(PREEMPTION, event.node, event.seconds),
    )


def on_workers_ready(status: PolicyState, event: steps.WorkersReady) -> Decision:
    """All workers of this node have saved, or their time is over: the node consents."""
    if status.phase is not Phase.RUNNING or status.posted_notice is None or status.posted_notice.ready:
        return status, ()
    if status.leave_signal and event.is_late:  # it leaves now, and the others must not count it as saved
        return status, ()
    return status._replace(posted_notice=status.posted_notice._replace(ready=True)), (drain(status),)


def on_notice_expired(status: PolicyState, _event: steps.NoticeExpired) -> Decision:
    """The time of the notice is over: a node that leaves waits no longer."""
    return leave_job(status, status.leave_signal) if status.leave_signal else (status, ())


def on_drain_requested(status: PolicyState, event: messages.DrainRequested) -> Decision:
    """An operator takes this node away."""
    if status.leave_signal or status.phase in LEAVES:
        return status, ()
    why = f"{event.by} drains this node"
    if status.can_notify_workers:
        return notify_before_leaving(status, why, status.notice_timeout)
    return leave_job(status, SIGTERM, why)
