"""What follows from a list of results: lines, exit codes, required checks, a node that stays out."""

from __future__ import annotations

import json

import pytest

from rallypoint.base.errors import PreflightError
from rallypoint.preflight.admission import REQUIRE, WARN, admit
from rallypoint.preflight.results import (
    EXIT_CODES,
    CheckResult,
    Status,
    counts,
    failed,
    not_known,
    passed,
    results_json,
    warned,
    with_required,
    worst,
)

GOOD = passed("23 GiB free").of("disk")
POOR = warned("1 MiB free", "make room").of("disk")
BAD = failed("it is gone", "mount it").of("shm")
DARK = not_known("there are none").of("gpus")


def test_a_line_has_the_status_the_name_the_fact_and_the_remedy() -> None:
    assert str(GOOD) == "PASS disk: 23 GiB free"
    assert str(POOR) == "WARN disk: 1 MiB free; make room"
    assert str(DARK) == "PASS gpus: not checked: there are none"


@pytest.mark.parametrize(
    ("results", "status", "code"),
    [([], "PASS", 0), ([GOOD, DARK], "PASS", 0), ([GOOD, POOR, DARK], "WARN", 1), ([BAD, POOR, GOOD], "FAIL", 2)],
)
def test_the_worst_counts(results: list[CheckResult], status: str, code: int) -> None:
    assert worst(results) == status
    assert EXIT_CODES[worst(results)] == code


def test_a_required_check_has_to_be_known_and_to_pass() -> None:
    assert with_required([GOOD, POOR, DARK, BAD], []) == [GOOD, POOR, DARK, BAD]
    found = with_required([GOOD, POOR, DARK], ["disk", "gpus"])
    assert [each.status for each in found] == [Status.PASS, Status.FAIL, Status.FAIL]
    assert str(found[1]) == "FAIL disk: 1 MiB free; make room"
    assert str(found[2]) == "FAIL gpus: not checked: there are none; it is required, so see to it that it can be"


def test_json_has_a_version_and_every_field() -> None:
    told = json.loads(results_json([POOR, DARK]))
    assert told["version"] == 1
    assert told["status"] == "WARN"
    assert told["checks"] == [
        {"name": "disk", "status": "WARN", "fact": "1 MiB free", "remedy": "make room", "known": True},
        {"name": "gpus", "status": "PASS", "fact": "there are none", "remedy": "", "known": False},
    ]


def test_counts() -> None:
    assert counts([GOOD, DARK, BAD]) == "2 PASS, 1 FAIL"
    assert counts([]) == "no checks"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("WARNING")
    return caplog


def test_a_node_that_is_only_warned_joins(lines: pytest.LogCaptureFixture) -> None:
    admit([GOOD, POOR, BAD, DARK], WARN)
    assert lines.messages == [str(POOR), str(BAD)]
    assert {each.levelname for each in lines.records} == {"WARNING"}


def test_a_node_with_warnings_alone_joins_whatever_is_required(lines: pytest.LogCaptureFixture) -> None:
    admit([GOOD, POOR, DARK], REQUIRE)
    assert lines.messages == [str(POOR)]


def test_a_node_that_has_failed_a_check_says_it_once(lines: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PreflightError, match=r"stays out of the job.*FAIL shm: it is gone; mount it$"):
        admit([POOR, BAD], REQUIRE)
    assert lines.messages == [str(POOR)]


def test_several_failures_are_a_line_each_and_named_in_the_sentence(lines: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PreflightError, match=r"2 checks failed \(shm, dns\), see above$"):
        admit([BAD, BAD._replace(name="dns")], REQUIRE)
    assert lines.messages == [str(BAD), str(BAD._replace(name="dns"))]
