"""Ranks, compared with a simple model that numbers workers one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.membership.rules import assign_group_ranks, assign_worker_ranks
from rallypoint.control.membership.state import NodeRanks

MEMBERS = st.lists(st.tuples(st.sampled_from("ABC"), st.integers(1, 5)), min_size=1, max_size=12)


def count_ranks(members: list[tuple[str, int]]) -> list[NodeRanks]:
    """Number every worker; a node's ranks are those of its first worker."""
    workers = [(node, role) for node, (role, size) in enumerate(members) for _ in range(size)]
    ranks = []
    for node, (role, _) in enumerate(members):
        first = next(index for index, (owner, _) in enumerate(workers) if owner == node)
        of_role = [index for index, (_, other) in enumerate(workers) if other == role]
        ranks.append(NodeRanks(first, len(workers), of_role.index(first), len(of_role)))
    return ranks


@given(MEMBERS)
def test_worker_ranks(members: list[tuple[str, int]]) -> None:
    assert assign_worker_ranks(members) == count_ranks(members)


RANKS = st.dictionaries(st.integers(0, 9), st.integers(-1, 11))


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), RANKS, RANKS)
def test_group_ranks_of_survivors_are_kept(nodes: list[int], former: dict[int, int], hints: dict[int, int]) -> None:
    ranks = assign_group_ranks(nodes, former, hints)
    assert sorted(ranks.values()) == list(range(len(nodes)))
    assert set(ranks) == set(nodes)
    claimed: set[int] = set()
    for node in nodes:
        claim = former.get(node, -1)
        if 0 <= claim < len(nodes) and claim not in claimed:
            assert ranks[node] == claim
            claimed.add(claim)


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), RANKS)
def test_hints_count_without_claims_and_order_without_hints(nodes: list[int], hints: dict[int, int]) -> None:
    ranks = assign_group_ranks(nodes, {}, hints)
    for place, node in enumerate(nodes):
        hint = hints.get(node)
        first = hint not in [hints.get(other) for other in nodes[:place]]
        if hint is not None and 0 <= hint < len(nodes) and first:
            assert ranks[node] == hint
    assert assign_group_ranks(nodes) == {node: place for place, node in enumerate(nodes)}
