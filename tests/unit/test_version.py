"""The version stands in one place, `base/version.py`, and whoever shows it shows that one."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import rallypoint
from rallypoint.observe.metrics import build_family

ROOT = Path(__file__).parents[2]


def test_the_package_is_built_with_the_version_that_the_code_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"] == {"path": "src/rallypoint/base/version.py"}
    assert version("rallypoint") == rallypoint.__version__, "install again: the version has changed since"


def test_the_version_stands_nowhere_else() -> None:
    """`tests/unit/cli/test_parse.py` holds what `--version` shows."""
    assert build_family().samples[0].labels[0] == rallypoint.__version__
    assigned = re.compile(r"^(?:__version__|version|release|VERSION)\s*=.*\d+\.\d+\.\d+", re.MULTILINE)
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("*.py"), *ROOT.glob("docs/*.py"), ROOT / "pyproject.toml"]
    assert [str(path.relative_to(ROOT)) for path in sources if assigned.search(path.read_text())] == [
        "src/rallypoint/base/version.py"
    ]


def test_the_newest_release_of_the_changelog_is_this_version_or_older() -> None:
    """A release is made of "Unreleased": the version is raised together with the heading."""
    newest = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert tuple(map(int, newest)) <= tuple(map(int, rallypoint.__version__.split(".")[:3]))
