"""From a complete state to what each node, and only that node, is told."""

from __future__ import annotations

from rallypoint.ranks.assign import assign_worker_ranks
from rallypoint.rendezvous.core import Sight, settled, starts_at
from rallypoint.rendezvous.messages import Left, Missed, Placement, Progress
from rallypoint.rendezvous.state import NodeId, Settings, State, hosts_of, known_to, missing


def placements(state: State) -> dict[NodeId, Placement]:
    """The place of every participant of a complete round."""
    in_order = sorted(state.participants.items(), key=lambda entry: entry[1].rank)
    ranks = assign_worker_ranks([(each.member.role, each.member.local_world_size) for _, each in in_order])
    host = in_order[0][1].member
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
    state: State, node: NodeId, settings: Settings, sight: Sight, *, ends_in: float = -1.0, tells: bool = True
) -> Progress:
    """How far the rendezvous is, seen by `node`. For `ends_in` and `tells` see `Progress`."""
    starts = settled(state, settings) and node in state.participants
    return Progress(
        round=state.round,
        complete=state.complete,
        joined=len(state.participants),
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        awaited=missing(state, settings),
        spare=node in state.redundancy_list,
        held_back=state.hold,
        members=tuple(hosts_of(state.participants)),
        gone=_missed(state, sight),
        starts_in=max(0.0, starts_at(state, sight, settings) - sight.now) if starts else -1.0,
        ends_in=-1.0 if starts else ends_in,
        tells=tells,
    )


def given_up(state: State, settings: Settings, sight: Sight, *, tells: bool = True) -> Progress:
    """How far the rendezvous was that was abandoned last."""
    last = state.abandoned
    return Progress(
        round=state.round,
        complete=False,
        joined=last.joined,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        awaited=last.awaited,
        spare=False,
        members=last.members,
        gone=_missed(state, sight),
        gave_up=last.by,
        waited=last.seconds,
        tells=tells,
    )


def _missed(state: State, sight: Sight) -> tuple[Missed, ...]:
    pairs = zip(state.gone, sight.gone_at, strict=False)
    return tuple(Missed(each.name, each.reason, sight.now - at) for each, at in pairs)


def standing(state: State, node: NodeId, settings: Settings) -> Left:
    """How the job stands without a node that has left it: a round runs, or those who are left are enough for one."""
    others = len({each for each in known_to(state) if each != node and not each.is_absent})
    goes_on = not state.closed and others > 0 and (state.complete or others >= settings.min_nodes)
    return Left(goes_on, others, None if state.verdict is None else state.verdict.outcome)
