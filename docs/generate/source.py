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
}
_LOGGER = re.compile(r"log|lines\b|context", re.IGNORECASE)
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
    """Each call that logs at INFO or above, or prints to standard error; `kind` is the level, or `printed`."""
    for file in trees():
        for node, scope in _calls(file):
            level, at = _shape(node)
            if level and len(node.args) > at:
                for text in texts(node.args[at], scope):
                    yield Said(file, node.lineno, level, _PLACEHOLDER.sub(VALUE, text))


def _shape(call: ast.Call) -> tuple[str, int]:
    """The level of a call that logs, and which argument is its text; no level for any other call."""
    match call.func:
        case ast.Name(id="print_error" | "say") | ast.Attribute(attr="say"):
            return "printed", 0
        case ast.Name(id="warning"):
            return "WARNING", 0
        case ast.Name(id="LogLine") | ast.Attribute(attr="LogLine"):
            return ("WARNING" if any(each.arg == "warning" for each in call.keywords) else "INFO"), 0
        case ast.Attribute(value=place, attr="warn") if "context" in ast.unparse(place):
            return "WARNING", 1
        case ast.Attribute(value=place, attr="log") if _LOGGER.search(ast.unparse(place)) and len(call.args) > 1:
            level = _last_name(call.args[0])
            return {"DEBUG": "", "INFO": "INFO"}.get(level, "WARNING"), 1
        case ast.Attribute(value=place, attr=name) if name in _LEVELS and _LOGGER.search(ast.unparse(place)):
            return _LEVELS[name], 0
    return "", 0


def errors(kinds: frozenset[str]) -> Iterator[Said]:
    """Each call that makes an error of one of these kinds with a text, `kind` being its class."""
    for file in trees():
        for node, scope in _calls(file):
            name = _last_name(node.func)
            if name in kinds and node.args:
                for text in texts(node.args[0], scope):
                    yield Said(file, node.lineno, name, text)


Scope = dict[str, list[ast.expr]]
"""Names to what is assigned to them, and `name()` to what such a function of the file returns."""


@cache
def _calls(file: str) -> list[tuple[ast.Call, Scope]]:
    """The calls of a file, each with the assignments of its function and of the file."""
    own: dict[ast.AST, Scope] = {}
    returned: Scope = {}
    calls: list[tuple[ast.Call, ast.AST]] = []
    left: list[tuple[ast.AST, ast.AST]] = [(trees()[file], trees()[file])]
    while left:
        node, function = left.pop()
        match node:
            case ast.Call():
                calls.append((node, function))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                own.setdefault(function, {}).setdefault(name, []).append(value)
            case ast.Return(value=ast.expr() as value) if isinstance(function, ast.FunctionDef):
                returned.setdefault(f"{function.name}()", []).append(value)
        inner = node if isinstance(node, ast.FunctionDef) else function
        left += [(child, inner) for child in ast.iter_child_nodes(node)]
    whole = own.get(trees()[file], {}) | returned
    scopes = {function: whole | assigned for function, assigned in own.items()}
    return [(call, scopes.get(function, whole)) for call, function in calls]


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


def texts_of(file: str) -> set[str]:
    """Every text of a file, in one line each."""
    return {
        re.sub(r"\{[^{}]*\}", VALUE, _PLACEHOLDER.sub(VALUE, text))
        for node in ast.walk(trees()[file])
        if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp)
        for text in texts(node, {})
    }


def texts(node: ast.expr, scope: Scope) -> list[str]:
    """What a string expression may come to, in one line each; `…` alone where that is not written there."""
    return [" ".join(text.split()) for text in _texts(node, scope)]


def _texts(node: ast.expr, scope: Scope) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(str(p.value) if isinstance(p, ast.Constant) else VALUE for p in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in _texts(left, scope) for b in _texts(right, scope)]
        case ast.BinOp(left=left, op=ast.Mod()):
            return [_PLACEHOLDER.sub(VALUE, text) for text in _texts(left, scope)]
        case ast.IfExp(body=body, orelse=other):
            return [*_texts(body, scope), *_texts(other, scope)]
        case ast.Name(id=name) if name in scope:
            return [text for value in scope[name] for text in _texts(value, {})]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name)):
            return [text for value in scope.get(f"{name}()", []) for text in _texts(value, {})] or [VALUE]
    return [VALUE]


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


_VARIABLE = re.compile(r"(?!(?:AF|MSG|SC|TCP)_)[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")  # and no constants of the kernel
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
