"""Ranks that are in the same place, once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rallypoint.base.log import ranges
from rallypoint.hangs.frames import Call, calls_of, summary_of
from rallypoint.hangs.messages import ProcessEvidence, RankEvidence

_USUAL = frozenset({"running", "sleeping"})
"""States that say nothing of a hang: what waits sleeps, and what spins runs."""
DIFFERS = "  <- differs"


class Found(NamedTuple):
    """What a rank was found in, without what differs between ranks that do the same. `calls` are those of its main
    thread, the innermost first."""

    state: str
    calls: tuple[Call, ...]

    @property
    def headline(self) -> str:
        """A few words for it."""
        return ", ".join(each for each in (self.state, summary_of(self.calls)) if each) or "nothing is known"


class Group(NamedTuple):
    """Ranks that were found in the same. `differs` if more ranks are in another group than in this."""

    ranks: tuple[int, ...]
    found: Found
    differs: bool

    @property
    def line(self) -> str:
        """`3 ranks (0-2): all_reduce, train.py:41`."""
        return f"{ranks_text(self.ranks)}: {self.found.headline}{DIFFERS if self.differs else ''}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`3 ranks (0-2)`."""
    return f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'} ({', '.join(ranges(ranks))})"


def found_of(process: RankEvidence | ProcessEvidence) -> Found:
    """The finding of a process, in a form that can equal that of others."""
    calls = calls_of(process.frames)
    if isinstance(process, RankEvidence) and process.exit_code is not None:
        return Found(f"{process.state} with exit code {process.exit_code}", calls)
    if calls and process.state in _USUAL:
        return Found("", calls)
    return Found(f"{process.state} ({process.where})" if process.where else process.state, calls)


def groups_of(ranks: Iterable[RankEvidence]) -> list[Group]:
    """The groups, the largest first, then by their lowest rank; those that are smaller than the largest differ."""
    members: dict[Found, list[int]] = {}
    for each in sorted(ranks, key=lambda one: one.rank):
        members.setdefault(found_of(each), []).append(each.rank)
    in_order = sorted(members.items(), key=lambda entry: (-len(entry[1]), entry[1]))
    most = len(in_order[0][1]) if in_order else 0
    return [Group(tuple(ranks), found, len(ranks) < most) for found, ranks in in_order]
