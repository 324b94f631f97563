"""Invariants of a job, whatever happens to it, over its workers' records. Pure.

A round is known by the entry that its first worker put into its store: the kernel may give one port to several rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Life(NamedTuple):
    """One worker's life: which rank it had in which round, and from when to when it was seen, in seconds."""

    pid: int
    round: str
    rank: int
    world_size: int
    failures: int
    begun: float
    seen: float


def current(lives: Iterable[Life]) -> dict[int, Life]:
    """The workers by rank of the round that began last."""
    lives = list(lives)
    if not lives:
        return {}
    newest = max(lives, key=lambda life: life.begun).round
    return {life.rank: life for life in lives if life.round == newest}


def is_whole(lives: Iterable[Life], world_size: int, since: float) -> bool:
    """Whether the last round has all ranks of a job of that size, and each was seen after `since`."""
    found = current(lives)
    return sorted(found) == list(range(world_size)) and all(
        each.world_size == world_size and each.seen > since for each in found.values()
    )


def breaches(lives: Iterable[Life], overlap: float) -> Iterator[str]:
    """Each rule that is broken, in words.

    Args:
        lives: of all workers so far.
        overlap: seconds for which a worker of an old round may be seen beside the one that has its rank in a newer.
    """
    lives = list(lives)
    rounds: dict[str, list[Life]] = defaultdict(list)
    for life in lives:
        rounds[life.round].append(life)
    for name, members in rounds.items():
        ranks = [each.rank for each in members]
        sizes = {each.world_size for each in members}
        if len(set(ranks)) < len(ranks):
            yield f"round {name}: a rank has two processes: {sorted(members, key=lambda each: each.rank)}"
        if len(sizes) > 1:
            yield f"round {name}: its workers disagree on the number of workers: {sorted(sizes)}"
        if len({each.failures for each in members}) > 1:
            yield f"round {name}: its workers disagree on the number of failures"
        if max(ranks) >= min(sizes):
            yield f"round {name}: rank {max(ranks)} of {min(sizes)}"
    begun = {name: min(each.begun for each in members) for name, members in rounds.items()}
    by_rank: dict[int, list[Life]] = defaultdict(list)
    for life in lives:
        by_rank[life.rank].append(life)
    for rank, same in by_rank.items():
        in_order = sorted(same, key=lambda each: each.begun)
        for i, old in enumerate(in_order):
            for new in in_order[i + 1 :]:
                if new.round != old.round and begun[new.round] > begun[old.round] and old.seen > new.begun + overlap:
                    yield (
                        f"rank {rank}: pid {old.pid} of an old round was seen {old.seen - new.begun:.1f} s after "
                        f"pid {new.pid} of a newer one began"
                    )
