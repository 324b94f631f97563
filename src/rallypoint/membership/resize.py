"""Changes the number of nodes of a job's rounds, on an operator's request. Pure."""

from __future__ import annotations

from rallypoint.membership.state import NodeRange, State


def resize(state: State, size: NodeRange) -> State:
    """The state after rounds have been given this number of nodes.

    A node without a place any more waits as a spare; a forming round that now has enough nodes begins its last call.
    """
    least, most = size
    after = _without_excess(state._replace(size=size), most)
    if after.complete or (after.last_call and least <= len(after.participants)):
        return after
    if len(after.participants) < least:
        return after._replace(last_call=0)
    return after._replace(last_call=after.last_calls + 1, last_calls=after.last_calls + 1)


def _without_excess(state: State, most: int) -> State:
    """At most this many nodes keep their places in the forming round, or in the next one; the others become spares."""
    # Nodes with a place in the previous round take precedence.
    in_order = sorted(state.participants, key=lambda node: state.participants[node].previous_rank is None)
    out = () if state.complete else in_order[most:]
    room = most - len(state.participants) + len(out) - len(state.survivors)
    wait = list(state.wait_list)[max(0, room) :]
    if not out and not wait:
        return state
    spares = {each: state.participants[each].node_info for each in out} | {each: state.wait_list[each] for each in wait}
    return state._replace(
        participants={node: each for node, each in state.participants.items() if node not in spares},
        wait_list={node: each for node, each in state.wait_list.items() if node not in spares},
        redundancy_list={**state.redundancy_list, **spares},
    )
