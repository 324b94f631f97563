"""Exceptions of signal handlers, raised at every place where CPython looks for signals: at the start of a function, and
after each call."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType


class Interrupted(BaseException):
    """What a signal handler might raise."""


def interrupt_everywhere(call: Callable[[], object]) -> Iterator[tuple[str, Interrupted]]:
    """Call it again and again, interrupted at the first place, the second, and so on, until it comes to its end.

    Yields:
        The place, and the exception, whose traceback holds what was on the stack, as it does for whoever handles it.
    """
    for number in itertools.count(1):
        found = _interrupt(call, number)
        if found is None:
            return
        yield found


def _interrupt(call: Callable[[], object], number: int) -> tuple[str, Interrupted] | None:
    """Call it and interrupt it at the place of that number; None if there are fewer."""
    left, place = number, ""

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[[FrameType, str, object], object] | None:
        nonlocal left, place
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call" or (event == "opcode" and frame.f_lasti in _after_calls(frame.f_code)):
            left -= 1
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


_known: dict[CodeType, frozenset[int]] = {}


def _after_calls(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions that follow a call."""
    if code not in _known:
        pairs = itertools.pairwise(dis.get_instructions(code))
        calls = ("CALL", "CALL_FUNCTION_EX", "CALL_KW")
        _known[code] = frozenset(after.offset for before, after in pairs if before.opname in calls)
    return _known[code]
