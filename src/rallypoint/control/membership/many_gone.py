"""Removes many nodes at once. Pure; imported late."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rallypoint.control.membership.mappings import with_member, without_all
from rallypoint.control.membership.rules import (
    MAX_REMOVED,
    end_job_if_all_done,
    number_fitting,
    without_needless_waits,
)
from rallypoint.control.membership.state import NodeId, Reason, RemovedNode, Settings, State, name_of


def without_nodes(state: State, nodes: Sequence[NodeId], reason: Reason, settings: Settings) -> State:
    """The state without these nodes, in time linear in their number and the number of all nodes.

    The result equals an `Exit` of one node after the other. None of the nodes is a participant of a complete round,
    since the first such node ends the round, except in a preempted job.
    """
    gone = frozenset(nodes)
    members = (node for node in nodes if node in state.survivors or (node in state.participants and not state.closed))
    removed = [RemovedNode(node, name_of(state, node), reason) for node in islice(members, MAX_REMOVED)]
    after = state._replace(
        participants=without_all(state.participants, gone),
        wait_list=without_all(state.wait_list, gone),
        redundancy_list=without_all(state.redundancy_list, gone),
        survivors=without_all(state.survivors, gone),
        heartbeats=without_all(state.heartbeats, gone),
        removed=(*state.removed, *removed)[:MAX_REMOVED],
    )
    after = without_needless_waits(state, after, nodes, settings)
    if state.closed or len(after.participants) == len(state.participants):
        return after
    if state.complete:
        consents = after.consents
        for node in nodes:
            consents = with_member(consents, node) if node in state.participants else consents
        return end_job_if_all_done(after._replace(consents=consents))
    return after._replace(last_call=0) if number_fitting(after, settings) < settings.min_nodes else after
