"""The report of a hang, for the log of every node. Pure.

Law: the report has at most `MAX_LINES` lines, since it goes to every node's log, however large the job is. Ranks that
differ come first, and a line says where the full evidence is.

Ranks in the same place are grouped. The flight recorders of all ranks tell which ranks have not joined a collective.

Each rank numbers the collectives of a process group consecutively. So the ranks of a group with the lowest last number
have not reached the next collective, in which the others are waiting for them. If all have the same number, they are in
the same collective, or the program is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.log import ranges
from rallypoint.observe.hangs.messages import (
    Collective,
    NodeEvidence,
    ProcessEvidence,
    RankEvidence,
    RankRange,
    RankRecord,
    ranks_of,
    title,
)
from rallypoint.observe.stacks import MAX_FRAMES, Call, calls_in_words, calls_of, main_frames, short_lines, summary_of

if TYPE_CHECKING:
    from rallypoint.observe.hangs.evidence import WorkerStacks


_USUAL = frozenset({"running", "sleeping"})
"""States that are normal in a hang: a waiting process sleeps, and a spinning process runs."""
DIFFERS = "  <- differs"
_MAX_RANGES = 16
"""Maximum number of ranges of ranks per line."""
_MAX_PARTS = 8
"""Maximum number of groups of ranks in the line about a silent job: the smallest ones."""


class Situation(NamedTuple):
    """Where a rank is, without details that differ between ranks in the same place. `calls` are its main thread's,
    innermost first.
    """

    state: str
    calls: tuple[Call, ...]
    note: str = ""

    @property
    def headline(self) -> str:
        text = ", ".join(text for text in (self.state, summary_of(self.calls)) if text)
        return "; ".join(filter(None, (text, self.note))) or "no information"

    @property
    def phrase(self) -> str:
        """Words that follow the ranks in a sentence."""
        text = f"in {words}" if (words := calls_in_words(self.calls)) else self.state.replace(" exit code", "")
        return " ".join(filter(None, (text, f"({self.note})" if self.note else ""))) or "not readable"


class RankGroup(NamedTuple):
    """Ranks in the same situation. `differs`: another group has more ranks."""

    ranks: tuple[int, ...]
    situation: Situation
    differs: bool

    @property
    def line(self) -> str:
        """`3 ranks (0-2): all_reduce, train.py:41`."""
        return f"{ranks_text(self.ranks)}: {self.situation.headline}{DIFFERS if self.differs else ''}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks; standby workers have negative numbers (`features/reports`)."""
    own = [rank for rank in ranks if rank >= 0]
    standby = len(ranks) - len(own)
    texts = [f"{len(own)} rank{'' if len(own) == 1 else 's'} ({_first_of(ranges(own))})"] if own else []
    texts += [f"{standby} standby worker{'' if standby == 1 else 's'}"] if standby else []
    return " and ".join(texts)


def _first_of(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MAX_RANGES} more ranges" if len(texts) > _MAX_RANGES else ""
    return f"{', '.join(texts[:_MAX_RANGES])}{more}"


def situation_of(process: RankEvidence | ProcessEvidence) -> Situation:
    calls, note = calls_of(process.frames), process.note if isinstance(process, RankEvidence) else ""
    if isinstance(process, RankEvidence) and process.exit_code is not None:
        return Situation(f"{process.state} with exit code {process.exit_code}", calls, note)
    if calls and process.state in _USUAL:
        return Situation("", calls, note)
    return Situation(f"{process.state} ({process.where})" if process.where else process.state, calls, note)


def groups_of(ranks: Iterable[RankEvidence]) -> list[RankGroup]:
    """Group ranks: largest group first, then by lowest rank. Groups smaller than the largest differ."""
    members: dict[Situation, list[int]] = {}
    for evidence in sorted(ranks, key=lambda evidence: evidence.rank):
        members.setdefault(situation_of(evidence), []).append(evidence.rank)
    in_order = sorted(members.items(), key=lambda entry: (-len(entry[1]), entry[1]))
    most = len(in_order[0][1]) if in_order else 0
    return [RankGroup(tuple(ranks), situation, len(ranks) < most) for situation, ranks in in_order]


# Collectives


MAX_FINDINGS = 12
_DEFAULT = "default_pg"


class _ProcessGroup(NamedTuple):
    name: str
    members: tuple[int, ...]
    records: Mapping[int, Mapping[int, Collective]]
    """Collectives by rank and sequence number."""


def findings(records: Sequence[RankRecord], ranks: Collection[int]) -> list[str]:
    """Yield a sentence per process group whose ranks (all, or only those that dumped) disagree or wait together."""
    known = {record.rank for record in records}
    lines = [text for group in _groups(records, ranks) for text in _of_group(group, known)]
    lines += [f"rank {record.rank} is waiting in {text}" for record in records for text in record.pending[-1:]]
    more = [f"and {len(lines) - MAX_FINDINGS} more such lines"] if len(lines) > MAX_FINDINGS else []
    return [*lines[:MAX_FINDINGS], *more]


def _groups(records: Iterable[RankRecord], ranks: Collection[int]) -> list[_ProcessGroup]:
    """Group records by name, description and members: on different ranks, two groups may have the same name."""
    by_group: dict[tuple[str, str, tuple[RankRange, ...]], dict[int, dict[int, Collective]]] = {}
    for record in records:
        for group in record.groups:
            by_rank = by_group.setdefault((group.name, group.description, group.members), {})
            by_rank[record.rank] = {entry.sequence: entry for entry in group.last}
    return [
        _ProcessGroup(
            title(name, description), ranks_of(members) or _members_seen(description, by_rank, ranks), by_rank
        )
        for (name, description, members), by_rank in by_group.items()
    ]


def _members_seen(description: str, by_rank: Mapping[int, object], ranks: Collection[int]) -> tuple[int, ...]:
    """Members of a group whose dump does not list them, as with gloo."""
    return tuple(sorted(ranks)) if description == _DEFAULT else tuple(sorted(by_rank))


def _of_group(group: _ProcessGroup, known: Collection[int]) -> Iterable[str]:
    last = {rank: max(group.records.get(rank, {}), default=0) for rank in group.members if rank in known}
    if not last:
        return
    top, least = max(last.values()), min(last.values())
    unknown = [rank for rank in group.members if rank not in known]
    beyond = f"; no dump from {_ranks(unknown)}" if unknown else ""
    if least < top:
        number = least + 1
        there = [rank for rank, at in last.items() if at >= number]
        absent = [rank for rank, at in last.items() if at < number]
        named = next((entry for rank in there if (entry := group.records[rank].get(number))), None)
        what = f"{named.operation if named else 'a collective'} #{number} of {group.name}{_place(named)}"
        yield f"{what}: joined by {_ranks(there)}, not by {_ranks(absent)}{beyond}"
        return
    at_top = {rank: group.records[rank][top] for rank in last if top in group.records.get(rank, {})}
    waiting = [rank for rank, entry in at_top.items() if not entry.done]
    if not waiting:
        return
    operations = sorted({entry.operation for entry in at_top.values()})
    if len(operations) > 1:
        by_name = (
            f"{name} on {_ranks([rank for rank, entry in at_top.items() if entry.operation == name])}"
            for name in operations
        )
        yield f"#{top} of {group.name} differs between ranks: {', '.join(by_name)}{beyond}"
        return
    first = at_top[waiting[0]]
    missing = "not complete on any" if len(waiting) == len(at_top) else f"not complete on {_ranks(waiting)}"
    joined = f"joined by all with a dump, {_ranks(at_top)}" if unknown else "joined by all"
    yield f"{first.operation} #{top} of {group.name}{_place(first)}: {joined}, {missing}{beyond}"


def _place(collective: Collective | None) -> str:
    return f" ({collective.place})" if collective is not None and collective.place else ""


def _ranks(ranks: Iterable[int]) -> str:
    texts = ranges(ranks)
    return f"rank{'' if len(texts) == 1 and '-' not in texts[0] else 's'} {_first_of(texts)}"


MAX_LINES = 60
_MAX_GROUPS = 16
"""Maximum number of groups to name."""
_MAX_CALLS = 12
"""Maximum number of calls to show per stack: the innermost ones."""
_MAX_CHILDREN = 4
"""Maximum number of places to name of a group's child processes."""
_MAX_HOSTS = 4
"""Maximum number of nodes named in a list."""


def report_lines(nodes: Sequence[NodeEvidence], missing: Sequence[str] = (), more: int = 0) -> list[str]:
    """The report on a hung job, at most `MAX_LINES` lines. `missing` names nodes without evidence, and `more` is how
    many others have none.
    """
    ranks = [rank for node in nodes for rank in node.ranks]
    groups = groups_of(ranks)
    first = [f"  {line}" for line in (*group_lines(groups), *_recorded(nodes))]
    last = [*_without_stacks(nodes), *_missing(missing, more), *_file_places(nodes)]
    stacks = list(_stacks(groups, ranks))
    room = MAX_LINES - len(first) - len(last)
    if len(stacks) > room:
        stacks = [*stacks[: room - 1], "  (more stacks are in the files)"]
    return [*first, *stacks, *last]


def silence_line(nodes: Sequence[NodeEvidence], seconds: float, job: str, missing: int = 0) -> str:
    """One line about a job without active ranks for `seconds`. `missing` nodes have sent no evidence."""
    groups = groups_of(rank for node in nodes for rank in node.ranks)
    groups.sort(key=lambda group: (len(group.ranks), group.ranks))
    parts = [f"{_named(group.ranks)} {group.situation.phrase}" for group in groups[:_MAX_PARTS]]
    parts += [f"{len(groups) - _MAX_PARTS} more groups"] if len(groups) > _MAX_PARTS else []
    parts += [f"no report from {missing} {'node' if missing == 1 else 'nodes'}"] if missing else []
    return f"no rank has shown a sign of life for {seconds:g} s: {', '.join(parts)}; see `rallyctl stacks {job}`"


def _named(ranks: Sequence[int]) -> str:
    texts = ranges(rank for rank in ranks if rank >= 0)
    if not texts:
        return "standby workers"
    return f"{'rank' if len(texts) == 1 and texts[0].isdigit() else 'ranks'} {_first_of(texts)}"


class GatheredStacks:
    """Stacks for an operator: the groups of workers, and the threads of one worker per group."""

    def __init__(self) -> None:
        self._ranks: list[RankEvidence] = []
        self._texts: dict[Situation, str] = {}
        self.any_found = False
        """Whether any worker has a stack."""

    def add(self, workers: Iterable[WorkerStacks]) -> None:
        for stacks in workers:
            rank = RankEvidence(stacks.rank, stacks.error or "running", frames=main_frames(stacks.text)[:MAX_FRAMES])
            self._texts.setdefault(situation_of(rank), stacks.text)
            self._ranks.append(rank)
            self.any_found |= not stacks.error

    def lines(self) -> list[str]:
        groups = groups_of(self._ranks)
        lines = group_lines(groups)
        for group in groups[:_MAX_GROUPS]:
            if shown := short_lines(self._texts[group.situation]):
                lines += ["", group.line, *shown]
        return lines


def stack_lines(workers: Iterable[WorkerStacks]) -> list[str]:
    """Like `GatheredStacks`, for one node."""
    gathered = GatheredStacks()
    gathered.add(workers)
    return gathered.lines()


def group_lines(groups: Sequence[RankGroup]) -> list[str]:
    """A line per group; for many groups, only the largest and the smallest."""
    if len(groups) <= _MAX_GROUPS:
        return [group.line for group in groups]
    half = _MAX_GROUPS // 2
    left = groups[half:-half]
    between = sum(len(group.ranks) for group in left)
    return [
        *(group.line for group in groups[:half]),
        f"{between} more ranks in {len(left)} other places",
        *(group.line for group in groups[-half:]),
    ]


def _recorded(nodes: Sequence[NodeEvidence]) -> Iterable[str]:
    records = [record for node in nodes for record in node.records]
    readable = [record for record in records if not record.why_none]
    for text in findings(readable, {rank.rank for node in nodes for rank in node.ranks}):
        yield f"flight recorder: {text}"
    for why in sorted({record.why_none for record in records if record.why_none})[:_MAX_HOSTS]:
        ranks = [record.rank for record in records if record.why_none == why]
        yield f"no flight recorder dump from {ranks_text(ranks)}: {why}"
    if readable and (path := next((node.dumps for node in nodes if node.dumps), "")):
        folder, _, prefix = path.rpartition("/")
        others = ", with the dumps of all nodes in one folder" if len(nodes) > 1 else ""
        yield f"analysis: torchfrtrace --prefix {prefix} {folder}{others}"


def _stacks(groups: Sequence[RankGroup], ranks: Sequence[RankEvidence]) -> Iterable[str]:
    kernel = {rank.rank: rank.kernel for rank in ranks if rank.kernel}
    for group in sorted(groups[:_MAX_GROUPS], key=lambda group: not group.differs):
        shown = [f"    {call}" for call in group.situation.calls[:_MAX_CALLS]]
        beyond = len(group.situation.calls) - len(shown)
        shown += [f"    and {beyond} more"] if beyond > 0 else []
        inside = next((kernel[rank] for rank in group.ranks if rank in kernel), ())
        shown += ["    in the kernel:", *(f"      {line}" for line in inside[:_MAX_CALLS])] if inside else []
        shown += [f"    {line}" for line in _children(ranks, group)]
        if shown:
            yield f"  {ranks_text(group.ranks)}, innermost call first:"
            yield from shown


def _children(ranks: Sequence[RankEvidence], group: RankGroup) -> Iterable[str]:
    """Where these ranks' child processes are, counted over all ranks; the rarest place first."""
    members = frozenset(group.ranks)
    counted = Counter(situation_of(child) for rank in ranks if rank.rank in members for child in rank.children)
    for situation, count in sorted(counted.items(), key=lambda entry: entry[1])[:_MAX_CHILDREN]:
        yield f"{count} child process{'' if count == 1 else 'es'}: {situation.headline}"


def _without_stacks(nodes: Sequence[NodeEvidence]) -> list[str]:
    hosts: dict[str, dict[str, list[int]]] = {}
    for node in nodes:
        for rank in node.ranks:
            if rank.why_none:
                hosts.setdefault(rank.why_none, {}).setdefault(node.host, []).append(rank.rank)
    follow = "; they follow when the workers are stopped" if any(node.stacks_follow for node in nodes) else ""
    return [
        f"  no Python stacks from {ranks_text(sorted(rank for ranks in ranks_by_node.values() for rank in ranks))} on "
        f"{_names([*ranks_by_node])}: {why}{follow}"
        for why, ranks_by_node in sorted(hosts.items())[:_MAX_HOSTS]
    ]


def _missing(names: Sequence[str], more: int) -> list[str]:
    return [f"  no evidence from {_names(names, more)}"] if names or more else []


def _file_places(nodes: Sequence[NodeEvidence]) -> list[str]:
    places = [f"{node.kept} on {node.host}" for node in nodes if node.kept]
    more = f" and on {len(places) - _MAX_HOSTS} more nodes" if len(places) > _MAX_HOSTS else ""
    return [f"  full evidence: {', '.join(places[:_MAX_HOSTS])}{more}"] if places else []


def _names(names: Sequence[str], more: int = 0) -> str:
    named = names[:_MAX_HOSTS]
    more += len(names) - len(named)
    rest = f"{more} more" if named else f"{more} nodes"
    return " and ".join(text for text in (", ".join(named), rest if more else "") if text)
