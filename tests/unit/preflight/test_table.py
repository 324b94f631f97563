"""The table of checks, the page that describes it, and the process that runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rallypoint.preflight import run
from rallypoint.preflight.checks import NAMES, READINGS
from rallypoint.preflight.results import CheckResult, passed, warned
from rallypoint.preflight.run import run_checks
from rallypoint.preflight.table import CheckInputs
from tests.unit.preflight import readings

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "preflight.md"


def rows() -> list[str]:
    """The table of the page, as it has to be."""
    checks = [each for reading in READINGS for each in reading.checks]
    return [
        f"| `{each.name}` | {each.meaning} | {each.warns or '–'} | {each.fails or '–'} | {each.remedy} |"
        for each in checks
    ]


def test_the_page_has_the_table_of_the_code() -> None:
    found = re.findall(r"^\| `[a-z-]+` \|(?:[^|\n]+\|){4}$", PAGE.read_text(), re.M)
    assert found == rows(), "docs/how-to/preflight.md has to hold these rows:\n" + "\n".join(rows())


def test_names_are_words_that_stand_in_a_list() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert [name for name in NAMES if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name)] == []


@pytest.mark.process
def test_each_check_has_one_result_in_the_order_of_the_table() -> None:
    assert tuple(each.name for each in run_checks(CheckInputs())) == NAMES


def run_with(table: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[CheckResult]:
    """Run other checks than ours: a table of `readings`, by its name."""
    bootstrap = f"""
import sys
sys.path[:0] = [sys.argv.pop(1), {str(ROOT)!r}]
from rallypoint.preflight import run
from tests.unit.preflight import readings
run.READINGS = readings.{table}
run.main_of_child()"""
    monkeypatch.setattr(run, "_BOOTSTRAP", bootstrap)
    monkeypatch.setattr(run, "READINGS", getattr(readings, table))
    return run_checks(CheckInputs("/logs"), seconds)


@pytest.mark.process
@pytest.mark.parametrize(("table", "seconds"), [("IN_THREADS", 0.3), ("IN_A_PROCESS", 3.0)])
def test_what_hangs_is_given_up_and_the_others_are_told(
    table: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = warned("the check itself failed (ValueError: a defect)", "please report it")
    silent = [readings.SILENCE.of("a"), readings.SILENCE.of("b")]
    assert run_with(table, seconds, monkeypatch) == [*silent, passed("/logs").of("c"), wrong.of("d")]


@pytest.mark.process
def test_a_process_that_dies_in_a_check_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_with("DYING", 60.0, monkeypatch)
    assert first.fact == "the process that checks ended with code 9 before it answered"
    assert second == passed("/logs").of("b")
