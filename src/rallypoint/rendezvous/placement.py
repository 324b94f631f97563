"""From a complete state to what each node, and only that node, is told."""

from __future__ import annotations

from rallypoint.ranks.assign import assign_worker_ranks
from rallypoint.rendezvous.messages import Placement, Progress
from rallypoint.rendezvous.state import NodeId, Settings, State, names_of

_NAMED = 4
"""How many missing nodes a progress names."""


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
        )
        for (node, each), own in zip(in_order, ranks, strict=True)
    }


def progress(state: State, node: NodeId, settings: Settings) -> Progress:
    """How far the rendezvous is, seen by `node`."""
    return Progress(
        round=state.round,
        complete=state.complete,
        joined=len(state.participants),
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        awaited=tuple(_missing(state, settings)),
        spare=node in state.redundancy_list,
        held_back=state.hold,
    )


def _missing(state: State, settings: Settings) -> list[str]:
    if state.complete or not settings.fixed_ranks:
        return list(names_of(state, sorted(state.former), _NAMED))
    present = {each.member.rank_hint for each in state.participants.values()}
    names = [f"node rank {rank}" for rank in range(settings.max_nodes) if rank not in present]
    more = len(names) - _NAMED
    return names[:_NAMED] + ([f"{more} more"] if more > 0 else [])
