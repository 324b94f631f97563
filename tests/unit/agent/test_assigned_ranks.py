"""Ranks, against a simple twin that numbers workers one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.membership.rules import assign_group_ranks, assign_worker_ranks
from rallypoint.control.membership.state import NodeRanks

MEMBERS = st.lists(st.tuples(st.sampled_from("ABC"), st.integers(1, 5)), min_size=1, max_size=12)


def dumb_twin(members: list[tuple[str, int]]) -> list[NodeRanks]:
    """Number every worker on its own and look at what the first of each node got."""
    workers = [(node, role) for node, (role, size) in enumerate(members) for _ in range(size)]
    role_rank: dict[int, int] = {}
    for index, (_, role) in enumerate(workers):
        role_rank[index] = sum(1 for _, each in workers[:index] if each == role)
    ranks = []
    for node, (role, _) in enumerate(members):
        first = next(index for index, (each, _) in enumerate(workers) if each == node)
        ranks.append(NodeRanks(first, len(workers), role_rank[first], sum(1 for _, each in workers if each == role)))
    return ranks


@given(MEMBERS)
def test_worker_ranks_are_those_of_the_dumb_twin(members: list[tuple[str, int]]) -> None:
    assert assign_worker_ranks(members) == dumb_twin(members)


def test_the_worked_example_of_the_contract() -> None:
    assert assign_worker_ranks([("A", 1), ("B", 2), ("A", 2)]) == [
        NodeRanks(0, 5, 0, 3),
        NodeRanks(1, 5, 0, 2),
        NodeRanks(3, 5, 1, 3),
    ]


RANKS = st.dictionaries(st.integers(0, 9), st.integers(-1, 11))


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), RANKS, RANKS)
def test_group_ranks_are_each_once_and_survivors_keep_theirs(
    nodes: list[int], former: dict[int, int], hints: dict[int, int]
) -> None:
    ranks = assign_group_ranks(nodes, former, hints)
    assert sorted(ranks.values()) == list(range(len(nodes)))
    assert set(ranks) == set(nodes)
    for node in nodes:
        claim = former.get(node)
        if claim is None or not 0 <= claim < len(nodes):
            continue
        rivals = [each for each in nodes[: nodes.index(node)] if former.get(each) == claim]
        if not rivals:
            assert ranks[node] == claim


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), RANKS)
def test_a_hint_is_honoured_where_nobody_else_has_a_claim(nodes: list[int], hints: dict[int, int]) -> None:
    ranks = assign_group_ranks(nodes, {}, hints)
    for place, node in enumerate(nodes):
        hint = hints.get(node)
        first = hint not in [hints.get(each) for each in nodes[:place]]
        if hint is not None and 0 <= hint < len(nodes) and first:
            assert ranks[node] == hint


def test_without_claims_the_order_decides() -> None:
    assert assign_group_ranks(["x", "a", "m"]) == {"x": 0, "a": 1, "m": 2}
