"""What a change of the state means to one node: the notifications it is due, told from before and after. Pure."""

from __future__ import annotations

from rallypoint.coordinator.placement import placements
from rallypoint.membership.state import NodeId, Reason, RoundEnd, State, Verdict, name_of, names_of
from rallypoint.protocol.messages import (
    JobEnded,
    JoinRefused,
    NodesWaiting,
    Notification,
    Placed,
    Preempted,
    Refusal,
    RoundEnded,
)


def notification_diff(before: State, after: State, node: NodeId, *, joined: bool) -> list[Notification]:
    """What `node` is told when it finds `after` where `before` was; rounds in between may have passed unseen.

    `joined` says whether it has ever been in this job: only then does the job's end concern it.
    """
    if after.verdict is not None and before.verdict is None:
        return [end_notification(after, node, after.verdict)] if joined else []
    notifications: list[Notification] = []
    took_part = before.complete and node in before.participants
    if has_missed_round(before, after, node) or (took_part and after.round > before.round):
        notifications.append(RoundEnded(round_end_notification(before, after)))
    if newly_complete(before, after) and node in after.participants:
        notifications.append(Placed(placements(after)[node]))
    elif took_part and after.complete and len(after.wait_list) != len(before.wait_list):
        notifications.append(nodes_waiting(after))
    warning = preemption_notification(before, after)
    if warning is not None and node in after.participants and node != announced_preemption(after):
        notifications.append(warning)
    return notifications


def preemption_notification(before: State, after: State) -> Preempted | None:
    """What to tell the others of a node that will be taken away, if it has just said so."""
    said = after.preempted
    if said is None or (said == before.preempted and after.round == before.round):
        return None
    return Preempted(after.round, name_of(after, said.node), said.seconds)


def announced_preemption(state: State) -> NodeId | None:
    """Who will be taken away, as far as is known, and needs not be told so."""
    return None if state.preempted is None else state.preempted.node


def nodes_waiting(state: State) -> NodesWaiting:
    """What to tell those who run of the nodes that wait to be taken in."""
    return NodesWaiting(state.round, len(state.wait_list), names_of(state, state.wait_list))


def has_missed_round(before: State, after: State, node: NodeId) -> bool:
    """Whether a round with `node` in it was completed and ended by others before the node saw it complete."""
    return not before.complete and node in before.participants and after.round > before.round


def newly_complete(before: State, after: State) -> bool:
    """Whether `after` is a complete round that `before` was not yet."""
    return after.complete and (not before.complete or after.round > before.round)


def round_end_notification(before: State, after: State) -> RoundEnd:
    """How the complete round of `before` ended, as far as `after` still tells."""
    ended = after.ended
    if ended is not None and ended.round == before.round:
        return ended
    return RoundEnd(before.round, Reason.LOST if ended is None else ended.reason, "" if ended is None else ended.node)


def end_notification(state: State, node: NodeId, verdict: Verdict) -> Notification:
    """What the end of the job means to a node; a spare that was never needed has no part in how it ended."""
    if node in state.redundancy_list:
        return JoinRefused(Refusal.SPARE_NOT_NEEDED, f"the job has {verdict.outcome.value}")
    return JobEnded(verdict)
