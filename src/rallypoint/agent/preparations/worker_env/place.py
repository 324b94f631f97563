"""The data that a framework's variables are made from, and the definition of a kind. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from rallypoint.agent.preparations.peer_record import PeerRecord


class WorkerPlace(NamedTuple):
    """One worker in its round.

    `local_rank` is the one that the worker sees, 0 for each if local ranks are virtual; then `gpus` is 1.

    Args:
        rank: among all workers of the round.
        world_size: the number of these.
        local_rank: the rank on its node.
        local_world_size: the number of workers on its node.
        records: the records of the nodes that its kinds require, by group rank.
        inherited: the environment of the agent.
        gpus: the number of GPUs visible to the workers of the node; 0 if that is not known.
        shares_gpus: whether the workers of the node divide those among themselves.
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
        names: the names of all variables that it may set.
        variables: makes the variables of one worker.
        ports: the number of ports that a node reserves, by its group rank and its number of workers.
        wanted: the nodes whose records it needs, by the number of nodes.
    """

    names: frozenset[str]
    variables: Callable[[WorkerPlace], Mapping[str, str]]
    ports: Callable[[int, int], int] | None = None
    wanted: Callable[[int], Collection[int]] | None = None
