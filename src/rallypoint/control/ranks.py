"""Assigns a group rank to each node, and ranks to its workers.

Laws:

1. Group ranks are 0..n-1, each once.
2. A survivor keeps its group rank if that exists in the new round; new nodes get the free ones.
3. A hint is honoured if the rank is free; of two equal hints the first in order wins.
4. Workers are numbered node by node in group-rank order; roles never reorder them (contract section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.light_typing import NamedTuple, TypeVar

N = TypeVar("N")


class NodeRanks(NamedTuple):
    """The ranks of a node's first worker, and the sizes that all its workers see.

    The worker of local rank `l` has the global rank `base_rank + l` and the role rank `base_role_rank + l`.
    """

    base_rank: int
    world_size: int
    base_role_rank: int
    role_world_size: int


def assign_group_ranks(
    nodes: Sequence[N], previous: Mapping[N, int] | None = None, hints: Mapping[N, int] | None = None
) -> dict[N, int]:
    """Assign each of `nodes` a group rank.

    Args:
        nodes: all participants; those without a claim get the free ranks in this order.
        previous: the ranks that survivors had in the round before.
        hints: ranks that nodes asked for.
    """
    taken: dict[int, N] = {}
    for claims in (previous or {}, hints or {}):
        placed = set(taken.values())
        for node in nodes:
            rank = claims.get(node)
            if rank is not None and 0 <= rank < len(nodes) and node not in placed:
                taken.setdefault(rank, node)
    placed = set(taken.values())
    holes = (rank for rank in range(len(nodes)) if rank not in taken)
    unplaced = [node for node in nodes if node not in placed]
    return {node: rank for rank, node in taken.items()} | dict(zip(unplaced, holes, strict=False))


def assign_worker_ranks(members: Sequence[tuple[str, int]]) -> list[NodeRanks]:
    """The ranks of each node's workers; `members` are (role, local world size) in group-rank order."""
    world_size = sum(size for _, size in members)
    role_sizes: dict[str, int] = {}
    bases: list[tuple[int, int]] = []
    base = 0
    for role, size in members:
        bases.append((base, role_sizes.get(role, 0)))
        base += size
        role_sizes[role] = role_sizes.get(role, 0) + size
    return [
        NodeRanks(base_rank, world_size, base_role_rank, role_sizes[role])
        for (base_rank, base_role_rank), (role, _) in zip(bases, members, strict=True)
    ]
