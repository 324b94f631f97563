"""The parts of a case of the corpus."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Source(StrEnum):
    """Where a person reads what has happened."""

    CONSOLE = "console"
    STATUS = "rallyctl status"
    INCIDENT = "the stacks in --incident-dir"


class Act(NamedTuple):
    """A signal to the agent of one node, or to its process group, once all workers of the job have printed READY."""

    signal: int
    node: int = 0
    group: bool = False


class Case(NamedTuple):
    """A program, how it is launched, and the answer that is right.

    `says` are regular expressions that the answer must match, all of them; they hold the words of the true cause and,
    where no report names a rank, the rank. `rank` is the true one, that a report's root cause names; None where any
    will do, since all ranks fail alike, or since it is not a rank that has failed. `never` are regular expressions of
    another cause: the answer must not match one before it has matched all of `says`.

    `flags` are understood by both launchers, `own_flags` by rallyrun only. `workers` is their number on each node.
    `shell` is sh that ends in `exec "$@"`, where the launch needs something around it. `seconds` are those in which the
    answer must be there. `fast`: `make test` runs it. `needs` is what the machine must offer (`running.missing`).
    `issue` is the name of the case in the table of issue 45. `by_chance`: what comes of it depends on who is faster.
    """

    name: str
    program: str
    says: tuple[str, ...]
    rank: int | None = None
    never: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    own_flags: tuple[str, ...] = ()
    nodes: int = 1
    workers: int = 2
    shell: str = ""
    act: Act | None = None
    source: Source = Source.CONSOLE
    seconds: float = 30.0
    fast: bool = False
    needs: tuple[str, ...] = ()
    issue: str = ""
    by_chance: bool = False
