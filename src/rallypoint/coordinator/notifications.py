"""Notifications to nodes: of a change of the state, and of the state when they ask. Pure."""

from __future__ import annotations

from collections.abc import Collection

from rallypoint.failures.cause import Ending
from rallypoint.membership.decisions import ClockView, settled, starts_at
from rallypoint.membership.state import (
    NodeId,
    Reason,
    RoundEnd,
    Settings,
    State,
    Verdict,
    known_to,
    name_of,
    names_of,
)
from rallypoint.protocol.messages import (
    JobEnded,
    JoinRefused,
    LeaveReply,
    MissingNode,
    NodesWaiting,
    Notification,
    Placed,
    Placement,
    Preempted,
    Progress,
    Refusal,
    RoundEnded,
)
from rallypoint.ranks.assign import assign_worker_ranks


def notification_diff(before: State, after: State) -> list[tuple[Collection[NodeId], Notification]]:
    """The notifications that a change of the state makes due, for each node, except for the end of the job.

    Rounds in between may have been missed.
    """
    due: list[tuple[Collection[NodeId], Notification]] = []
    if after.round > before.round:
        # A node that had succeeded and was unreachable for a while has no place there any more, but waits for the rest.
        others = sorted(before.succeeded.difference(before.participants))
        due.append(([*before.participants, *others], RoundEnded(_round_end(before, after))))
    if newly_complete(before, after) and not after.is_preempted:
        due += [((node,), Placed(placement)) for node, placement in placements(after).items()]
    elif after.complete and len(after.wait_list) != len(before.wait_list):
        due.append((after.participants, nodes_waiting(after)))
    said = after.preempted
    if said is not None and (said != before.preempted or after.round != before.round):
        told = [node for node in after.participants if said.whole_job or node != said.node]
        due.append((told, preempted(after)))
    return due


def preempted(state: State) -> Preempted:
    """The notification to running nodes that a node, or all nodes, will be taken away."""
    said = state.preempted
    assert said is not None, "somebody will be taken away"
    return Preempted(state.round, said.who or name_of(state, said.node), said.seconds, said.whole_job, said.why)


def newly_complete(before: State, after: State) -> bool:
    """Whether the round of `after` is complete, and was not in `before`."""
    return after.complete and (not before.complete or after.round > before.round)


def _round_end(before: State, after: State) -> RoundEnd:
    """How the round of `before` ended, as far as `after` still shows it."""
    ended = after.ended
    if ended is not None and ended.round == before.round:
        return ended
    return RoundEnd(before.round, Reason.LOST if ended is None else ended.reason, "" if ended is None else ended.node)


def end_notification(state: State, node: NodeId, verdict: Verdict) -> Notification:
    """The notification to a node about the end of the job; a spare that was never needed is not affected by how it
    ended, unless the job will be started again.
    """
    if node in state.redundancy_list and verdict.ending is not Ending.PREEMPTED:
        return JoinRefused(Refusal.SPARE_NOT_NEEDED, f"the job has {verdict.outcome.value}")
    return JobEnded(verdict, is_delegate=node == verdict.delegate)


def nodes_waiting(state: State) -> NodesWaiting:
    """The notification to running nodes about nodes that wait to join."""
    return NodesWaiting(state.round, len(state.wait_list), names_of(state, state.wait_list))


def placements(state: State) -> dict[NodeId, Placement]:
    """The placement of every participant of a complete round: the same for nodes that are notified late."""
    in_order = sorted((*state.participants.items(), *state.finished.items()), key=lambda entry: entry[1].rank)
    ranks = assign_worker_ranks([(each.node_info.role, each.node_info.local_world_size) for _, each in in_order])
    host = in_order[0][1].node_info
    restart_workers = any(each.node_info.restarts_workers for _, each in in_order)
    return {
        node: Placement(
            round=state.round,
            group_rank=each.rank,
            group_world_size=len(in_order),
            ranks=own,
            store_address=host.address,
            store_port=host.store_port,
            restarts=state.restarts,
            max_restarts=state.max_restarts,
            progress=state.progress.step,
            size=state.size,
            restart_workers=restart_workers,
        )
        for (node, each), own in zip(in_order, ranks, strict=True)
        if node in state.participants
    }


class Placements:
    """The placements of one round at a time, worked out once for all nodes that missed theirs."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._placements: dict[NodeId, Placement] = {}

    def of(self, state: State, node: NodeId) -> Placement:
        """The placement of a participant of a complete round."""
        of = (state.participants, state.finished, state.progress, state.size, state.max_restarts, state.origin)
        if len(of) != len(self._of) or any(new is not old for new, old in zip(of, self._of, strict=True)):
            self._of, self._placements = of, placements(state)
        return self._placements[node]


def progress(
    state: State, node: NodeId, settings: Settings, view: ClockView, *, ends_in: float = -1.0, reports: bool = True
) -> Progress:
    """The progress of the rendezvous, seen by `node`. For `ends_in` and `reports` see `Progress`."""
    from rallypoint.membership.names import hosts_of, missing

    starts = settled(state, settings) and node in state.participants
    return Progress(
        round=state.round,
        complete=state.complete,
        joined=len(state.participants),
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        expected=missing(state, settings),
        spare=node in state.redundancy_list,
        backoff=state.restart_delay,
        members=tuple(hosts_of(state.participants)),
        removed=_missing_nodes(state, view),
        starts_in=max(0.0, starts_at(state, view, settings) - view.now) if starts else -1.0,
        ends_in=-1.0 if starts else ends_in,
        reports=reports,
    )


def abandoned_progress(state: State, settings: Settings, view: ClockView, *, reports: bool = True) -> Progress:
    """The progress of the rendezvous that was abandoned last."""
    last = state.abandoned
    return Progress(
        round=state.round,
        complete=False,
        joined=last.joined,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        expected=last.expected,
        spare=False,
        members=last.members,
        removed=_missing_nodes(state, view),
        gave_up_by=last.given_up_by,
        waited=last.seconds,
        reports=reports,
    )


def _missing_nodes(state: State, view: ClockView) -> tuple[MissingNode, ...]:
    pairs = zip(state.removed, view.removed_at, strict=False)
    return tuple(MissingNode(each.name, each.reason, view.now - at) for each, at in pairs)


def standing_without(state: State, node: NodeId, settings: Settings) -> LeaveReply:
    """The state of the job without a node that has left it: a round runs, or enough nodes are left for one."""
    others = len({each for each in known_to(state) if each != node and not each.is_placeholder})
    goes_on = not state.closed and others > 0 and (state.complete or others >= settings.min_nodes)
    return LeaveReply(goes_on, others, None if state.verdict is None else state.verdict.outcome)
