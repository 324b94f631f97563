"""The definition of a check: facts that are read, and a pure judgement of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from rallypoint.preflight.results import CheckResult, Judgement

if TYPE_CHECKING:
    from rallypoint.client.dialing import DialTarget

F = TypeVar("F")


class CheckInputs(NamedTuple):
    """The inputs of the checks.

    `log_dir` is empty where logs go to the temporary folder; `endpoints` are hosts and ports where nodes meet, none if
    there is nothing to reach; `job` is the job's id, or empty; `workers` and `max_nodes` are how many this node
    and the job will have, 0 if that is not known. A node that `joins` afterwards waits for what is not there yet.
    """

    log_dir: str = ""
    endpoints: tuple[tuple[str, int], ...] = ()
    backend: str = "c10d"
    job: str = ""
    workers: int = 0
    max_nodes: int = 0
    joins: bool = False
    coordinators: Callable[[], list[DialTarget]] | None = None
    """Says where the job's coordinator may be; None if there is no control plane to ask. May take seconds, and raises
    as `coordinators` of the agent does."""


@dataclass(frozen=True)
class Check(Generic[F]):
    """One line of the answer.

    Args:
        name: what users call it.
        meaning: what is looked at, and why it matters.
        warns: when it is a WARN; empty for never.
        fails: when it is a FAIL; empty for never.
        remedy: what to do then.
        judge: what it makes of the facts. Pure.
    """

    name: str
    meaning: str
    warns: str
    fails: str
    remedy: str
    judge: Callable[[F], Judgement]


@dataclass(frozen=True)
class Reading(Generic[F]):
    """Facts that are read at once, and the checks that judge them.

    Args:
        read: reads the facts. Waits for the network some seconds at most, if at all.
        checks: what judges them.
        silence: what each check is if the facts cannot be had in time.
        may_hang: whether reading them may block in the kernel forever: then a separate process does it.
    """

    read: Callable[[CheckInputs], F]
    checks: tuple[Check[F], ...]
    silence: Judgement
    may_hang: bool = False

    def results(self, inputs: CheckInputs) -> list[CheckResult]:
        """Read and judge."""
        facts = self.read(inputs)
        return [each.judge(facts).of(each.name) for each in self.checks]

    def silent(self) -> list[CheckResult]:
        """The results if the facts cannot be had in time."""
        return [self.silence.of(each.name) for each in self.checks]
