"""Logs what workers still import after the fork, which shows what else to preload. Only at LOGLEVEL=DEBUG.

A worker writes a line for each module that it loads into a file of the agent, opened again each time: nothing of it
stays in the worker but an audit hook, which no script can see.
"""

from __future__ import annotations

import posix
import sys

from rallypoint.workers.preload.environ_recorder import frame_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_MAX_REPORTED = 20
_MACHINERY = "<frozen importlib."


def report(path: str) -> None:
    """Make this process record from now on what it imports.

    Args:
        path: of an existing file.
    """
    pid = posix.getpid()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "import":
            return
        name, where = _importer(str(arguments[0]), sys._getframe(1))
        if posix.getpid() != pid or not where or where.startswith("<frozen"):
            return  # a process of the worker's own, or the interpreter
        try:
            fd = posix.open(path, posix.O_WRONLY | posix.O_APPEND | posix.O_CLOEXEC)
        except OSError:  # the agent is gone
            return
        posix.write(fd, f"{pid} {name} {where}\n".encode(errors="replace"))
        posix.close(fd)

    sys.addaudithook(hook)


def _importer(name: str, frame: FrameType | None) -> tuple[str, str]:
    """The outermost module that is being imported, and the code that imports it."""
    where = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_MACHINERY):
            if frame.f_code.co_name == "_find_and_load":
                name, where = frame.f_locals["name"], ""
        elif not where and not file.endswith("/importlib/__init__.py"):
            where = frame_location(frame)
        frame = frame.f_back
    return name, where


def summary(text: str) -> str:
    """A sentence about what workers have recorded; empty if that is nothing.

    Args:
        text: the contents of the file.
    """
    counts: dict[tuple[str, str], int] = {}
    places: dict[str, str] = {}
    for line in text.splitlines():
        pid, _, rest = line.partition(" ")
        name, _, where = rest.partition(" ")
        if not where:  # a name may be any text, also of several lines
            continue
        counts[name, pid] = counts.get((name, pid), 0) + 1
        places.setdefault(name, where)
    most = {name: max(count for (each, _), count in counts.items() if each == name) for name in places}
    names = sorted(most, key=lambda name: -most[name])
    words = [
        f"{each} ({most[each]} module{'s' * (most[each] > 1)}, at {places[each]})" for each in names[:_MAX_REPORTED]
    ]
    more = f" and {len(names) - _MAX_REPORTED} others" if len(names) > _MAX_REPORTED else ""
    return f"{', '.join(words)}{more}" if words else ""
