"""The kinds of faults, and the plan that a seed draws. Pure."""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import NamedTuple


class Backend(StrEnum):
    """Where the coordinator is."""

    C10D = "c10d"
    SERVE = "serve"
    ETCD = "etcd"


class Kind(NamedTuple):
    """A kind of fault: how often it is drawn, which numbers of failures it may add, and where it makes sense."""

    name: str
    weight: int
    failures: frozenset[int]
    backends: frozenset[Backend] = frozenset(Backend)


_NONE, _ONE, _EITHER = frozenset({0}), frozenset({1}), frozenset({0, 1})

KINDS = (
    Kind("worker killed", 5, _ONE),
    Kind("workers of two nodes killed", 3, _ONE),
    Kind("worker exits with a code", 3, _ONE),
    Kind("worker paused", 1, _NONE),
    Kind("agent killed", 4, _NONE),
    Kind("agent terminated", 3, _NONE),
    Kind("agent paused for less than the lease", 2, _NONE),
    Kind("agent paused for more than the lease", 2, _NONE),
    Kind("reaper killed", 2, _EITHER),
    Kind("control plane killed", 3, _NONE, frozenset({Backend.SERVE})),
    Kind("etcd's leader killed", 3, _NONE, frozenset({Backend.ETCD})),
    Kind("etcd's leader paused", 2, _NONE, frozenset({Backend.ETCD})),
)


class Fault(NamedTuple):
    """One fault: its kind, the seconds that the job runs before it, and a number that chooses the victims."""

    kind: Kind
    after: float
    choice: int


def plan(backend: Backend, count: int, seed: int) -> list[Fault]:
    """The faults that a seed draws for this backend."""
    rng = Random(f"{backend} {seed}")
    kinds = [each for each in KINDS if backend in each.backends]
    drawn = rng.choices(kinds, [each.weight for each in kinds], k=count)
    return [Fault(each, rng.choice((0.0, 0.05, 0.3, 1.0)), rng.randrange(1 << 30)) for each in drawn]
