"""Names of a round's nodes for messages: those that have joined, are expected, or have given up. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from rallypoint.membership.state import AbandonedRendezvous, NodeId, Settings, State, join_names, name_of, names_of


def hosts_of(nodes: Collection[NodeId], most: int = 8) -> tuple[str, ...]:
    """The hosts of some nodes, at most this many; with their pids if several of these are on one host."""
    few = list(itertools.islice(nodes, most))
    hosts = [str(each) for each in few]
    twins = {each for each in hosts if hosts.count(each) > 1}
    names = [f"{host} pid {each.pid}" if host in twins else host for host, each in zip(hosts, few, strict=True)]
    return tuple(names) if len(nodes) <= most else (*names, f"{len(nodes) - most} more")


def missing(state: State, settings: Settings, most: int = 4) -> tuple[str, ...]:
    """A few of the nodes still expected, as far as they are known: survivors, or, if ranks are fixed, the ranks."""
    if state.complete or not settings.fixed_ranks:
        return names_of(state, sorted(state.survivors), most)
    present = {each.node_info.rank_hint for each in state.participants.values()}
    names = [f"node rank {rank}" for rank in range(settings.max_nodes) if rank not in present]
    return tuple(names) if len(names) <= most else (*names[:most], f"{len(names) - most} more")


def abandoned_rendezvous(state: State, node: NodeId, seconds: float, settings: Settings) -> AbandonedRendezvous:
    """The state of the rendezvous that `node` has given up after this many seconds."""
    return AbandonedRendezvous(
        state.abandoned.number + 1,
        name_of(state, node),
        seconds,
        len(state.participants),
        hosts_of(state.participants),
        missing(state, settings),
    )


def drain_detail(state: State, name: str) -> str:
    """Why the round is drained, with the consent of the node of this name."""
    if state.preempted is not None:
        return f"{name_of(state, state.preempted.node)} will be taken away"
    if not state.wait_list:
        return f"{name} asks for another"
    who = join_names(names_of(state, state.wait_list))
    return f"the new node {who} is taken in" if len(state.wait_list) == 1 else f"the new nodes {who} are taken in"
