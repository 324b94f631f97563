"""Describes Python stacks: who owns the code of each call, a one-line summary, and which stacks are equal. Pure.

Stacks come from py-spy's text (`main_frames`), from a process's frames (`frames_of`), or from a traceback
(`frames_of_traceback`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

from rallypoint.base.log import printable
from rallypoint.base.python_memory import PythonFrame

MAX_FRAMES = 40
"""Maximum number of frames to send per main thread: the innermost ones."""

MAX_NAME = 200
"""Maximum number of characters kept of a function's name: the last ones."""
MAX_FILE = 300
"""Maximum number of characters kept of a file's name."""

_FRAME = re.compile(r"\s+(\S.*?) \((.*?)(?::(\d{1,9}))?\)\s*")
_MAIN = '"MainThread"'
_LIBRARY = re.compile(r".*/(?:site|dist)-packages/(.+)|.*/lib(?:64)?/python3[^/]*/(.+)|(<.+>)")
"""A file that is not the user's. Its short name is relative to the folder of packages or of Python."""
_WRAPPERS = frozenset(
    {"wrapper", "inner", "wrapped", "_fn", "decorate_context", "_call_impl", "_wrapped_call_impl", "__call__"}
)
"""Library functions that only call a function of the user's choice."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One call: `file` is its full path, or a name in angle brackets for code without a file."""

    function: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    file: Annotated[str, msgspec.Meta(max_length=MAX_FILE)]
    line: Annotated[int, msgspec.Meta(ge=0, lt=10**9)] = 0


class Call(NamedTuple):
    """A frame as displayed and compared. `line` is 0 in code that is not the user's."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.place})"

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@lru_cache(maxsize=16)
def main_frames(text: str) -> tuple[Frame, ...]:
    """The frames of the first process's main thread in py-spy's output, which must have full file names.

    If no thread is called the main thread, the first one counts.
    """
    threads: list[tuple[str, list[Frame]]] = []
    processes = 0
    for line in text.splitlines():
        if line.startswith("Process "):
            processes += 1
            if processes > 1:
                break
        elif line.startswith("Thread "):
            threads.append((line.partition(": ")[2].strip(), []))
        elif threads and (match := _FRAME.fullmatch(line)):
            function, file = printable(match[1][-MAX_NAME:]), printable(match[2][-MAX_FILE:], MAX_FILE)
            threads[-1][1].append(Frame(function, file, int(match[3] or 0)))
    named = next((frames for name, frames in threads if name == _MAIN), None)
    return tuple(named if named is not None else threads[0][1] if threads else ())


def frames_of(frames: Iterable[PythonFrame]) -> tuple[Frame, ...]:
    """A process's frames in the form for sending, innermost first."""
    return tuple(
        Frame(printable(frame.function[-MAX_NAME:]), printable(frame.file[-MAX_FILE:], MAX_FILE), max(0, frame.line))
        for frame in frames
    )


def in_words(frames: Sequence[Frame]) -> str:
    """Describe a stack: `all_reduce (train.py:41, in validate)`; empty for none."""
    return calls_in_words(calls_of(frames))


def calls_in_words(calls: Sequence[Call]) -> str:
    """Like `in_words`, for calls."""
    name, comma, place = summary_of(calls).partition(", ")
    if name == "<module>":
        return place
    own = next((call.function for call in calls if call.line), "")
    inside = f", in {own}" if own not in ("", name, "<module>") else ""
    return f"{name} ({place}{inside})" if comma else name


_TRACEBACK_FRAME = re.compile(r'^  File "([^"\n]+)", line (\d{1,9}), in (.+)$', re.MULTILINE)


def frames_of_traceback(text: str) -> tuple[Frame, ...]:
    """The frames in a traceback, innermost first."""
    found = _TRACEBACK_FRAME.findall(text)[::-1][:MAX_FRAMES]
    return frames_of(PythonFrame(function, file, int(line)) for file, line, function in found)


def short_lines(text: str) -> list[str]:
    """Shorten py-spy's output: short file names, no process ids."""
    root = _root(main_frames(text))
    shown = []
    for line in text.splitlines():
        if match := _FRAME.fullmatch(line):
            place = _short_path(match[2], root)
            shown.append(f"    {match[1]} ({place}:{match[3]})" if match[3] else f"    {match[1]} ({place})")
        elif line.startswith("Thread "):
            shown.append(f"  Thread {line.partition(': ')[2]}".rstrip())
    return shown


def calls_of(frames: Sequence[Frame]) -> tuple[Call, ...]:
    """Convert the frames of one thread so that they do not differ between machines.

    The user's files become relative to the folder of the script (the outermost file), libraries' to the folder of
    packages. Of a function's qualified name, only the last part is kept.
    """
    return _calls_of(tuple(frames))


@lru_cache(maxsize=1024)
def _calls_of(frames: tuple[Frame, ...]) -> tuple[Call, ...]:
    root = _root(frames)
    return tuple(
        Call(frame.function.rpartition(".")[2] or frame.function, _short_path(frame.file, root), _line(frame))
        for frame in frames
    )


def _root(frames: Sequence[Frame]) -> str:
    """The script's folder: that of the outermost call in the user's code."""
    script = next((frame.file for frame in reversed(frames) if not _LIBRARY.fullmatch(frame.file)), "")
    return script.rpartition("/")[0]


def _line(frame: Frame) -> int:
    return 0 if _LIBRARY.fullmatch(frame.file) else max(frame.line, 1)


def _short_path(file: str, root: str) -> str:
    if library := _LIBRARY.fullmatch(file):
        return next(part for part in library.groups() if part)
    if root and file.startswith(f"{root}/"):
        return file[len(root) + 1 :]
    return "/".join(file.rsplit("/", 2)[-2:])


def summary_of(calls: Sequence[Call]) -> str:
    """Summarize a stack in one line: the library function that the user's code calls, and where; without one, the
    user's own function; without user code, the innermost call; empty without calls.

    If that library function calls a collective, the collective is named instead.
    """
    if not calls:
        return ""
    depth = next((at for at, call in enumerate(calls) if call.line), None)
    if depth is None:
        return str(calls[0])
    inner, place = calls[:depth], calls[depth].place
    collective = next((call for call in inner if call.file.endswith(_COLLECTIVES) and _is_named(call)), None)
    if collective is None and inner and inner[-1].file.startswith(_IMPORT):
        return f"import, {place}"
    called = collective or next((call for call in reversed(inner) if _is_named(call)), None)
    if called is None:
        return f"{calls[depth].function}, {place}"
    name = (
        f"{called.function} of {called.file.rpartition('/')[2]}" if called.function.startswith("_") else called.function
    )
    return f"{name}, {place}"


_CHILDREN = ("multiprocessing/", "concurrent/futures/", "subprocess.py", "torch/utils/data/", "torch/multiprocessing/")
_IMPORT = "<frozen importlib"
_COLLECTIVES = "torch/distributed/distributed_c10d.py"


def waits_for_children(calls: Sequence[Call]) -> bool:
    """Whether a stack is in code that waits for processes of data loaders, pools or programs."""
    return any(call.file.startswith(_CHILDREN) for call in calls)


def place_of(calls: Sequence[Call]) -> str:
    return next((call.place for call in calls if call.line), "")


def _is_named(call: Call) -> bool:
    return call.function not in _WRAPPERS and not call.function.startswith("<")
