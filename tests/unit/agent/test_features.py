"""The wall between core and features: no file of the core names a feature, and the core works without any."""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

import rallypoint
from rallypoint.agent.feature import Load, Row, anybody
from rallypoint.agent.options import Features
from rallypoint.features.table import FEATURES

SOURCE = Path(rallypoint.__file__).parent
CORE = ("agent", "workers", "rendezvous", "base", "failures", "store")
"""Packages that name no feature, except for the table of all options."""
OPTIONS = SOURCE / "agent/options.py"

_ONE_JOB = """
import sys
from importlib.abc import MetaPathFinder

class Without(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "rallypoint.features.{name}" or name.startswith("rallypoint.features.{name}."):
            raise {error}

sys.meta_path.insert(0, Without())
from rallypoint.cli.rallyrun import main
sys.argv = ["rallyrun", "--standalone", *{flags!r}, "--no-python", "true"]
sys.exit(main())
"""


@cache
def names(path: Path) -> frozenset[str]:
    """All identifiers of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return frozenset(token.string for token in tokens if token.type == tokenize.NAME)


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_no_file_of_the_core_names_a_feature(row: Row) -> None:
    classes = {place.partition(":")[2] for place in (row.place, row.admits, row.serves)}
    own = {row.name, *classes} - {""}
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for package in CORE
        for path in (SOURCE / package).rglob("*.py")
        if path != OPTIONS
        for name in names(path) & own
    }
    assert found == ALLOWED.get(row.name, set())


ALLOWED = {
    "topology": {"base/numa.py: topology"},  # of the processors
    "reports": {"rendezvous/shared_state.py: reports"},  # whether a node does
}
"""What is left of features that are not behind the wall altogether, and words that mean something else there."""


@pytest.mark.process
@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_without_a_feature_a_job_runs(row: Row) -> None:
    done = _run(row, ())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
@pytest.mark.parametrize(
    "row",
    [
        row
        for row in FEATURES
        if (row.by_default or row.wanted is anybody) and row.load in {Load.WHEN_PLACED, Load.WHEN_STARTED}
    ],
    ids=lambda row: row.name,
)
def test_a_feature_whose_file_cannot_be_opened_does_not_end_the_job(row: Row) -> None:
    done = _run(row, (), error='OSError(24, "Too many open files")')
    assert done.returncode == 0, done.stderr
    assert f"the feature {row.name!r} cannot be loaded; the job continues without it" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("row", [row for row in FEATURES if row.example], ids=lambda row: row.name)
def test_asking_for_a_feature_that_is_not_there_gives_one_sentence(row: Row, tmp_path: Path) -> None:
    _is_refused(_run(row, tuple(row.example.split()), tmp_path), row.name)


@pytest.mark.process
def test_so_does_asking_for_one_that_needs_it() -> None:
    rows = {row.name: row for row in FEATURES}
    needed = rows["inprocess"]
    _is_refused(_run(needed, tuple(rows["standby"].example.split())), needed.name)


def _is_refused(done: subprocess.CompletedProcess[str], name: str) -> None:
    assert done.returncode == 1
    assert f"this installation does not include the feature {name!r}; install the complete package" in done.stderr
    assert "Traceback" not in done.stderr


BY_THE_MACHINE = {"gpu_memory", "task_variables", "trainjob"}
"""Features that depend on where the agent runs, and not on an option alone."""


def test_each_feature_with_an_option_of_its_own_is_tried_without() -> None:
    asked_for = {row.name for row in FEATURES if not row.wanted(Features())} - BY_THE_MACHINE
    assert asked_for == {row.name for row in FEATURES if row.example}


_MISSING = 'ModuleNotFoundError(f"No module named {name!r}", name=name)'


def _run(
    row: Row, flags: tuple[str, ...], folder: Path | None = None, error: str = _MISSING
) -> subprocess.CompletedProcess[str]:
    code = _ONE_JOB.format(name=row.name, flags=list(flags), error=error)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=folder
    )
