"""What stands in the source: the lines that are logged, the sentences of errors, the variables that are looked up.

Read from the syntax trees, so that nothing has to run. A text is normalized: `…` stands for each value in it, whether
it is written as `%s` or in an f-string.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "rallypoint"

VALUE = "…"
"""What stands for a value in a text."""

_LEVELS = {
    "info": "INFO",
    "warning": "WARNING",
    "error": "ERROR",
    "exception": "ERROR",
    "critical": "CRITICAL",
    "log": "",
}
_PLACEHOLDER = re.compile(r"%[-+ #0]*[0-9.*]*[sdrgfx]")


class Said(NamedTuple):
    """A text that users may see: the file from the package's folder, the line, what says it, and the text."""

    file: str
    line: int
    kind: str
    text: str


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each file of the package, by its path from the package's folder."""
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(), str(path))
        for path in sorted(SOURCE.rglob("*.py"))
    }


def logged() -> Iterator[Said]:
    """Each call that logs at INFO or above, `kind` being its level."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LEVELS:
                if "log" not in ast.unparse(node.func.value).lower() or not node.args:
                    continue
                at = 1 if node.func.attr == "log" else 0
                for text in texts(node.args[at]):
                    yield Said(file, node.lineno, _LEVELS[node.func.attr], _PLACEHOLDER.sub(VALUE, text))


def errors(kinds: frozenset[str]) -> Iterator[Said]:
    """Each call that makes an error of one of these kinds with a text, `kind` being its class."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                name = _last_name(node.func)
                if name in kinds:
                    for text in texts(node.args[0]):
                        yield Said(file, node.lineno, name, text)


def error_tree() -> frozenset[str]:
    """The names of the classes of the package below `RallypointError`, and it."""
    bases: dict[str, set[str]] = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(_last_name(base) for base in node.bases)
    found = {"RallypointError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found)


def sentences(file: str) -> Iterator[Said]:
    """The texts of several words in one file that are not documentation: of modules that only make sentences."""
    tree = trees()[file]
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in parts or id(node) in docs:
            continue
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            for text in texts(node):
                if len(text.replace(VALUE, "").split()) > 1:
                    yield Said(file, node.lineno, "", _PLACEHOLDER.sub(VALUE, text))


def texts(node: ast.expr) -> list[str]:
    """What a string expression may come to; `…` alone where that is not written there."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(str(p.value) if isinstance(p, ast.Constant) else VALUE for p in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in texts(left) for b in texts(right)]
        case ast.BinOp(left=left, op=ast.Mod()):
            return [_PLACEHOLDER.sub(VALUE, text) for text in texts(left)]
        case ast.IfExp(body=body, orelse=other):
            return [*texts(body), *texts(other)]
    return [VALUE]


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_ENVIRONMENT = re.compile(r"\b(environ\w*|envs?\b|variables)")


def variables() -> dict[str, set[str]]:
    """Names that look like those of environment variables, to the files in which they stand.

    These are all texts of capitals with underscores, and whatever is looked up in something called an environment.
    """
    found: dict[str, set[str]] = {}
    for file, tree in trees().items():
        for node in ast.walk(tree):
            names = [node] if isinstance(node, ast.Constant) and _VARIABLE.fullmatch(str(node.value)) else _keys(node)
            for each in names:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    found.setdefault(each.value, set()).add(file)
    return found


def _keys(node: ast.AST) -> list[ast.expr]:
    """The keys by which something called an environment is looked into."""
    match node:
        case ast.Call(func=ast.Attribute(value=place, attr="get" | "pop" | "setdefault"), args=[key, *_]):
            return [key] * _is_environment(place)
        case ast.Subscript(value=place, slice=key):
            return [key] * _is_environment(place)
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[place]):
            return [key] * _is_environment(place)
    return []


def _is_environment(place: ast.expr) -> bool:
    return bool(_ENVIRONMENT.search(ast.unparse(place)))
