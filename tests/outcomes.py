"""A file for each test run, `build/tests.txt`: how each test ended and how long it took, the slowest first.

New slow tests show there. `tests.again` reads the failed tests from it, `tests.everything` those that did not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

FILE = Path("build/tests.txt")


class Ended(NamedTuple):
    """How a test ended: seconds with its fixtures, its markers of `tests.needs`, and why it was skipped, if it was."""

    seconds: float
    outcome: str
    needs: frozenset[str]
    name: str
    reason: str = ""

    def line(self) -> str:
        """One line of the file."""
        return f"{self.seconds:.2f}\t{self.outcome}\t{','.join(sorted(self.needs))}\t{self.name}\t{self.reason}\n"


def read(path: Path = FILE) -> list[Ended]:
    """What the file says; empty if there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = (line.split("\t") for line in lines)
    return [Ended(float(row[0]), row[1], frozenset(filter(None, row[2].split(","))), *row[3:]) for row in rows]


class Outcomes:
    """A plugin of pytest's, on the process that collects the reports of all others."""

    def __init__(self, path: Path, markers: frozenset[str]) -> None:
        self._path = path
        self._markers = markers
        self._ended: dict[str, Ended] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test (setup, call or teardown) is over."""
        needs = self._markers & report.keywords.keys()
        ended = self._ended.setdefault(report.nodeid, Ended(0.0, "passed", needs, report.nodeid))
        ended = ended._replace(seconds=ended.seconds + report.duration)
        if report.outcome != "passed" and ended.outcome != "failed":
            reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
            ended = ended._replace(outcome=report.outcome, reason=" ".join(reason.split()))
        self._ended[report.nodeid] = ended

    def pytest_sessionfinish(self) -> None:
        """Write the file, if any test was run."""
        if self._ended:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            in_order = sorted(self._ended.values(), key=lambda each: (-each.seconds, each.name))
            self._path.write_text("".join(each.line() for each in in_order))
