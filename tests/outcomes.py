"""One file of each test run, `build/tests.txt`: how each test ended and how long it took, the slowest first.

Whoever adds a slow test sees it there, and `tests.again` reads from it what has failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

FILE = Path("build/tests.txt")


class Ended(NamedTuple):
    """How a test ended: seconds with its fixtures, outcome, its markers of `tests.needs`, and its name."""

    seconds: float
    outcome: str
    needs: str
    name: str

    def line(self) -> str:
        """One line of the file."""
        return f"{self.seconds:9.2f} {self.outcome} {self.needs} {self.name}\n"


def read(path: Path = FILE) -> list[Ended]:
    """What the file says; empty if there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    words = (line.split(maxsplit=3) for line in lines)
    return [Ended(float(seconds), outcome, needs, name) for seconds, outcome, needs, name in words]


class Outcomes:
    """A plugin of pytest's, on the process that collects the reports of all others."""

    def __init__(self, rootpath: Path, markers: frozenset[str]) -> None:
        self._path = rootpath / FILE
        self._markers = markers
        self._ended: dict[str, Ended] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test (setup, call or teardown) is over."""
        before = self._ended.get(report.nodeid)
        seconds, outcome = (before.seconds, before.outcome) if before else (0.0, "passed")
        if report.outcome != "passed" and outcome != "failed":
            outcome = report.outcome
        needs = ",".join(sorted(self._markers & report.keywords.keys())) or "-"
        self._ended[report.nodeid] = Ended(seconds + report.duration, outcome, needs, report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the file, where any test was run."""
        if self._ended:
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text("".join(each.line() for each in sorted(self._ended.values(), reverse=True)))
