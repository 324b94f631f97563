"""The same command under real torchrun 2.13 and under rallyrun leaves the same facts, or differences with a name.

The cases are tables in `side_by_side/cases_*.py`, by the contract's sections; `side_by_side/differences.py` is the one
place that lists where we differ, and why.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.conformance.record import Record
from tests.conformance.side_by_side import cases_flags, cases_jobs
from tests.conformance.side_by_side.case import Case, Side
from tests.conformance.side_by_side.differences import ABSENT, ALWAYS, DIFFERENCES
from tests.conformance.side_by_side.running import Facts, Running
from tests.jobs.launching import Launcher

pytestmark = pytest.mark.torch

CASES = [*cases_flags.CASES, *cases_jobs.CASES]


def differing(theirs: Facts, ours: Facts) -> dict[str, tuple[object, object]]:
    """The facts that are not the same, torchrun's and ours."""
    both = {fact: (theirs.get(fact, ABSENT), ours.get(fact, ABSENT)) for fact in {**theirs, **ours}}
    return {fact: (their, our) for fact, (their, our) in both.items() if their != our}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_side_by_side(launcher: Launcher, record: Record, case: Case) -> None:
    running = {Side.OURS: Running(launcher, case, Side.OURS)}

    def torchs() -> Facts:
        running[Side.TORCH] = Running(launcher, case, Side.TORCH)
        return running[Side.TORCH].facts()

    group = f"side_by_side-{case.name.split()[0]}"
    theirs_all: Facts = record.answer(group, case.name, case.question(), torchs, case.depends(), case.since)
    ours_all: Facts = json.loads(json.dumps(running[Side.OURS].facts()))
    errors = [f"standard error of {side.value}:\n{each.errors()[-2000:]}" for side, each in running.items()]
    assert theirs_all["exit/0"] == case.code, errors
    expected = {(name, pattern) for name in case.differs for pattern in DIFFERENCES[name].facts}
    met = set()
    unexplained = []
    for fact, (theirs, ours) in differing(theirs_all, ours_all).items():
        named = {(name, DIFFERENCES[name].explains(fact, theirs, ours)) for name in case.differs} & expected
        met |= named
        if not named and not ALWAYS.explains(fact, theirs, ours):
            unexplained.append(f"{fact}\n    torchrun {_short(theirs)}\n    rallyrun {_short(ours)}")
    assert not unexplained, "\n".join([case.name, *unexplained, *errors])
    assert not expected - met, f"these differences are no longer met: {sorted(expected - met)}"


def _short(fact: object) -> str:
    return re.sub(r"(.)\1{50,}", r"\1...", str(fact))[:1000]


def test_each_case_and_each_difference_counts_once() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 100
    assert {name for case in CASES for name in case.differs} == DIFFERENCES.keys()
