"""The evidence of a hang in words, for the log of every node. Pure.

Law: it is bounded, since it goes to the log of every node of a job of any size: `MAX_LINES` lines, those
that say who differs first, and a line says where all of it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rallypoint.observe.hangs.frames import main_frames, short_lines
from rallypoint.observe.hangs.messages import MAX_FRAMES, NodeEvidence, RankEvidence
from rallypoint.observe.hangs.understand import Group, findings, found_of, groups_of, ranks_text

if TYPE_CHECKING:
    from rallypoint.observe.hangs.stacks import WorkerStacks

MAX_LINES = 60
_MAX_GROUPS = 16
"""Groups that are named."""
_MAX_CALLS = 12
"""Calls of one stack that are shown: the innermost."""
_MAX_CHILDREN = 4
"""Places that processes below the ranks of a group are in, that are named."""
_MAX_HOSTS = 4
"""Nodes that are named where many are meant."""


def report_lines(nodes: Sequence[NodeEvidence], missing: Sequence[str] = ()) -> list[str]:
    """The report of a job that hangs.

    Args:
        nodes: what each node has found.
        missing: names of the nodes that did not answer.

    Returns:
        Lines without line ends, `MAX_LINES` at most.
    """
    ranks = [rank for node in nodes for rank in node.ranks]
    groups = groups_of(ranks)
    first = [f"  {line}" for line in (*group_lines(groups), *_recorded(nodes))]
    last = [*_without_stacks(nodes), *_missing(missing), *_where(nodes)]
    stacks = list(_stacks(groups, ranks))
    room = MAX_LINES - len(first) - len(last)
    if len(stacks) > room:
        stacks = [*stacks[: room - 1], "  (more stacks are in the files)"]
    return [*first, *stacks, *last]


def stack_lines(found: Sequence[WorkerStacks]) -> list[str]:
    """Stacks of workers that an operator has asked for: who is where, and below that the threads of one of each."""
    texts = {each.rank: each for each in found}
    groups = groups_of(
        RankEvidence(each.rank, each.error or "running", frames=main_frames(each.text)[:MAX_FRAMES]) for each in found
    )
    lines = [each.line for each in groups]
    for group in groups:
        if shown := short_lines(texts[group.ranks[0]].text):
            lines += ["", group.line, *shown]
    return lines


def group_lines(groups: Sequence[Group]) -> list[str]:
    """A line for each group; of many, the largest and the smallest."""
    if len(groups) <= _MAX_GROUPS:
        return [each.line for each in groups]
    half = _MAX_GROUPS // 2
    left = groups[half:-half]
    between = sum(len(each.ranks) for each in left)
    return [
        *(each.line for each in groups[:half]),
        f"{between} more ranks in {len(left)} other places",
        *(each.line for each in groups[-half:]),
    ]


def _recorded(nodes: Sequence[NodeEvidence]) -> Iterable[str]:
    records = [record for node in nodes for record in node.records]
    told = [each for each in records if not each.why_none]
    for text in findings(told, {rank.rank for node in nodes for rank in node.ranks}):
        yield f"flight recorder: {text}"
    for why in sorted({each.why_none for each in records if each.why_none})[:_MAX_HOSTS]:
        yield f"no flight recorder of {ranks_text([each.rank for each in records if each.why_none == why])}: {why}"
    if told and (path := next((each.dumps for each in nodes if each.dumps), "")):
        folder, _, prefix = path.rpartition("/")
        others = ", with the dumps of all nodes in one folder" if len(nodes) > 1 else ""
        yield f"analysis: torchfrtrace --prefix {prefix} {folder}{others}"


def _stacks(groups: Sequence[Group], ranks: Sequence[RankEvidence]) -> Iterable[str]:
    kernel = {each.rank: each.kernel for each in ranks if each.kernel}
    for group in sorted(groups[:_MAX_GROUPS], key=lambda each: not each.differs):
        shown = [f"    {each}" for each in group.found.calls[:_MAX_CALLS]]
        beyond = len(group.found.calls) - len(shown)
        shown += [f"    and {beyond} more"] if beyond > 0 else []
        inside = next((kernel[each] for each in group.ranks if each in kernel), ())
        shown += ["    in the kernel:", *(f"      {each}" for each in inside[:_MAX_CALLS])] if inside else []
        shown += [f"    {line}" for line in _children(ranks, group)]
        if shown:
            yield f"  {ranks_text(group.ranks)} in, the innermost call first:"
            yield from shown


def _children(ranks: Sequence[RankEvidence], group: Group) -> Iterable[str]:
    """What the processes below these ranks are in, those of all ranks counted together: what few are in first."""
    members = frozenset(group.ranks)
    counted = Counter(found_of(child) for each in ranks if each.rank in members for child in each.children)
    for found, count in sorted(counted.items(), key=lambda entry: entry[1])[:_MAX_CHILDREN]:
        yield f"{count} process{'' if count == 1 else 'es'} below: {found.headline}"


def _without_stacks(nodes: Sequence[NodeEvidence]) -> list[str]:
    hosts: dict[str, dict[str, list[int]]] = {}
    for node in nodes:
        for rank in node.ranks:
            if rank.why_none:
                hosts.setdefault(rank.why_none, {}).setdefault(node.host, []).append(rank.rank)
    follow = "; they follow when the workers are ended" if any(node.stacks_follow for node in nodes) else ""
    return [
        f"  no Python stacks of {ranks_text(sorted(rank for ranks in found.values() for rank in ranks))} on "
        f"{_names([*found])}: {why}{follow}"
        for why, found in sorted(hosts.items())[:_MAX_HOSTS]
    ]


def _missing(names: Sequence[str]) -> list[str]:
    return [f"  no evidence came from {_names(names)}"] if names else []


def _where(nodes: Sequence[NodeEvidence]) -> list[str]:
    kept = [f"{each.kept} on {each.host}" for each in nodes if each.kept]
    more = f" and on {len(kept) - _MAX_HOSTS} more nodes" if len(kept) > _MAX_HOSTS else ""
    return [f"  all of it: {', '.join(kept[:_MAX_HOSTS])}{more}"] if kept else []


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_HOSTS} more" if len(names) > _MAX_HOSTS else ""
    return f"{', '.join(names[:_MAX_HOSTS])}{more}"
