"""The effects of operators' commands on a job. Pure.

Law: a refused command changes nothing, and the refusal gives the reason and the remedy.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.control.coordinator.sessions import SessionRegistry
from rallypoint.control.membership.state import (
    Close,
    NodeId,
    NodeRange,
    Operation,
    Resize,
    Restart,
    Settings,
    State,
    join_names,
    known_to,
    name_of,
    names_of,
)
from rallypoint.control.protocol.messages import DrainRequested, Fault, FaultRequested
from rallypoint.control.protocol.ranges import MAX_NODES
from rallypoint.observe.watching.messages import (
    Command,
    DrainCommand,
    EventKind,
    FaultCommand,
    ResizeCommand,
    RestartCommand,
    StopCommand,
)

MOST_NAMED = 8
"""Maximum number of nodes named in a sentence."""


class CommandPlan(NamedTuple):
    """The effect of a command.

    `text` describes it, as an event of this `kind`. `operation` runs on behalf of the operator; `request` is sent to
    one node.
    """

    text: str
    operation: Operation | None = None
    request: tuple[NodeId, DrainRequested | FaultRequested] | None = None
    kind: EventKind = EventKind.COMMAND

    @property
    def size(self) -> NodeRange | None:
        """The number of nodes in future rounds, if the command changes it."""
        return self.operation.size if isinstance(self.operation, Resize) else None


class CommandRefused(Exception):
    """A command is refused; the message is one sentence with the reason."""


def plan_command(command: Command, state: State, settings: Settings, sessions: SessionRegistry) -> CommandPlan:
    """Plan a command for the job's current state.

    Raises:
        CommandRefused: the command is impossible.
    """
    if state.verdict is not None:
        raise CommandRefused(f"the job has already {state.verdict.outcome.value}")
    if state.is_preempted and not isinstance(command, StopCommand):
        raise CommandRefused(
            "the job is being preempted and will end as soon as its workers have saved; only 'rallyctl stop' can "
            "end it sooner"
        )
    match command:
        case RestartCommand():
            return _restart(state, command.by)
        case StopCommand():
            text = f"{command.by} stopped the job"
            return CommandPlan(text, Close(detail=text))
        case DrainCommand():
            return _drain(command, state, sessions)
        case ResizeCommand():
            return _resize(command, state, settings, sessions)
        case FaultCommand():
            return _fault(command, state, settings, sessions)
    raise CommandRefused(f"a {type(command).__name__} is not a command that changes a job")


def _restart(state: State, by: str) -> CommandPlan:
    if not state.complete:
        raise CommandRefused("no round is running, so there is nothing to restart; the next round is forming")
    if state.succeeded:
        raise CommandRefused("some nodes have already succeeded, and a restart would repeat their work")
    return CommandPlan(f"{by} restarted round {state.round}", Restart(state.round))


def _drain(command: DrainCommand, state: State, sessions: SessionRegistry) -> CommandPlan:
    node = find_node(command.node, state)
    name = _connected(node, state, sessions)
    if node in sessions.local_nodes:
        raise CommandRefused(
            f"{name} hosts this job's control plane, so the job would end with it; to end the job, use 'rallyctl "
            "stop'; to host the control plane elsewhere, use 'rallyctl serve' or --rdzv-backend=etcd"
        )
    return CommandPlan(f"{command.by} drains {name}", request=(node, DrainRequested(command.by)))


def _connected(node: NodeId, state: State, sessions: SessionRegistry) -> str:
    """Return the name of a node. Raises CommandRefused if it is not connected."""
    name = name_of(state, node)
    if node not in sessions:
        raise CommandRefused(f"{name} is not connected at the moment; try again when it is back")
    return name


_ENDS_CONTROL_PLANE = frozenset({Fault.KILL_AGENT, Fault.KILL_NODE, Fault.CUT})
_DEATH_LEASES = 2
"""A node killed by a drill stays silent for this many leases, so that it counts as lost, as intended."""


def _fault(command: FaultCommand, state: State, settings: Settings, sessions: SessionRegistry) -> CommandPlan:
    fault, rank = command.fault, command.rank if command.fault.is_of_worker else -1
    if fault.is_of_worker and rank < 0:
        raise CommandRefused(f"the drill '{fault.value}' needs a rank")
    node = nodes_with_ranks((rank,), state)[0] if fault.is_of_worker else find_node(command.node, state)
    name = _connected(node, state, sessions)
    if fault in _ENDS_CONTROL_PLANE and node in sessions.local_nodes:
        raise CommandRefused(
            f"{name} hosts the control plane of this job, which must observe the outcome; drill another node, or host "
            "the control plane elsewhere ('rallyctl serve')"
        )
    lasts = _DEATH_LEASES * settings.lease if fault is Fault.KILL_NODE else command.lasts
    what = f"{fault.value}: {f'rank {rank} on ' if fault.is_of_worker else ''}{name}"
    text = f"{command.by} drills {what}{f', for {lasts:g} s at most' if lasts else ''}"
    return CommandPlan(text, request=(node, FaultRequested(command.by, fault, rank, lasts)), kind=EventKind.DRILL)


def _resize(command: ResizeCommand, state: State, settings: Settings, sessions: SessionRegistry) -> CommandPlan:
    least, most = command.min_nodes, command.max_nodes
    if settings.fixed_ranks:
        raise CommandRefused("a static job has fixed ranks; start it with --rdzv-backend=c10d to resize it")
    if not 1 <= least <= most <= MAX_NODES:
        raise CommandRefused(
            f"{least}:{most} is not a range of nodes; write MIN:MAX with 1 <= MIN <= MAX <= {MAX_NODES}"
        )
    if least % settings.segment:
        raise CommandRefused(
            f"rounds of this job have segments of {settings.segment} nodes; set MIN to a multiple of it"
        )
    most -= most % settings.segment
    nodes = known_to(state)
    if not nodes or any(node not in sessions for node in nodes):
        raise CommandRefused("not all nodes of the job have reached this coordinator yet; try again later")
    if (least, most) == (settings.min_nodes, settings.max_nodes):
        raise CommandRefused(f"the job already has {least}:{most} nodes")
    short = max(0, least - len(nodes))
    if short and not command.force:
        stops = "its next failure would stop it" if state.complete else "its next round would wait"
        raise CommandRefused(
            f"the job has {_count(len(nodes))}; with a minimum of {least}, {stops} until {short} more "
            f"{'has' if short == 1 else 'have'} joined; start more nodes first, or use --force"
        )
    was, now = f"{settings.min_nodes}:{settings.max_nodes}", f"{least}:{most}"
    then = ", from the next round on" if state.complete else ""
    needs = f", which needs {_count(short, 'more ')}" if short else ""
    return CommandPlan(
        f"{command.by} resized the job from {was} to {now} nodes{then}{needs}", Resize(NodeRange(least, most))
    )


def _count(number: int, more: str = "") -> str:
    return f"{number} {more}node{'' if number == 1 else 's'}"


def find_node(name: str, state: State) -> NodeId:
    """The node with this name, host, address, pid@host or group rank.

    Raises:
        CommandRefused: no node matches, or several do.
    """
    nodes = [node for node in known_to(state) if not node.is_placeholder]
    rank = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 and state.complete else -1
    matches = [node for node in nodes if name and _has_name(name, rank, node, state)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        which = join_names([f"{node.pid}@{node}" for node in matches[:MOST_NAMED]])
        raise CommandRefused(f"{name!r} matches {len(matches)} nodes; choose one of them: {which}")
    have = join_names(names_of(state, nodes, MOST_NAMED)) or "none"
    raise CommandRefused(f"the job has no node {name!r}; it has {have}")


def nodes_with_ranks(ranks: Sequence[int], state: State) -> list[NodeId]:
    """The participants of the running round; with `ranks`, only those whose workers have them.

    Raises:
        CommandRefused: no round is running, or it lacks a rank.
    """
    if not state.complete:
        raise CommandRefused("no round is running, so there are no workers")
    if not ranks:
        return sorted(state.participants, key=lambda node: state.participants[node].rank)
    in_order = sorted((*state.participants.items(), *state.finished.items()), key=lambda entry: entry[1].rank)
    known = [participant for place, (_, participant) in enumerate(in_order) if place == participant.rank]
    ends = list(itertools.accumulate(participant.node_info.local_world_size for participant in known))
    nodes: dict[NodeId, None] = {}
    for rank in ranks:
        place = bisect_right(ends, rank)
        if place < len(ends) and in_order[place][0] in state.finished:
            raise CommandRefused(f"the node that had rank {rank} succeeded and left")
        if place < len(ends):
            nodes[in_order[place][0]] = None
        elif len(ends) < len(in_order):
            raise CommandRefused(f"a node with lower ranks succeeded and left, so it is unknown which node has {rank}")
        else:
            raise CommandRefused(f"the job has no rank {rank}; see 'rallyctl status'")
    return list(nodes)


def _has_name(name: str, rank: int, node: NodeId, state: State) -> bool:
    """Whether a node is called `name`. The loop waits while this runs for each of many nodes, so it creates no
    objects.
    """
    if name in (node.host, node.addr):
        return True
    if rank >= 0 and (place := state.participants.get(node)) is not None and place.rank == rank:
        return True
    text = str(node)
    return (name.startswith(text) and name == name_of(state, node)) or (
        name.endswith(text) and name == f"{node.pid}@{text}"
    )
