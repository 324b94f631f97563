"""Who is behind the others: told of the ranks that tell their steps, and of nobody else."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.observe.status import Straggler, status_fields, status_lines, steps_of
from rallypoint.protocol.observation import Snapshot
from rallypoint.protocol.operator_messages import NodeReport
from tests.unit.observe.snapshots import node, snapshot


def snapshot_with(*steps: tuple[int, ...]) -> Snapshot:
    """A job whose nodes report these steps of their workers."""
    reports = [NodeReport(4, steps=each) for each in steps]
    return snapshot(nodes=0)._replace(nodes=tuple(node(number, report=each) for number, each in enumerate(reports)))


def test_ranks_are_told_by_how_far_they_are_behind() -> None:
    seen = snapshot_with((120, 118), (120, 97), (120, -1))
    assert steps_of(seen) == (120, 5, (Straggler(3, "n1 (rank 1)", 97, 23), Straggler(1, "n0 (rank 0)", 118, 2)))
    lines = status_lines(seen)
    at = lines.index("steps behind the median of 5 ranks, which is 120")
    assert [each.split() for each in lines[at + 1 : at + 4]] == [
        ["RANK", "NODE", "STEP", "BEHIND"],
        ["3", "n1", "(rank", "1)", "97", "23"],
        ["1", "n0", "(rank", "0)", "118", "2"],
    ]
    assert status_fields(seen, 1e9)["stragglers"]["behind"][0] == {
        "rank": 3,
        "node": "n1 (rank 1)",
        "step": 97,
        "behind": 23,
    }


def test_who_is_alone_or_with_all_others_is_not_behind() -> None:
    for seen in (snapshot_with((7, -1), ()), snapshot_with((), ()), snapshot_with((5, 5), (5, 5))):
        assert not any("behind" in each for each in status_lines(seen))
    assert status_fields(snapshot_with((7, -1), ()), 1e9)["stragglers"] is None
    assert status_fields(snapshot_with((5, 5)), 1e9)["stragglers"] == {"median_step": 5, "ranks": 2, "behind": []}


def test_of_many_a_few_are_shown() -> None:
    seen = snapshot_with(*((step, 1000) for step in range(40)), (1000, 1000))
    lines = status_lines(seen)
    assert "  and 30 more" in lines
    assert len([each for each in lines if each.split()[-2:] == ["0", "1000"]]) == 1, "rank 0 has told step 0"


@given(st.lists(st.tuples(st.integers(-1, 50), st.integers(-1, 50)), max_size=8))
def test_the_median_is_one_of_the_steps_and_splits_them(steps: list[tuple[int, int]]) -> None:
    told = [each for pair in steps for each in pair if each >= 0]
    found = steps_of(snapshot_with(*steps))
    if len(told) < 2:
        assert found is None
        return
    assert found is not None
    assert found.median == statistics.median_high(told)
    assert [each.behind for each in found.behind] == sorted(found.median - s for s in told if s < found.median)[::-1]
