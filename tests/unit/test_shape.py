"""The shape of the source: no import circle, and files, functions and parameter lists of a size that a reader can hold.

Late imports and those for type checkers count: who reads one module of a circle has to read all of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
NATIVE = SOURCE / "rallypoint" / "store" / "native"

FILE_LINES, FUNCTION_LINES, PARAMETERS = 350, 60, 8

TORCHS_SIGNATURES = {
    "compat/elastic/multiprocessing/api.py": {
        "MultiprocessContext.__init__",
        "SubprocessContext.__init__",
        "start_processes",
    },
    "compat/elastic/rendezvous/dynamic_rendezvous.py": {"DynamicRendezvousHandler.from_backend"},
    "store/client.py": {"TCPStore.__init__"},
    "telemetry/recording.py": {"construct_and_record_rdzv_event"},
}
"""Functions whose parameters are those of torch's functions of that name."""


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


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions with their names, `Class.method` for methods."""
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, parent = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                pending.append((f"{prefix}{node.name}.", node))
            else:
                pending.append((prefix, node))


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


def test_no_import_circle() -> None:
    assert circles({name: imports_of(name) for name in modules()}) == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": set[str]()}
    assert circles(graph) == [["b", "c"]]


def test_no_circle_among_the_files_of_the_store_in_c() -> None:
    """A file of C and its header are one; nothing is declared but in the header of the file that has it."""
    graph: dict[str, set[str]] = {}
    for path in NATIVE.glob("*.[ch]"):
        included = {name.removesuffix(".h") for name in re.findall(r'^#include "(.*)"', path.read_text(), re.M)}
        graph.setdefault(path.stem, set()).update(included - {path.stem})
    assert len(graph) > 8
    assert circles(graph) == []


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    files = [*(path for path, _ in modules().values()), *NATIVE.glob("*.[ch]")]
    long = {str(path.relative_to(SOURCE)): lines for path in files if (lines := lines_of(path)) > FILE_LINES}
    assert long == {}


def test_functions_fit_a_screen() -> None:
    long = {
        f"{module}: {name}": size
        for module, (_, tree) in modules().items()
        for name, node in functions(tree)
        if (size := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    }
    assert long == {}


def test_no_long_list_of_parameters() -> None:
    long = {}
    for module, (path, tree) in modules().items():
        allowed = TORCHS_SIGNATURES.get(str(path.relative_to(SOURCE / "rallypoint")), set())
        for name, node in functions(tree):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len(given) - (bool(given) and given[0].arg in ("self", "cls"))
            if count > PARAMETERS and name not in allowed:
                long[f"{module}: {name}"] = count
    assert long == {}
