"""The table of checks and its page, running the checks, and their results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rallypoint.base.errors import PreflightError
from rallypoint.base.gpu_holders import MUCH
from rallypoint.clusters.preflight import dialing, machine, network, run
from rallypoint.clusters.preflight.results import (
    EXIT_CODES,
    REQUIRE,
    WARN,
    CheckInputs,
    CheckResult,
    Status,
    admit,
    counts,
    failed,
    passed,
    results_json,
    skipped,
    warned,
    with_required,
    worst,
)
from rallypoint.clusters.preflight.run import NAMES, run_checks
from tests.unit.preflight import checks

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "preflight.md"

THRESHOLDS: dict[str, list[float]] = {
    "shared-memory": [machine.ENOUGH_SHARED >> 30, machine.MIN_SHARED >> 20],
    "temp-space": [machine.ENOUGH_SPACE >> 30, machine.ENOUGH_INODES, machine.MIN_SPACE >> 20, machine.MIN_INODES],
    "log-space": [machine.ENOUGH_SPACE >> 30, machine.ENOUGH_INODES, machine.MIN_SPACE >> 20, machine.MIN_INODES],
    "open-files": [machine.ENOUGH_FILES, machine.MIN_FILES],
    "locked-memory": [machine.MIN_LOCKED >> 20],
    "processes": [machine.ENOUGH_PROCESSES, machine.MIN_PROCESSES],
    "host-name": [dialing.LOOK_UP, dialing.SLOW],
    "endpoint": [dialing.SLOW, dialing.LOOK_UP, dialing.CONNECT],
    "gpu-memory": [MUCH >> 30],
    "clock": [network.MAX_OFFSET, network.HOPELESS_OFFSET],
}
"""The numbers in the columns WARN and FAIL of the page."""


def test_the_page_matches_the_code() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|[^|\n]+\|([^|\n]+\|[^|\n]+)\|[^|\n]+\|$", PAGE.read_text(), re.M)
    assert [name for name, _ in rows] == [name for name in NAMES if name != "system"]
    for name, limits in rows:
        assert [float(number) for number in re.findall(r"\b\d+\b", limits)] == THRESHOLDS.get(name, []), name
    xids = ", ".join(map(str, sorted(machine.PROGRAM_XIDS)))
    assert f"in the last {machine.XID_HOURS} hours" in PAGE.read_text()
    assert f"do not count: {xids}." in PAGE.read_text()


@pytest.mark.process
def test_each_check_has_one_result() -> None:
    assert tuple(result.name for result in run_checks(CheckInputs())) == NAMES
    assert len(set(NAMES)) == len(NAMES)


def run_with(table: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[CheckResult]:
    """Run a table of `checks` instead of ours."""
    bootstrap = f"""
import sys
sys.path[:0] = [sys.argv.pop(1), {str(ROOT)!r}]
from rallypoint.clusters.preflight import run
from tests.unit.preflight import checks
run.CHECKS = checks.{table}
run.main_of_child()"""
    monkeypatch.setattr(run, "_BOOTSTRAP", bootstrap)
    monkeypatch.setattr(run, "CHECKS", getattr(checks, table))
    return run_checks(CheckInputs("/logs"), seconds)


@pytest.mark.process
@pytest.mark.parametrize(("table", "seconds"), [("IN_THREADS", 0.3), ("IN_A_PROCESS", 3.0)])
def test_hanging_checks(table: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [checks.SILENCE._replace(name=name) for name in "ab"]
    found = run_with(table, seconds, monkeypatch)
    assert found[:3] == [*silent, passed("/logs")._replace(name="c")]
    assert (found[3].name, found[3].status) == ("d", "WARN")
    assert "ValueError: a defect" in found[3].fact


@pytest.mark.process
def test_dying_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_with("DYING", 60.0, monkeypatch)
    assert "code 9" in first.fact
    assert second == passed("/logs")._replace(name="b")


GOOD = passed("23 GiB free")._replace(name="disk")
POOR = warned("1 MiB free", "make room")._replace(name="disk")
BAD = failed("it is gone", "mount it")._replace(name="shm")
DARK = skipped("there are none")._replace(name="gpus")


@pytest.mark.parametrize(
    ("results", "status", "code"),
    [([], "PASS", 0), ([GOOD, DARK], "PASS", 0), ([GOOD, POOR, DARK], "WARN", 1), ([BAD, POOR, GOOD], "FAIL", 2)],
)
def test_worst(results: list[CheckResult], status: str, code: int) -> None:
    assert worst(results) == status
    assert EXIT_CODES[worst(results)] == code


def test_required_checks() -> None:
    assert with_required([GOOD, POOR, DARK, BAD], []) == [GOOD, POOR, DARK, BAD]
    found = with_required([GOOD, POOR, DARK], ["disk", "gpus"])
    assert [result.status for result in found] == [Status.PASS, Status.FAIL, Status.FAIL]
    assert found[1].remedy == POOR.remedy
    assert found[2].remedy


def test_texts() -> None:
    assert str(GOOD) == "PASS disk: 23 GiB free"
    assert str(POOR) == "WARN disk: 1 MiB free; make room"
    assert str(DARK) == "SKIP gpus: there are none"
    assert counts([GOOD, DARK, BAD]) == "1 PASS, 1 SKIP, 1 FAIL"
    assert counts([]) == "no checks"
    fields = json.loads(results_json([POOR, DARK]))
    assert (fields["version"], fields["status"]) == (2, "WARN")
    assert fields["checks"] == [
        {"name": "disk", "status": "WARN", "fact": "1 MiB free", "remedy": "make room"},
        {"name": "gpus", "status": "SKIP", "fact": "there are none", "remedy": ""},
    ]


@pytest.mark.parametrize(
    ("results", "mode", "logged", "raised"),
    [
        ([GOOD, POOR, BAD, DARK], WARN, [POOR, BAD], []),
        ([GOOD, POOR, DARK], REQUIRE, [POOR], []),
        ([POOR, BAD], REQUIRE, [POOR], [str(BAD)]),
        ([BAD, BAD._replace(name="dns")], REQUIRE, [BAD, BAD._replace(name="dns")], ["2", "shm", "dns"]),
    ],
)
def test_admit(
    results: list[CheckResult],
    mode: str,
    logged: list[CheckResult],
    raised: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING")
    text = ""
    try:
        admit(results, mode)
    except PreflightError as error:
        text = str(error)
    assert bool(text) == bool(raised)
    assert [word for word in raised if word not in text] == []
    assert caplog.messages == [str(result) for result in logged]
