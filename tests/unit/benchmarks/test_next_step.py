"""Runs that never resume: torchrun's count as the time they were given, one of ours leaves no figure."""

from __future__ import annotations

import math

import pytest
from benchmarks.case import THEIRS
from benchmarks.next_step import Variant, compared
from benchmarks.table import Budget
from benchmarks.turns import Turns

OURS = Variant("ours", budget=Budget(0.08), budget_construction=Budget(0.02))


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio", "never", "verdict"),
    [
        ([1.0, 2.0, 3.0], [40.0, 50.0, 60.0], 0.04, "", "met"),
        ([1.0, 2.0, 3.0], [40.0, 50.0, math.inf], 0.04, "", "met"),
        ([1.0, 2.0, 3.0], [math.inf, math.inf, 10.0], 0.02, "never (2 of 3 runs)", "met"),
        ([1.0, math.inf, 3.0], [40.0, 50.0, 60.0], None, "", "not measured"),
    ],
)
def test_who_never_resumes(
    ours: list[float], theirs: list[float], ratio: float | None, never: str, verdict: str
) -> None:
    row = compared("a loss", Turns({"ours": ours, THEIRS: theirs}, {}), OURS, 0.0, 100.0)
    assert (row.ratio, row.never, row.verdict) == (ratio, never, verdict)
    assert len(row.remarks) == (math.inf in ours) + (math.inf in theirs)


def test_a_model_that_takes_long_has_a_budget_of_its_own() -> None:
    assert compared("a loss", Turns({"ours": [1.0], THEIRS: [40.0]}, {}), OURS, 5.0, 100.0).budget == Budget(0.02)
