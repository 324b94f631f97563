"""`Interruption`: raises `RoundEnded` in the function of a worker whose round has ended, where this is harmless.

Another thread interrupts the main thread with a signal, so that blocking system calls return too. Python runs a signal
handler after a call, at the start of a function, or when a loop starts again. One such point is between the call that
switches something on and the line that records this for switching it off. So `RoundEnded` is raised only at some of
these points. At the others the handler returns, and the signal is sent again a moment later.

Laws:

1. `RoundEnded` is raised only in the main thread, only while the function runs, and only if its round has ended.
2. Nothing is raised within `uninterrupted` (or `notices.saving`), but at the end of the block.
3. Nothing is raised while the function handles an exception, `RoundEnded` or another: in `except`, and in `finally` and
   `with` on the way out. Exceptions that the function's caller handles do not count. Repeat `send` until the function
   ends: nothing else notices that an exception has been handled.
4. Nothing is raised in `__del__` and in finalizers: Python only prints such exceptions, and would cut the clean-up
   short. If an error leaves a loop over torch's data loader, its finalizer does not even see the error.
5. Nothing is raised during an import, which would leave a partial module: many cannot be imported twice.
6. A forked process is never interrupted.
7. Nothing is raised between acquiring something and releasing it:

   - in `__enter__`, `__exit__`, `acquire` and `release`, and in the functions that they call;
   - where a `with` statement creates, enters or leaves its context manager: `torch.set_grad_enabled(False)` switches
     when it is created;
   - in `finally`, unless an exception leads to it;
   - after the last call before a `try` that has a `finally`: `lock.acquire()`;
   - in the standard library: queues, locks and pools have states that outlive the function.

   The exception: the main thread waits in a call that a signal interrupts and that then continues to wait. Such a call
   may fail anyway, so the code around it expects an exception. And nothing else might ever end it. The thread counts
   as waiting if the handler finds the same instruction of the same frame `_LOOKS` times in a row.

One case remains: a user's call between two lines that belong together, without `with` or `try`. Use `uninterrupted`
there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from opcode import opmap
from types import CodeType, FrameType
from typing import NamedTuple

from rallypoint import notices

_LOOKS = 5
"""With pauses of 1, 2, 4 and 8 ms between signals, this takes 15 ms. A computing thread has moved on by then."""
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
_FINALIZERS = (("weakref", "finalize"), ("multiprocessing.util", "Finalize"))
"""Classes of callbacks that run when an object is collected."""
_PAIRED = frozenset(("__enter__", "__exit__", "__aenter__", "__aexit__", "acquire", "release"))
"""Pairs of functions that undo each other."""
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = os.path.join(_STANDARD_LIBRARY, "site-packages", ""), os.path.join(_STANDARD_LIBRARY, "dist-packages", "")
_OF_BLOCKS = frozenset((notices.pending.__code__.co_filename, contextmanager.__code__.co_filename))
"""Files whose code runs at the end of an `uninterrupted` block."""
_used = 0
"""The signal that earlier functions used, since few signals are free."""


class RoundEnded(BaseException):
    """The round has ended. Do not catch this. It is not an `Exception`, so error handlers do not catch it either."""


class Interruption:
    """The only owner of the signal and its handler."""

    def __init__(self, due: Callable[[], bool], caller: CodeType | None = None) -> None:
        """Install the handler for a free signal permanently.

        Args:
            due: returns whether the function's round has ended. Called in the handler.
            caller: the code object that calls the function. Frames above it do not count.

        Raises:
            OSError, ValueError: this is not the main thread, or no signal is free.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("it was not called on the main thread")
        self._due = due
        self._caller = caller
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self.inside = False
        """Whether the function is running."""
        self.raised = False
        """Whether it was interrupted."""
        self._handled_by_caller = id(None)
        self._looking = False
        """Whether `check` is inspecting the frames."""
        self._found: tuple[FrameType, int] | None = None
        """The frame and instruction at which the last look found the main thread without interrupting it."""
        self._looks = 0
        """How many looks in a row found it there."""
        global _used
        self._signal = _used = _free_signal()
        # Never remove it: a signal may be on its way when the function returns.
        signal.signal(self._signal, lambda _number, frame: self.check(frame))
        notices.interrupt = self._check_after_block

    def enter(self) -> None:
        """Note that the function starts; raise `RoundEnded` if its round has already ended."""
        self.raised = False
        # Only the id: the exception would keep its traceback's objects. The caller's frame keeps it alive long enough.
        self._handled_by_caller = id(sys.exc_info()[1])
        self.inside = True
        self.check(None)

    def leave(self) -> None:
        """Note that the function has ended."""
        self.inside = False
        self._found = None

    def check(self, frame: FrameType | None, *, block: bool = False) -> None:
        """Raise `RoundEnded` if it is due and the main thread may be interrupted at this point.

        Args:
            frame: the innermost frame that counts; None before the function runs.
            block: whether a `with` statement of this frame has just ended, so that the exception may leave it.
        """
        if not self.inside or self._looking or os.getpid() != self._pid or not self._due():
            return
        if notices.open_blocks or threading.get_ident() != self._main or self._handles_an_exception():
            return
        # While A, the handler of one signal, looks at the frames, another signal arrives:
        #   1. its handler B finds A's own frame as the innermost, outside of `with` and the standard library;
        #   2. so B would raise exactly where A was about to hold back.
        self._looking = True
        try:
            places = [Place(caller.f_code, caller.f_lasti) for caller in self._frames(frame)]
            if _importing_or_finalizing(places):
                return
            if frame is not None and cuts_in_between(places, block=block) and not self._waits(frame):
                return
        finally:
            self._looking = False
        self.raised, self._found = True, None
        raise RoundEnded

    def send(self) -> None:
        """Make the main thread call `check`, from another thread."""
        if self._main is not None:
            signal.pthread_kill(self._main, self._signal)

    def _check_after_block(self) -> None:
        """Check last at the end of an `uninterrupted` or `saving` block; the exception leaves from there."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in _OF_BLOCKS:
            frame = frame.f_back
        self.check(frame, block=True)

    def _frames(self, frame: FrameType | None) -> Iterator[FrameType]:
        """The function's frames, innermost first."""
        while frame is not None and frame.f_code is not self._caller:
            yield frame
            frame = frame.f_back

    def _waits(self, frame: FrameType) -> bool:
        """Whether the main thread is waiting in a call in this frame.

        Store the frame itself, not its id: the function's next call could have the same id. A function that is called
        again and again would then look like one that waits.
        """
        if self._found is not None and self._found[0] is frame and self._found[1] == frame.f_lasti:
            self._looks += 1
        else:
            self._found, self._looks = (frame, frame.f_lasti), 1
        return self._looks >= _LOOKS

    def _handles_an_exception(self) -> bool:
        error = sys.exc_info()[1]
        return error is not None and id(error) != self._handled_by_caller


class Place(NamedTuple):
    """A position in a function: this instruction or, for a call, its return."""

    code: CodeType
    offset: int

    def line(self) -> int | None:
        """The line of the instruction."""
        return next((line for begin, end, line in self.code.co_lines() if begin <= self.offset < end), None)


def _importing_or_finalizing(places: list[Place]) -> bool:
    finalizers = [
        finalizer_class.__call__.__code__
        for module, name in _FINALIZERS
        if (finalizer_class := getattr(sys.modules.get(module), name, None)) is not None
    ]
    return any(
        code.co_filename == _IMPORT_SYSTEM
        or code.co_name == "__del__"
        or any(code is finalizer for finalizer in finalizers)
        for code, _ in places
    )


def cuts_in_between(places: list[Place], *, block: bool = False) -> bool:
    """Whether an exception here would come between acquiring something and releasing it (law 7).

    Args:
        places: positions in the running functions, innermost first. Empty: nothing is cut.
        block: whether a `with` statement of the innermost function has just ended, so that the exception may leave it.
    """
    if not places:
        return False
    if not block and (_is_standard(places[0].code.co_filename) or _is_before_try(places[0])):
        return True
    return any(
        place.code.co_name in _PAIRED or _is_at_the_edge(place, after_with=block and place is places[0])
        for place in places
    )


def _is_standard(path: str) -> bool:
    return path.startswith("<frozen ") or (path.startswith(_STANDARD_LIBRARY) and not path.startswith(_PACKAGES))


# Where `with`, `try` and `finally` begin and end in bytecode

_MAKES_EDGES, _CALLS_EXIT, _RAISES_AGAIN = opmap["PUSH_EXC_INFO"], opmap["WITH_EXCEPT_START"], opmap["RERAISE"]
_NOTHING = frozenset(opmap[name] for name in ("CACHE", "NOP", "COPY", "SWAP") if name in opmap)
_ENTERS = frozenset(opmap[name] for name in ("BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL") if name in opmap)
_LEAVES = frozenset(opmap[name] for name in ("RAISE_VARARGS", "RETURN_VALUE", "RETURN_CONST") if name in opmap)


class _CleanUp(NamedTuple):
    """Code that runs after a body: `finally`, the exit of `with`, or `except`; and the lines that occur only in it."""

    lines: frozenset[int]
    bodies: tuple[tuple[int, int], ...]
    """The bodies that precede it: offsets of the first instruction, and after the last."""
    of_with: bool


class _Edges(NamedTuple):
    clean_ups: tuple[_CleanUp, ...]
    before: tuple[tuple[int, int], ...]
    """For each `try` with `finally`, the line before it and the offset at which its body begins."""


def _is_at_the_edge(place: Place, *, after_with: bool) -> bool:
    """Whether a function is creating, entering or leaving a context manager, or is in `finally`."""
    if not place.code.co_exceptiontable:
        return False
    # If its items are on several lines, the call that creates an item is on its own line.
    if not after_with and _next_operation(place) in _ENTERS:
        return True
    line = place.line()
    return any(
        line in clean_up.lines
        and not (after_with and clean_up.of_with)
        and not _is_within(place.offset, clean_up.bodies)
        for clean_up in _edges(place.code).clean_ups
    )


def _is_before_try(place: Place) -> bool:
    """Whether a function has just made the last call before a `try` that has a `finally`."""
    if not place.code.co_exceptiontable:
        return False
    line = place.line()
    return any(line == before and place.offset < begin for before, begin in _edges(place.code).before)


def _is_within(offset: int, spans: tuple[tuple[int, int], ...]) -> bool:
    return any(begin <= offset < end for begin, end in spans)


def _next_operation(place: Place) -> int:
    """The next operation that has an effect; -1 if none is near."""
    operations = place.code.co_code[place.offset + 2 : place.offset + 34 : 2] if place.offset >= 0 else b""
    return next((operation for operation in operations if operation not in _NOTHING), -1)


@lru_cache(maxsize=4096)
def _edges(code: CodeType) -> _Edges:
    operations, lines = code.co_code[::2], _lines(code)
    clean_ups, before = [], []
    for target, bodies in _bodies(code).items():
        if operations[target // 2] != _MAKES_EDGES:
            continue
        # Up to the first RERAISE: only a part of the handler, if it contains a `try` itself.
        end = 2 * operations.find(_RAISES_AGAIN, target // 2)  # one always exists
        own = frozenset(line for first, last, line in lines if line and first < end and last > target)
        of_with = operations[target // 2 + 1] == _CALLS_EXIT
        clean_ups.append(_CleanUp(own, tuple(bodies), of_with))
        twice = any(line in own for first, last, line in lines if last <= target or first >= end)
        begin = min(bodies)[0]
        if twice and not of_with and (line := _line_before(operations, lines, begin)) is not None:
            before.append((line, begin))
    return _Edges(tuple(clean_ups), tuple(before))


def _lines(code: CodeType) -> list[tuple[int, int, int | None]]:
    """The lines in the order of their instructions, each with the offsets of the first and after the last one."""
    groups = groupby(code.co_lines(), key=lambda entry: entry[2])
    return [(parts[0][0], parts[-1][1], line) for line, group in groups if (parts := list(group))]


def _line_before(operations: bytes, lines: list[tuple[int, int, int | None]], begin: int) -> int | None:
    """The line that runs before the `try` whose body begins at this offset.

    For `if not lock.acquire(timeout): raise Timeout`, this is the line with `if`, not the one with `raise`.
    """
    if operations[begin // 2 - 1] != opmap["NOP"]:
        return None
    before = [line for line in lines if line[1] <= begin][:-1]  # without the line of `try`
    falls_through = (line for first, last, line in reversed(before) if operations[last // 2 - 1] not in _LEAVES)
    return next(falls_through, None)


def _bodies(code: CodeType) -> dict[int, list[tuple[int, int]]]:
    """For each exception handler, by offset, the ranges that it guards, including those of an inner handler."""
    table = list(_exception_table(code))
    by_handler: dict[int, list[tuple[int, int]]] = {}
    for begin, end, target in table:
        todo, outer = [target], set[int]()
        while todo:
            outer.add(inner := todo.pop())
            todo += {entry[2] for entry in table if entry[0] <= inner < entry[1]} - outer
        for handler in outer:
            by_handler.setdefault(handler, []).append((begin, end))
    return by_handler


def _exception_table(code: CodeType) -> Iterator[tuple[int, int, int]]:
    """Offsets: the first guarded instruction, after the last one, and the handler.

    CPython's Objects/exception_handling_notes.txt has the format: numbers with six bits per byte, in instructions.
    """
    numbers, value = [], 0
    for byte in code.co_exceptiontable:
        value = value << 6 | byte & 63
        if not byte & 64:
            numbers.append(2 * value)
            value = 0
    for begin, length, target, _depth in zip(*[iter(numbers)] * 4, strict=True):
        yield begin, begin + length, target


def _free_signal() -> int:
    if _used and getattr(signal.getsignal(_used), "__module__", "") == __name__:
        return _used
    names = vars(signal)
    for number in range(names.get("SIGRTMAX", 0) - 1, names.get("SIGRTMIN", 0), -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    raise OSError("every real-time signal already has a handler, or this system has none")
