"""The truth about rounds and servers, as the audit keeps it.

A round's name is the number of the server that completed it, and its own number there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rallypoint.control.membership.state import NodeId, NodeRange, State, Verdict
from rallypoint.control.protocol.messages import Placement, Request
from rallypoint.observe.watching.messages import WatcherRequest

RoundName = tuple[int, int]


@dataclass
class Round:
    """The truth about one round."""

    name: RoundName
    members: dict[int, int]
    """Node to group rank."""
    restarts: int
    told: dict[int, Placement] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    restarts_workers: dict[int, bool] = field(default_factory=dict)
    """What nodes had said of their former workers when they were placed."""


@dataclass
class RoundBook:
    """What the audit remembers of one server."""

    names: dict[int, RoundName] = field(default_factory=dict)
    """The names of rounds by their numbers, as this server's nodes know them."""
    counted: set[RoundName] = field(default_factory=set)
    """Rounds of which this server has counted a failure."""
    ended: dict[RoundName, float] = field(default_factory=dict)
    """When this server ended rounds, in the world's time."""
    verdict: Verdict | None = None
    size: NodeRange | None = None
    """How many nodes its rounds have; None before the first step."""
    kept: State | None = None
    """The newest state that is kept, where it is kept."""


class Facts(NamedTuple):
    """What is true at the moment of a step, and may not be when its state is kept."""

    excused: frozenset[int]
    """Nodes that may be taken for lost."""
    alone: bool
    """Whether the coordinator cannot tell who is cut off, it or everybody."""
    woke: bool
    """Whether the coordinator slept just now."""


class AuditStep(NamedTuple):
    """One step of a coordinator: its states one after another, and who has said what. `facts` where a round ended."""

    number: int
    states: tuple[State, ...]
    node: int | None
    request: Request | WatcherRequest | None
    facts: Facts | None


def number_of(node: NodeId) -> int:
    """Which node of the scenario this is; an absent is none."""
    return int(node.addr.rpartition(".")[2]) if node.addr else -1 - node.number


def common(placement: Placement) -> tuple[object, ...]:
    """What all nodes of a round must be told alike."""
    return (
        placement.round,
        placement.group_world_size,
        placement.ranks.world_size,
        placement.store_address,
        placement.store_port,
        placement.restarts,
        placement.control_rank,
        placement.restart_workers,
    )
