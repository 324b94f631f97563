"""The core names no feature and works without any."""

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
def test_the_core_names_no_feature(row: Row) -> None:
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
"""Names that mean something else in the core, or remain there of a feature."""


@pytest.mark.process
@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_jobs_run_without_a_feature(row: Row) -> None:
    done = _run(row, ())
    assert (done.returncode, done.stderr) == (0, "")


LOADED_LATE = [
    row
    for row in FEATURES
    if (row.by_default or row.wanted is anybody) and row.load in {Load.WHEN_PLACED, Load.WHEN_STARTED}
]


@pytest.mark.process
@pytest.mark.parametrize("row", LOADED_LATE, ids=lambda row: row.name)
def test_unreadable_features_do_not_end_the_job(row: Row) -> None:
    done = _run(row, (), error='OSError(24, "Too many open files")')
    assert done.returncode == 0, done.stderr
    assert f"the feature {row.name!r} cannot be loaded; the job continues without it" in done.stderr


ROWS = {row.name: row for row in FEATURES}
EXAMPLES = [(row, row.example) for row in FEATURES if row.example]


@pytest.mark.process
@pytest.mark.parametrize(
    ("row", "example"),
    [*EXAMPLES, (ROWS["inprocess"], ROWS["standby"].example)],
    ids=[*(row.name for row, _ in EXAMPLES), "inprocess, which standby needs"],
)
def test_a_missing_feature_is_refused_in_one_sentence(row: Row, example: str, tmp_path: Path) -> None:
    done = _run(row, tuple(example.split()), tmp_path)
    assert done.returncode == 1
    assert f"this installation does not include the feature {row.name!r}; install the complete package" in done.stderr
    assert "Traceback" not in done.stderr


MACHINE_FEATURES = {"gpu_memory", "task_variables", "trainjob"}
"""Features that depend on the machine of the agent, not only on an option."""


def test_each_feature_with_its_own_option_has_an_example() -> None:
    asked_for = {row.name for row in FEATURES if not row.wanted(Features())} - MACHINE_FEATURES
    assert asked_for == {row.name for row in FEATURES if row.example}


_MISSING = 'ModuleNotFoundError(f"No module named {name!r}", name=name)'


def _run(
    row: Row, flags: tuple[str, ...], folder: Path | None = None, error: str = _MISSING
) -> subprocess.CompletedProcess[str]:
    code = _ONE_JOB.format(name=row.name, flags=list(flags), error=error)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=folder
    )
