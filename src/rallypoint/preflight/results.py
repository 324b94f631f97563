"""The results of checks, and what follows from a list of them. Pure.

Laws:

1. PASS: nothing is in the way. Where a check does not apply here, or its fact cannot be known, it is a PASS that is not
   `known`: the fact says why, and the line "not checked".
2. WARN: the job may run, and something will be slow, unreliable or misleading. FAIL: it cannot work as it is.
3. Who requires a check wants it known and passed: anything else is a FAIL then.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple


class Status(StrEnum):
    """The status of a check."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


EXIT_CODES = {Status.PASS: 0, Status.WARN: 1, Status.FAIL: 2}
"""The exit code of `rallyctl check`, by the worst status."""


class CheckResult(NamedTuple):
    """One line: the check's name, what was found, and what to do about it unless it has passed."""

    name: str
    status: Status
    fact: str
    remedy: str = ""
    known: bool = True
    """Whether anything was found out."""

    def __str__(self) -> str:
        return f"{self.status.value} {self.name}: {self.finding}"

    @property
    def finding(self) -> str:
        """The fact and the remedy."""
        fact = self.fact if self.known else f"not checked: {self.fact}"
        return f"{fact}; {self.remedy}" if self.remedy else fact


class Judgement(NamedTuple):
    """A `CheckResult` without the check's name: what a check makes of a fact."""

    status: Status
    fact: str
    remedy: str = ""
    known: bool = True

    def of(self, name: str) -> CheckResult:
        """The result of the check of that name."""
        return CheckResult(name, *self)


def passed(fact: str) -> Judgement:
    """Nothing is in the way."""
    return Judgement(Status.PASS, fact)


def warned(fact: str, remedy: str) -> Judgement:
    """Something will be slow, unreliable or misleading."""
    return Judgement(Status.WARN, fact, remedy)


def failed(fact: str, remedy: str) -> Judgement:
    """It cannot work as it is."""
    return Judgement(Status.FAIL, fact, remedy)


def not_known(why: str) -> Judgement:
    """The check does not apply here, or its fact cannot be known."""
    return Judgement(Status.PASS, why, known=False)


def worst(results: Iterable[CheckResult]) -> Status:
    """The worst status of all; PASS of none."""
    return max((each.status for each in results), key=EXIT_CODES.__getitem__, default=Status.PASS)


def with_required(results: Iterable[CheckResult], names: Collection[str]) -> list[CheckResult]:
    """The results, where those of the checks that are required count as law 3 says."""
    return [_required(each) if each.name in names else each for each in results]


def _required(result: CheckResult) -> CheckResult:
    if not result.known:
        return result._replace(status=Status.FAIL, remedy="it is required, so see to it that it can be")
    return result if result.status is Status.PASS else result._replace(status=Status.FAIL)


def counts(results: Sequence[CheckResult]) -> str:
    """How many there are of each status, for people: `12 PASS, 1 WARN`."""
    found = [(sum(each.status is status for each in results), status.value) for status in Status]
    return ", ".join(f"{number} {status}" for number, status in found if number) or "no checks"


VERSION = 1
"""The version of the JSON. Fields are added within a version, never renamed or removed."""


def results_json(results: Sequence[CheckResult]) -> str:
    """The results as JSON; `docs/how-to/preflight.md` describes each field."""
    checks = [each._asdict() for each in results]
    return json.dumps({"version": VERSION, "status": worst(results), "checks": checks}, indent=2)
