"""Properties of the source: import cycles, version, words, reviewed sentences, names of tests."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

import rallypoint
from rallypoint.cli.flags import FLAGS
from rallypoint.observe.metrics import build_family
from tests import runs
from tests.sentences import FILE, listing

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
NATIVE = SOURCE / "rallypoint" / "store" / "native"


# Import cycles. Late imports and those for type checkers count: a reader of one module of a cycle must read all.


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (path, ast.parse(path.read_text()))
    return found


def imports_of(name: str) -> set[str]:
    """All modules that one imports."""
    known, found = modules(), set()
    for node in ast.walk(known[name][1]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {full if (full := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
    return {module for module in found if module in known and module != name}


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The modules that remain after removing leaves and then roots, repeatedly."""
    left = {name: set(needs) for name, needs in graph.items()}
    while ends := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in ends}
    while True:
        needed = set().union(*left.values()) if left else set()
        if left.keys() <= needed:
            return [sorted(left)] if left else []
        left = {name: needs for name, needs in left.items() if name in needed}


def test_no_import_cycle() -> None:
    assert cycles({name: imports_of(name) for name in modules()}) == []


def test_no_cycle_in_the_store_in_c() -> None:
    """A C file and its header count as one."""
    graph: dict[str, set[str]] = {}
    for path in NATIVE.glob("*.[ch]"):
        included = {name.removesuffix(".h") for name in re.findall(r'^#include "(.*)"', path.read_text(), re.M)}
        graph.setdefault(path.stem, set()).update(included - {path.stem})
    assert len(graph) > 8
    assert cycles(graph) == []


# The version is only in `base/version.py`


def test_the_version_of_the_package() -> None:
    """`tests/unit/cli/test_parse.py` tests `--version`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"] == {"path": "src/rallypoint/base/version.py"}
    assert version("rallypoint") == rallypoint.__version__, "install again: the version changed"
    assert build_family().samples[0].labels[0] == rallypoint.__version__
    assigned = re.compile(r"^(?:__version__|version|release|VERSION)\s*=.*\d+\.\d+\.\d+", re.MULTILINE)
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("*.py"), *ROOT.glob("docs/*.py"), ROOT / "pyproject.toml"]
    assert [path for path in sources if assigned.search(path.read_text())] == [SOURCE / "rallypoint/base/version.py"]


def test_the_version_is_above_the_newest_release_with_unreleased_changes() -> None:
    """For a release, the heading "Unreleased" and the version change together."""
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, newest, *_ = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]
    found = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\]", text, re.MULTILINE)[0]
    released, ours = tuple(map(int, found)), tuple(map(int, rallypoint.__version__.split(".")[:3]))
    assert released < ours if "- " in unreleased else released == ours, newest


def test_flags_are_read() -> None:
    """As a field of their record, or by name."""
    read = set[str]()
    for _, tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    assert [flag.name for flag in FLAGS if flag.dest not in read] == []


# Words that `docs/glossary.md` replaced


FOLDERS = ("src", "tests", "docs", "benchmarks", "examples")
TEXTS = frozenset({".py", ".pyi", ".c", ".h", ".md", ".txt"})
SPARED = frozenset({"CHANGELOG.md", "docs/project/changelog.md", "docs/glossary.md", "tests/unit/test_repository.py"})

COINED = {
    "despair": "what it does",
    "errand": "job spec",
    "farewell": "grace period, last message",
    "hush": "clear",
    "minder": "monitor",
    "parcel": "payload",
    "roster": "session registry",
    "sieve": "line filter",
    "tidings": "notification diff",
    "whereabouts": "endpoint resolver",
}
"""Former words, and their replacements."""

_COINED = re.compile(rf"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:{'|'.join(COINED)})")


def _texts() -> Iterator[tuple[str, str]]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    for path in [*paths, *ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]:
        name = str(path.relative_to(ROOT))
        if name not in SPARED:
            yield name, path.read_text()


def test_no_coined_word() -> None:
    found = [
        f"{name}:{number}: {line.strip()[:120]}  (say {COINED[coined[0].lower()]})"
        for name, text in _texts()
        if _COINED.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if (coined := _COINED.search(line))
    ]
    assert found == []


# Reviewed sentences of errors and log lines; `--rewrite-sentences` rewrites the file


def test_reviewed_sentences(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-sentences"):
        FILE.write_text(listing())
    assert FILE.read_text() == listing()


# Long tests


def test_names_of_long_tests_exist() -> None:
    for name in (*runs.LEFT_TO_ALL, *runs.KEPT):
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), name
