"""The sentences of errors and log lines in the source, listed in `tests/sentences.txt` for review.

They are the texts in calls that log, print to standard error, or make an error; `…` stands for a value. Texts assembled
elsewhere are not found. `pytest --rewrite-sentences` rewrites the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "rallypoint"
FILE = Path(__file__).with_suffix(".txt")
VALUE = "…"

_SAYING = re.compile(
    r"(?!Exc|_)\w*Error|user_error|\w*Refused|DetectionRefusal|NoCluster|LogLine|print_error|"
    r"say|log|warn|info|warning|error|exception|critical"
)
"""Names of functions and classes that are given a sentence."""
_PLACEHOLDER = re.compile(r"%[-+ #0]*[0-9.*]*[sdrgfx]")


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each file of the package, by its path from the package's folder."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(), str(path)) for path in paths}


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every text of a tree, in one line each, as far as it is not put together by calls."""
    match tree:
        case ast.Constant(value=str(text)):
            yield _line(text)
        case ast.JoinedStr(values=parts):
            yield _line("".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in parts))
            for part in parts:
                yield from texts_of(part.value) if isinstance(part, ast.FormattedValue) else ()
        case _:
            for child in ast.iter_child_nodes(tree):
                yield from texts_of(child)


def _line(text: str) -> str:
    return " ".join(_PLACEHOLDER.sub(VALUE, text).split())


def said(tree: ast.Module) -> Iterator[str]:
    """The sentences of a file, in its order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _SAYING.fullmatch(_last_name(node.func)):
            for argument in node.args:
                yield from (text for text in texts_of(argument) if re.search(r"[A-Za-z]{2,} [^ ]", text))


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def listing() -> str:
    """What `FILE` should have: the sentences by file, each once in a file."""
    parts = []
    for file, tree in trees().items():
        if found := sorted({*said(tree)}):
            parts += [f"# {file}", *found]
    return "\n".join([*parts, ""])
