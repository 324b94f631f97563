"""Exceptions of signal handlers, raised at every place where CPython looks for signals.

These are the start of a function, and the time after each call.
"""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

from rallypoint.inprocess.interruption import Place


class Interrupted(BaseException):
    """What a signal handler might raise."""


def interrupt_everywhere(
    call: Callable[[], object], spares: Callable[[list[Place]], bool] = lambda _: False
) -> Iterator[tuple[str, Interrupted]]:
    """Call it again and again, interrupted at the first place, the second, and so on, until it comes to its end.

    Args:
        call: what is interrupted.
        spares: says whether nothing is raised at a place; asked with the functions that run, the innermost first.

    Yields:
        The place, and the exception, whose traceback holds what was on the stack, as it does for whoever handles it.
    """
    for number in itertools.count(1):
        found = _interrupt(call, number, spares)
        if found is None:
            return
        yield found


def _interrupt(
    call: Callable[[], object], number: int, spares: Callable[[list[Place]], bool]
) -> tuple[str, Interrupted] | None:
    """Call it and interrupt it at the place of that number; None if there are fewer."""
    left, place = number, ""

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[[FrameType, str, object], object] | None:
        nonlocal left, place
        frame.f_trace = trace  # before the next line: Python 3.13 and later look at it there
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        called = frame.f_lasti if event == "call" else _after_calls(frame.f_code).get(frame.f_lasti)
        if event == "call" or (event == "opcode" and called is not None):
            left -= not spares(_places(frame, called or 0))
            if left == 0:
                place = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    except Interrupted as error:
        return place, error
    finally:
        sys.settrace(before)
    return None


def _places(innermost: FrameType, offset: int) -> list[Place]:
    found, frame = [Place(innermost.f_code, offset)], innermost.f_back
    while frame is not None and frame.f_code is not _interrupt.__code__:
        found.append(Place(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


_known: dict[CodeType, dict[int, int]] = {}


def _after_calls(code: CodeType) -> dict[int, int]:
    """The offsets of the instructions that follow a call, to those of the calls."""
    if code not in _known:
        pairs = itertools.pairwise(dis.get_instructions(code))
        calls = ("CALL", "CALL_FUNCTION_EX", "CALL_KW")
        _known[code] = {after.offset: before.offset for before, after in pairs if before.opname in calls}
    return _known[code]
