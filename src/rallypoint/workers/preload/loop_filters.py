"""Which variables a loop over all of them keeps: those whose names have certain prefixes, or all.

Code that iterates over `os.environ` is given every variable, but most of it keeps few:

    {k[5:]: v for k, v in os.environ.items() if k.startswith("TQDM_")}

Whether a loop is such a filter is read from its source; its prefixes, from the frame that runs it.

Laws:

1. A loop counts as a filter only if its source shows that nothing of a variable whose name begins otherwise is used
   after the test: the test comes first, it is `startswith` alone, and what the loop leaves bound is not read again.
2. A loop that is not understood keeps all: no source, another form, a prefix that cannot be computed without a call.
3. `KNOWN` is for readers that keep few and whose source does not show it in one loop.
"""

from __future__ import annotations

import _ast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    Loop = _ast.For | _ast.ListComp | _ast.SetComp | _ast.DictComp | _ast.GeneratorExp
    Range = tuple[int | None, int | None, int | None, int | None]

KNOWN: dict[tuple[str, str], tuple[str, ...]] = {
    # It copies all into a dictionary of its own, which it drops after a loop with this test.
    ("fsspec.config", "set_conf_env"): ("FSSPEC",),
    # They pass all on to a program that they run, which would inherit them anyway.
    ("subprocess", "_execute_child"): (),
    ("ctypes.util", "_findLib_gcc"): (),
    ("uuid", "_get_command_stdout"): (),
    # It keeps names that end with `_proxy`, as no variable does that workers have of their own.
    ("urllib.request", "getproxies_environment"): (),
}
"""Module and function of a reader, and the prefixes of the names that it keeps."""

_ONLY_AST = 0x400
_COPYING = ("list", "tuple", "set", "sorted", "iter", "dict")
_COMPUTED = (
    *(_ast.Constant, _ast.Name, _ast.Attribute, _ast.Tuple, _ast.Load, _ast.BinOp, _ast.Add),
    *(_ast.JoinedStr, _ast.FormattedValue),
)
_SEES_LOCALS = ("locals", "vars", "eval", "exec", "dir")


def kept_prefixes(frame: FrameType) -> tuple[str, ...] | None:
    """The prefixes of the names that a frame keeps which now starts to iterate over the variables.

    Args:
        frame: the frame that holds the loop.

    Returns:
        The prefixes; None if it may keep any variable.
    """
    known = KNOWN.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
    return _loop_prefixes(frame) if known is None else known


def _loop_prefixes(frame: FrameType) -> tuple[str, ...] | None:
    place = _source_position(frame)
    if place is None:
        return None
    try:
        with open(frame.f_code.co_filename, "rb") as file:
            tree = compile(file.read(), "?", "exec", _ONLY_AST, True)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    found = [(loop, above) for loop, above in _loops(tree, place) if place in _ranges(loop)]
    return _prefixes_of(*found[0], frame) if len(found) == 1 else None


def _source_position(frame: FrameType) -> Range | None:
    """The position in the source that the frame is executing: line, last line, column, last column."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:  # Python 3.10
        return None
    line, end_line, column, end_column = list(positions())[frame.f_lasti // 2]
    return None if line is None or column is None else (line, end_line, column, end_column)


def _range(node: _ast.expr | _ast.stmt) -> Range:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _ranges(loop: Loop) -> Iterator[Range]:
    """The positions of the loop's own instructions that begin to iterate. Python 3.13 reports them best."""
    iterated = loop.iter if isinstance(loop, _ast.For) else loop.generators[0].iter
    yield _range(loop)
    for node in _all(iterated):
        if isinstance(node, _ast.expr):
            yield _range(node)


def _loops(tree: _ast.AST, place: Range) -> Iterator[tuple[Loop, list[_ast.AST]]]:
    """The loops around a position, each with the nodes that it is in, the outermost first."""
    line = place[0] or 0
    waiting: list[tuple[_ast.AST, list[_ast.AST]]] = [(tree, [])]
    while waiting:
        node, above = waiting.pop()
        if isinstance(node, (_ast.stmt, _ast.expr)) and not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if isinstance(node, (_ast.For, _ast.ListComp, _ast.SetComp, _ast.DictComp, _ast.GeneratorExp)):
            yield node, above
        waiting += [(each, [*above, node]) for each in _children(node)]


def _prefixes_of(loop: Loop, above: list[_ast.AST], frame: FrameType) -> tuple[str, ...] | None:
    if isinstance(loop, _ast.For):
        target, iterated, test = loop.target, loop.iter, _test_of(loop)
        names = _bound(loop)
        if any(_reads(each, names) for each in loop.orelse) or _is_read_after(loop, above, names):
            return None
    elif len(loop.generators) == 1 and not loop.generators[0].is_async:
        (only,) = loop.generators
        target, iterated, test = only.target, only.iter, only.ifs[0] if only.ifs else _test_in_any(loop, above, frame)
    else:
        return None
    kind = _kind(iterated, frame)
    if kind == "pairs" and isinstance(target, _ast.Tuple) and len(target.elts) == 2:
        target = target.elts[0]
    elif kind != "names":
        return None
    if test is None or not isinstance(target, _ast.Name):
        return None
    found = _tested_prefixes(test, target.id, frame, _stored(loop))
    return None if found is None else tuple(found)


def _test_of(loop: _ast.For) -> _ast.expr | None:
    """The test that comes first in the loop's body: a lone `if`, or `if not ...: continue`."""
    first = loop.body[0]
    if not isinstance(first, _ast.If):
        return None
    if isinstance(first.test, _ast.UnaryOp) and isinstance(first.test.op, _ast.Not) and not first.orelse:
        return first.test.operand if isinstance(first.body[0], _ast.Continue) else None
    tests = [first.test]
    while len(first.orelse) == 1 and isinstance(first.orelse[0], _ast.If):
        first = first.orelse[0]
        tests.append(first.test)
    if first.orelse or len(loop.body) > 1:
        return None
    return tests[0] if len(tests) == 1 else _ast.BoolOp(_ast.Or(), tests)


def _test_in_any(loop: Loop, above: list[_ast.AST], frame: FrameType) -> _ast.expr | None:
    """The test in `any(test for name in os.environ)`."""
    call = above[-1]
    if (
        isinstance(loop, _ast.GeneratorExp)
        and isinstance(call, _ast.Call)
        and isinstance(call.func, _ast.Name)
        and call.func.id == "any"
        and _is_built_in("any", frame)
    ):
        return loop.elt
    return None


def _kind(node: _ast.expr, frame: FrameType) -> str:
    """What iterating over this yields if it comes from `os.environ` and is not stored: "names", "pairs", or ""."""
    if isinstance(node, _ast.Name) or (isinstance(node, _ast.Attribute) and _kind(node.value, frame)):
        return "names"
    if not isinstance(node, _ast.Call) or node.keywords:
        return ""
    function = node.func
    if isinstance(function, _ast.Attribute) and not node.args and _kind(function.value, frame) == "names":
        return {"items": "pairs", "keys": "names", "copy": "names"}.get(function.attr, "")
    if isinstance(function, _ast.Name) and function.id in _COPYING and len(node.args) == 1:
        inner = _kind(node.args[0], frame) if _is_built_in(function.id, frame) else ""
        return "names" if inner and function.id == "dict" else inner
    return ""


def _is_built_in(name: str, frame: FrameType) -> bool:
    """Whether a name has its built-in meaning in a frame, and in the one around it."""
    for each in (frame, frame.f_back or frame):
        code = each.f_code
        if name in each.f_globals or name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            return False
    return True


def _tested_prefixes(test: _ast.expr, name: str, frame: FrameType, stored: set[str]) -> list[str] | None:
    """The prefixes that a name must have to pass a test; None if something else is tested first."""
    if isinstance(test, _ast.BoolOp):
        if isinstance(test.op, _ast.And):
            return _tested_prefixes(test.values[0], name, frame, stored)
        found = [_tested_prefixes(each, name, frame, stored) for each in test.values]
        return None if None in found else [beginning for each in found for beginning in each or ()]
    if (
        isinstance(test, _ast.Call)
        and isinstance(test.func, _ast.Attribute)
        and test.func.attr == "startswith"
        and isinstance(test.func.value, _ast.Name)
        and test.func.value.id == name
        and len(test.args) == 1
        and not test.keywords
    ):
        return _literal_prefixes(test.args[0], frame, stored)
    return None


def _literal_prefixes(node: _ast.expr, frame: FrameType, stored: set[str]) -> list[str] | None:
    """The value of an argument of `startswith` in this frame; None if that takes a call, or the loop changes it."""
    for each in _all(node):
        if not isinstance(each, _COMPUTED) or (isinstance(each, _ast.Name) and each.id in stored):
            return None
    try:
        value = eval(compile(_ast.Expression(node), "?", "eval"), frame.f_globals, frame.f_locals)
    except Exception:
        return None
    texts = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(each, (str, bytes)) for each in texts):
        return None
    return [each if isinstance(each, str) else each.decode(errors="surrogateescape") for each in texts]


def _is_read_after(loop: _ast.For, above: list[_ast.AST], names: set[str]) -> bool:
    """Whether names that the loop leaves bound can be read after it, or before it in the next iteration."""
    function = next(
        (each for each in reversed(above) if isinstance(each, (_ast.FunctionDef, _ast.AsyncFunctionDef))), None
    )
    if function is None or any(isinstance(each, _ast.ClassDef) for each in above[above.index(function) :]):
        return True  # it stays visible in a module or a class
    for each in _all(function):
        if isinstance(each, (_ast.Global, _ast.Nonlocal)) and names & {*each.names}:
            return True
        if isinstance(each, _ast.Name) and each.id in _SEES_LOCALS:
            return True
    return any(_reads(each, names, loop) for each in function.body)


def _reads(node: _ast.AST, names: set[str], apart_from: _ast.For | None = None) -> bool:
    """Whether something in here reads one of these names, other than loops that have bound it anew."""
    if node is apart_from or not names:
        return False
    if isinstance(node, _ast.Name):
        return isinstance(node.ctx, _ast.Load) and node.id in names
    if isinstance(node, _ast.For):
        inside = names - _bound(node)
        return (
            _reads(node.iter, names, apart_from)
            or any(_reads(each, inside, apart_from) for each in node.body)
            or any(_reads(each, names, apart_from) for each in node.orelse)
        )
    return any(_reads(each, names, apart_from) for each in _children(node))


def _bound(loop: _ast.For) -> set[str]:
    return {each.id for each in _all(loop.target) if isinstance(each, _ast.Name)}


def _stored(loop: Loop) -> set[str]:
    """Names that the loop sets or deletes."""
    return {each.id for each in _all(loop) if isinstance(each, _ast.Name) and not isinstance(each.ctx, _ast.Load)}


def _all(node: _ast.AST) -> Iterator[_ast.AST]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += _children(node)


def _children(node: _ast.AST) -> Iterator[_ast.AST]:
    for field in node._fields:
        value = getattr(node, field, None)
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, _ast.AST):
                yield each
