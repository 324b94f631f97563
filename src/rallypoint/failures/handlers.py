"""Decides from a program's source whether it survives an exception.

A traceback starts in the function that caught the exception. So a traceback printed by a handler starts at a line in
the body of that handler's `try`; a traceback that ended its program does not.
"""

from __future__ import annotations

import os
import stat
import warnings
from contextlib import suppress

from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

_MAX_SIZE = 256 * 1024
"""Maximum bytes of source to read; parsing this much takes 0.1 s."""
_LEAVES = {"exit", "_exit", "abort", "quit", "kill", "interrupt_main"}
"""Functions with which a handler ends its program."""


def survives(file: str, line: int, function: str) -> bool:
    """Whether a handler there catches an exception from this line of a function, or from a call in it, after which the
    program continues. Also False if the source does not show this or cannot be read."""
    tree = _parsed(file)
    if tree is None:
        return False
    import ast

    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Try | ast.TryStar)
        and node.handlers
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
    ]
    is_main = "main" in function
    return bool(around) and not any(_leaves(handler, is_main) for node in around for handler in node.handlers)


def _parsed(file: str) -> ast.Module | None:
    import ast

    text = _read(file)
    # A worker's output can name any file. Warnings about the source belong in the worker, not here.
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text) if text else None
    return None


def _read(file: str) -> bytes:
    """Read a regular file; empty if it is something else, too large, or unreadable."""
    text = b""
    with suppress(OSError, ValueError):
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(fd, "rb") as source:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                text = source.read(_MAX_SIZE + 1)
    return text if len(text) <= _MAX_SIZE else b""


def _leaves(handler: ast.ExceptHandler, is_main: bool) -> bool:
    """Whether a handler can end its program: it raises, exits, or returns something like an exit code."""
    import ast

    for node in ast.walk(handler):
        match node:
            case ast.Raise():
                return True
            case ast.Return(value=value):
                is_number = isinstance(value, ast.Constant) and type(value.value) is int
                if is_main or is_number:
                    return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _LEAVES:
                return True
    return False
