"""From a complete state to what each node, and only that node, is told."""

from __future__ import annotations

from rallypoint.membership.decisions import ClockView, settled, starts_at
from rallypoint.membership.state import NodeId, Settings, State, hosts_of, known_to, missing
from rallypoint.protocol.messages import LeaveReply, MissingNode, Placement, Progress
from rallypoint.ranks.assign import assign_worker_ranks


def placements(state: State) -> dict[NodeId, Placement]:
    """The place of every participant of a complete round."""
    in_order = sorted(state.participants.items(), key=lambda entry: entry[1].rank)
    ranks = assign_worker_ranks([(each.node_info.role, each.node_info.local_world_size) for _, each in in_order])
    host = in_order[0][1].node_info
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
        )
        for (node, each), own in zip(in_order, ranks, strict=True)
    }


def progress(
    state: State, node: NodeId, settings: Settings, view: ClockView, *, ends_in: float = -1.0, reports: bool = True
) -> Progress:
    """How far the rendezvous is, seen by `node`. For `ends_in` and `reports` see `Progress`."""
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
    """How far the rendezvous was that was abandoned last."""
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
    """How the job stands without a node that has left it: a round runs, or those who are left are enough for one."""
    others = len({each for each in known_to(state) if each != node and not each.is_placeholder})
    goes_on = not state.closed and others > 0 and (state.complete or others >= settings.min_nodes)
    return LeaveReply(goes_on, others, None if state.verdict is None else state.verdict.outcome)
