"""Finds ranks that are behind the others, by the steps that they report (`notices.progress`). Pure; only reported."""

from __future__ import annotations

from typing import NamedTuple

from rallypoint.protocol.observation import Snapshot


class Straggler(NamedTuple):
    """A rank that is `behind` the median by so many steps, on the node of this name."""

    rank: int
    node: str
    step: int
    behind: int


class Steps(NamedTuple):
    """The steps of all ranks that tell theirs: the median, how many ranks, and who is behind it, the last one first."""

    median: int
    ranks: int
    behind: tuple[Straggler, ...]


def steps_of(snapshot: Snapshot) -> Steps | None:
    """The steps of the ranks of the round that runs; None where fewer than two ranks tell theirs."""
    told = [
        Straggler(node.first_rank + local, node.name, step, 0)
        for node in snapshot.nodes
        if node.report is not None and node.first_rank >= 0
        for local, step in enumerate(node.report.steps)
        if step >= 0
    ]
    if len(told) < 2:
        return None
    median = sorted(each.step for each in told)[len(told) // 2]
    late = [each._replace(behind=median - each.step) for each in told if each.step < median]
    return Steps(median, len(told), tuple(sorted(late, key=lambda each: (-each.behind, each.rank))))
