"""Process groups: the map there and back, and what is said of ranks that are not in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UserError
from rallypoint.ranks.groups import ProcessGroupRanks


@given(st.lists(st.integers(0, 1000), unique=True, min_size=1))
def test_there_and_back(ranks: list[int]) -> None:
    group = ProcessGroupRanks(ranks)
    assert group.size == len(group) == len(ranks)
    for place, rank in enumerate(ranks):
        assert group.group_rank(rank) == place
        assert group.global_rank(place) == rank
        assert rank in group


def test_a_rank_that_is_not_in_the_group_is_named_with_its_members() -> None:
    group = ProcessGroupRanks([4, 2, 7], name="evens")
    with pytest.raises(UserError, match=r"global rank 3 is not in process group 'evens', whose members are 4, 2, 7"):
        group.group_rank(3)
    with pytest.raises(UserError, match=r"process group 'evens' has ranks 0 to 2, not 3"):
        group.global_rank(3)
    with pytest.raises(UserError, match=r"has ranks 0 to 2, not -1"):
        group.global_rank(-1)
    assert 3 not in group


def test_a_large_group_is_not_listed_in_full() -> None:
    with pytest.raises(UserError, match=r"15 and 84 more$"):
        ProcessGroupRanks(range(100)).group_rank(100)


def test_a_rank_may_be_in_a_group_once_and_not_below_zero() -> None:
    with pytest.raises(UserError, match="has the global rank 5 twice"):
        ProcessGroupRanks([5, 1, 5])
    with pytest.raises(UserError, match="names the global rank -1"):
        ProcessGroupRanks([0, -1])
