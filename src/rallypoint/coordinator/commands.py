"""Plans an operator's command for a job: what must be done, or why it cannot be. Pure.

A command that cannot be done changes nothing, and the refusal says why and what to do.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from rallypoint.coordinator.session_registry import SessionRegistry
from rallypoint.membership.operations import Close, Operation, Resize, Restart
from rallypoint.membership.state import NodeId, NodeRange, Settings, State, join_names, known_to, name_of, names_of
from rallypoint.protocol.observation import Command, DrainCommand, ResizeCommand, RestartCommand, StopCommand
from rallypoint.protocol.validation import MAX_NODES

_MOST_NAMED = 8


class Plan(NamedTuple):
    """The effect of a command.

    `text` says what has happened, for people. `operation` is run on behalf of the operator, `drained` is the node that
    is asked to leave.
    """

    text: str
    operation: Operation | None = None
    drained: NodeId | None = None

    @property
    def size(self) -> NodeRange | None:
        """The number of nodes that rounds have from now on, if it changes."""
        return self.operation.size if isinstance(self.operation, Resize) else None


class CommandRefused(Exception):
    """The command cannot be done; one sentence says why."""


def plan_command(command: Command, state: State, settings: Settings, sessions: SessionRegistry) -> Plan:
    """The plan of a command for the present state of the job.

    Raises:
        CommandRefused: it cannot be done.
    """
    if state.verdict is not None:
        raise CommandRefused(f"the job has {state.verdict.outcome.value} already")
    if state.is_preempted and not isinstance(command, StopCommand):
        raise CommandRefused("the job is preempted and ends as soon as its workers have saved; only a stop is sooner")
    match command:
        case RestartCommand():
            return _restart(state, command.by)
        case StopCommand():
            text = f"{command.by} has stopped the job"
            return Plan(text, Close(detail=text))
        case DrainCommand():
            return _drain(command, state, sessions)
        case ResizeCommand():
            return _resize(command, state, settings, sessions)
    raise CommandRefused(f"a {type(command).__name__} is not a command that changes a job")


def _restart(state: State, by: str) -> Plan:
    if not state.complete:
        raise CommandRefused("no round is running that could be restarted; the next one is forming")
    if state.succeeded:
        raise CommandRefused("some nodes have succeeded already; a restart would do their work again")
    return Plan(f"{by} has restarted round {state.round}", Restart(state.round))


def _drain(command: DrainCommand, state: State, sessions: SessionRegistry) -> Plan:
    node = find_node(command.node, state)
    name = name_of(state, node)
    if node not in sessions:
        raise CommandRefused(f"{name} is not connected at the moment; try again when it is back")
    if node in sessions.local_nodes:
        raise CommandRefused(
            f"{name} hosts the control plane of this job, which would go with it; "
            "to end the job use 'rallyctl stop', to be free of this use 'rallyctl serve' or --rdzv-backend=etcd"
        )
    return Plan(f"{command.by} drains {name}", drained=node)


def _resize(command: ResizeCommand, state: State, settings: Settings, sessions: SessionRegistry) -> Plan:
    least, most = command.min_nodes, command.max_nodes
    if settings.fixed_ranks:
        raise CommandRefused("a static job has fixed ranks; start it with --rdzv-backend=c10d to resize it")
    if not 1 <= least <= most <= MAX_NODES:
        raise CommandRefused(
            f"{least}:{most} is not a range of nodes; give MIN:MAX with 1 <= MIN <= MAX <= {MAX_NODES}"
        )
    nodes = known_to(state)
    if not nodes or any(node not in sessions for node in nodes):
        raise CommandRefused("not all nodes of the job have come to this coordinator; try again when they have")
    if (least, most) == (settings.min_nodes, settings.max_nodes):
        raise CommandRefused(f"the job has {least}:{most} nodes already")
    text = f"{command.by} has resized the job from {settings.min_nodes}:{settings.max_nodes} to {least}:{most} nodes"
    return Plan(text, Resize(NodeRange(least, most)))


def find_node(wanted: str, state: State) -> NodeId:
    """The node with a name, host, address, pid@host or group rank.

    Raises:
        CommandRefused: there is none, or more than one.
    """
    nodes = [node for node in known_to(state) if not node.is_placeholder]
    found = [node for node in nodes if wanted in _names(state, node)]
    if len(found) == 1:
        return found[0]
    if found:
        which = join_names([f"{each.pid}@{each}" for each in found[:_MOST_NAMED]])
        raise CommandRefused(f"{wanted!r} names {len(found)} nodes; name one of them: {which}")
    have = join_names(names_of(state, nodes, _MOST_NAMED)) or "none"
    raise CommandRefused(f"the job has no node {wanted!r}; it has {have}")


def nodes_with_rank(rank: int, state: State) -> list[NodeId]:
    """The participants of the running round; with a `rank` that is not negative, the one whose worker has it.

    Raises:
        CommandRefused: no round runs, or it has no such rank.
    """
    if not state.complete:
        raise CommandRefused("no round is running, so there are no workers")
    in_order = sorted(state.participants.items(), key=lambda entry: entry[1].rank)
    if rank < 0:
        return [node for node, _ in in_order]
    ends = itertools.accumulate(each.node_info.local_world_size for _, each in in_order)
    for place, ((node, each), end) in enumerate(zip(in_order, ends, strict=True)):
        if place != each.rank:
            raise CommandRefused(
                f"a node with lower ranks has succeeded and left, so it is not known which node has {rank}"
            )
        if rank < end:
            return [node]
    raise CommandRefused(f"the job has no rank {rank}; see 'rallyctl status'")


def _names(state: State, node: NodeId) -> set[str]:
    names = {node.host, node.addr, f"{node.pid}@{node}", name_of(state, node)}
    place = state.participants.get(node)
    if place is not None and state.complete:
        names.add(str(place.rank))
    return names - {""}
