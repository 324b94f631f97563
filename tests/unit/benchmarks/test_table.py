"""The table: what a person reads must say whether a budget was met, by how much not, and what was not measured."""

from __future__ import annotations

import pytest
from benchmarks.stats import Sample
from benchmarks.table import Budget, Row, render


@pytest.mark.parametrize(
    ("budget", "measured", "verdict"),
    [
        (Budget(0.1), 0.1, "met"),
        (Budget(0.1), 0.15, "missed by 0.0500 (1.50 x budget)"),
        (Budget(1.0, at_least=True), 1.2, "met"),
        (Budget(1.0, at_least=True), 0.75, "missed by 0.250 (0.75 x budget)"),
    ],
)
def test_a_budget_says_by_how_much_it_was_missed(budget: Budget, measured: float, verdict: str) -> None:
    assert budget.verdict(measured) == verdict


def test_a_table_shows_medians_spread_ratio_budget_and_why_a_side_is_missing() -> None:
    rows = [
        Row("start", "s", Sample((0.11, 0.1, 0.13)), Sample((1.0, 1.2, 1.1)), Budget(0.1)),
        Row("rate", "/s", Sample((150_000.0,)), Sample((100_000.0,)), Budget(1.0, at_least=True)),
        Row("growth", "s", Sample((2.0,)), Sample((4.0,)), base_name="4 x ours"),
        Row("memory", "MB", None, Sample((224.0,)), Budget(0.15), remarks=("ours not measured: it is not there",)),
        Row("shared", "MB", None, Sample((190.0,)), remarks=("ours not measured: it is not there",)),
    ]
    assert render(rows).splitlines() == [
        "what                      ours             torchrun  ratio  budget  verdict",
        "------  ----------------------  -------------------  -----  ------  ------------",
        "start   0.110 s (0.100..0.130)  1.10 s (1.00..1.20)  0.100  ≤ 0.1   met",
        "rate                150,000 /s           100,000 /s   1.50  ≥ 1     met",
        "growth                  2.00 s    4.00 s [4 x ours]  0.500",
        "memory                       -               224 MB         ≤ 0.15  not measured",
        "shared                       -               190 MB                 not measured",
        "",
        "memory (and 1 more): ours not measured: it is not there",
    ]


def test_a_row_without_our_figure_is_not_measured() -> None:
    assert Row("memory", "MB", None, Sample((1.0,)), Budget(0.1)).verdict == "not measured"
    assert Row("memory", "MB", None, None).verdict == "not measured"
    assert Row("memory", "MB", Sample((1.0,)), None, Budget(0.1)).verdict == "not measured"
    assert Row("memory", "MB", Sample((1.0,)), None).verdict == ""


def test_a_budget_with_a_unit_is_one_of_our_own_figure() -> None:
    soon = Budget(1.0, unit="s")
    assert Row("node lost", "s", Sample((0.5,)), None, soon, never="never (waited 40 s)").verdict == "met"
    assert Row("node lost", "s", Sample((1.5,)), Sample((9.0,)), soon).verdict == "missed by 0.500 (1.50 x budget)"
    assert Row("node lost", "s", None, Sample((9.0,)), soon).verdict == "not measured"
    row = Row("node lost", "s", Sample((0.5,)), None, soon, never="never (waited 40 s)")
    assert render([row]).splitlines()[2:] == ["node lost  0.500 s  never (waited 40 s)         ≤ 1 s   met"]
