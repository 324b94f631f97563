"""What the variables of a framework are made of, and what a kind of them is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from rallypoint.agent.preparations.peer_record import PeerRecord


class WorkerPlace(NamedTuple):
    """One worker in its round.

    `local_rank` is the one that the worker is told, 0 for each where local ranks are virtual; then `gpus` is 1.

    Args:
        rank: among all workers of the round.
        world_size: how many those are.
        local_rank: on its node.
        local_world_size: how many there are.
        records: of the nodes that its kinds want, by group rank.
        inherited: the environment of the agent.
        gpus: how many this worker could see, with the others of its node; 0 if that is not known.
        shares_gpus: whether the workers of the node share those among them.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    records: Mapping[int, PeerRecord]
    inherited: Mapping[str, str]
    gpus: int
    shares_gpus: bool


class Kind(NamedTuple):
    """The variables of one framework.

    Args:
        names: of all that it may set.
        variables: of one worker.
        ports: how many ports a node reserves, by its group rank and its number of workers.
        wanted: of which nodes it needs the records, by the number of nodes.
    """

    names: frozenset[str]
    variables: Callable[[WorkerPlace], Mapping[str, str]]
    ports: Callable[[int, int], int] | None = None
    wanted: Callable[[int], Collection[int]] | None = None
