"""Checks, their results, and the conclusions from a list of results.

Laws:

1. PASS: no obstacle was found. SKIP: the check does not apply, or its fact is unavailable; the fact says why.
2. WARN: the job may run, but something will be slow, unreliable or misleading. FAIL: the job cannot work like this.
3. A required check must pass, so a SKIP then counts as a FAIL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.errors import PreflightError
from rallypoint.base.log import get_logger

if TYPE_CHECKING:
    from rallypoint.control.client.dialing import DialTarget

_log = get_logger(__name__)


class Status(StrEnum):
    PASS = "PASS"
    SKIP = "SKIP"
    WARN = "WARN"
    FAIL = "FAIL"


EXIT_CODES = {Status.PASS: 0, Status.SKIP: 0, Status.WARN: 1, Status.FAIL: 2}
"""Exit codes of `rallyctl check`, by worst status."""


class CheckResult(NamedTuple):
    """One line: the check's name, the finding, and the remedy unless it passed.

    Functions that check leave the name empty: `Check` adds it.
    """

    name: str
    status: Status
    fact: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.status.value} {self.name}: {self.finding}"

    @property
    def finding(self) -> str:
        return f"{self.fact}; {self.remedy}" if self.remedy else self.fact


def passed(fact: str) -> CheckResult:
    return CheckResult("", Status.PASS, fact)


def warned(fact: str, remedy: str) -> CheckResult:
    return CheckResult("", Status.WARN, fact, remedy)


def failed(fact: str, remedy: str) -> CheckResult:
    return CheckResult("", Status.FAIL, fact, remedy)


def skipped(why: str) -> CheckResult:
    return CheckResult("", Status.SKIP, why)


def by_amount(fact: str, amount: float, least: float, enough: float, remedy: str) -> CheckResult:
    """Return a FAIL below `least`, a WARN below `enough`."""
    if amount >= enough:
        return passed(fact)
    return failed(fact, remedy) if amount < least else warned(fact, remedy)


class CheckInputs(NamedTuple):
    """The inputs of the checks.

    `log_dir` is empty if logs go to the temporary folder. `endpoints` are the hosts and ports where nodes meet; empty
    if nothing has to be reached. `job` is the job's id, or empty. `workers` and `max_nodes` are the numbers for this
    node and the job, 0 if unknown. A node that `joins` afterwards waits for missing services.
    """

    log_dir: str = ""
    endpoints: tuple[tuple[str, int], ...] = ()
    backend: str = "c10d"
    job: str = ""
    workers: int = 0
    max_nodes: int = 0
    joins: bool = False
    coordinators: Callable[[], list[DialTarget]] | None = None
    """Returns where the job's coordinator may be; None without a control plane. May take seconds; raises like the
    agent's `coordinators`.
    """


class Check(NamedTuple):
    """A function that checks, and the names of its results in order: several if they need the same facts.

    `silence` is the result if none arrives in time. A function that can block in the kernel forever is marked
    `may_hang`, and runs in a separate process. All others only wait for the network, for a few seconds at most.
    """

    names: tuple[str, ...]
    find: Callable[[CheckInputs], Iterable[CheckResult]]
    silence: CheckResult
    may_hang: bool = False

    def results(self, inputs: CheckInputs) -> list[CheckResult]:
        try:
            named = zip(self.names, self.find(inputs), strict=True)
            return [result._replace(name=name) for name, result in named]
        except Exception as error:
            return self.for_all_names(
                warned(f"the check itself failed ({type(error).__name__}: {error})", "please report it")
            )

    def for_all_names(self, result: CheckResult) -> list[CheckResult]:
        return [result._replace(name=name) for name in self.names]


# Conclusions from results


def worst(results: Iterable[CheckResult]) -> Status:
    statuses = (result.status for result in results if result.status is not Status.SKIP)
    return max(statuses, key=EXIT_CODES.__getitem__, default=Status.PASS)


def with_required(results: Iterable[CheckResult], names: Collection[str]) -> list[CheckResult]:
    """Apply law 3 to the results of required checks."""
    return [_required(result) if result.name in names else result for result in results]


def _required(result: CheckResult) -> CheckResult:
    if result.status is Status.SKIP:
        fact = f"not checked: {result.fact}"
        return result._replace(
            status=Status.FAIL,
            fact=fact,
            remedy="it is required; make this check possible, or remove it from --require",
        )
    return result if result.status is Status.PASS else result._replace(status=Status.FAIL)


def counts(results: Sequence[CheckResult]) -> str:
    """Count the results by status: `12 PASS, 1 WARN`."""
    numbers = [(sum(result.status is status for result in results), status.value) for status in Status]
    return ", ".join(f"{number} {status}" for number, status in numbers if number) or "no checks"


VERSION = 2
"""The version of the JSON format. Within a version, fields may be added, but are never renamed or removed."""


def results_json(results: Sequence[CheckResult]) -> str:
    """The results as JSON; `docs/how-to/preflight.md` describes each field."""
    checks = [result._asdict() for result in results]
    return json.dumps({"version": VERSION, "status": worst(results), "checks": checks}, indent=2)


WARN, REQUIRE = "warn", "require"
"""The values of `--preflight`."""


def admit(results: Sequence[CheckResult], mode: str) -> None:
    """Log each result that is not a PASS as a warning. Raises PreflightError if `mode` is `REQUIRE` and a check failed:
    this node must stay out of the job.
    """
    failures = [result for result in results if result.status is Status.FAIL] if mode == REQUIRE else []
    told_by_error = failures if len(failures) == 1 else []
    for result in results:
        if EXIT_CODES[result.status] and result not in told_by_error:
            _log.warning("%s", result)
    if failures:
        raise PreflightError(_sentence(failures))


def _sentence(failures: Sequence[CheckResult]) -> str:
    if len(failures) == 1:
        return f"this node stays out of the job (--preflight=require): {failures[0]}"
    names = ", ".join(failure.name for failure in failures)
    return f"this node stays out of the job (--preflight=require): {len(failures)} checks failed ({names}); see above"
