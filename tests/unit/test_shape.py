"""The shape of the source: no import circle.

Late imports and those for type checkers count: who reads one module of a circle has to read all of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
NATIVE = SOURCE / "rallypoint" / "store" / "native"


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (path, ast.parse(path.read_text()))
    return found


def imports_of(name: str) -> set[str]:
    """The modules that one imports, wherever it does."""
    known, found = modules(), set()
    for node in ast.walk(known[name][1]):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {full if (full := f"{node.module}.{each.name}") in known else node.module for each in node.names}
    return {each for each in found if each in known and each != name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """What is left when that which needs nothing of the rest is taken away, again and again; and then from above."""
    left = {name: set(needs) for name, needs in graph.items()}
    while ends := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in ends}
    while True:
        needed = set().union(*left.values()) if left else set()
        if left.keys() <= needed:
            return [sorted(left)] if left else []
        left = {name: needs for name, needs in left.items() if name in needed}


def test_no_import_circle() -> None:
    assert circles({name: imports_of(name) for name in modules()}) == []


def test_no_circle_among_the_files_of_the_store_in_c() -> None:
    """A file of C and its header are one; nothing is declared but in the header of the file that has it."""
    graph: dict[str, set[str]] = {}
    for path in NATIVE.glob("*.[ch]"):
        included = {name.removesuffix(".h") for name in re.findall(r'^#include "(.*)"', path.read_text(), re.M)}
        graph.setdefault(path.stem, set()).update(included - {path.stem})
    assert len(graph) > 8
    assert circles(graph) == []
