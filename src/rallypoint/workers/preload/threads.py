"""Describes the threads that imports have left: the owner of each, and what switches it off.

Law: nothing here can fail or wait; what the kernel does not show is left out.
"""

from __future__ import annotations

import posix
import sys

from rallypoint.workers.preload.environ_recorder import frame_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

_REMEDIES = {
    "libarrow": "set JE_ARROW_MALLOC_CONF=background_thread:false",
    "jemalloc": "set MALLOC_CONF=background_thread:false",
    "libgomp": "set OMP_NUM_THREADS=1",
    "libiomp": "set OMP_NUM_THREADS=1",
    "libomp": "set OMP_NUM_THREADS=1",
}
"""Prefixes of a library's file or a thread's name, and what keeps the library from starting threads when loaded."""
_SYSTEM_LIBRARIES = (
    "libc.so",
    "libc-",
    "libpthread",
    "ld-linux",
    "ld-musl",
    "libstdc++",
    "libgcc_s",
    "libpython",
    "python",
    "[",
)
"""Files whose code runs in every thread, whichever library has started it."""
_MAX_THREADS = 3
_MAX_STACK = 1 << 16
"""Bytes of a stack that are searched."""


def describe_threads() -> str:
    """All threads except the main one: their names, the library or the Python line that each runs in, and remedies."""
    main = posix.getpid()
    found = [int(each) for each in posix.listdir("/proc/self/task") if int(each) != main]
    words = [_describe(each) for each in found[:_MAX_THREADS]]
    return ", ".join(words) + (", ..." if len(found) > _MAX_THREADS else "")


def _describe(thread: int) -> str:
    python = _python_thread(thread)
    if python:
        return python
    name, library = _text(f"/proc/self/task/{thread}/comm").strip(), _library(thread)
    remedies = (each for start, each in _REMEDIES.items() if name.startswith(start) or library.startswith(start))
    return f"{name}{f' of {library}' if library else ''}{''.join(f' ({each})' for each in list(remedies)[:1])}"


def _python_thread(thread: int) -> str:
    """The name of a thread that Python code has started, and the file and line where its own code is."""
    threading = sys.modules.get("threading")
    if threading is None:
        return ""
    found = [each for each in threading.enumerate() if each.native_id == thread]
    if not found:
        return ""
    frame: FrameType | None = sys._current_frames().get(found[0].ident)
    where = ""
    while frame is not None:
        if frame.f_code.co_filename != threading.__file__:
            where = f" at {frame_location(frame)}"
        frame = frame.f_back
    return f"{found[0].name}{where}"


def _library(thread: int) -> str:
    """The library that a thread belongs to: the one whose code is the outermost on its stack."""
    words = _text(f"/proc/self/task/{thread}/syscall").split()
    if len(words) < 2 or not words[-2].startswith("0x"):  # it runs, or the kernel does not say
        return ""
    top = int(words[-2], 16)
    programs, end = [], top
    for fields in (line.split(maxsplit=5) for line in _text("/proc/self/maps").splitlines()):
        first, last = (int(each, 16) for each in fields[0].split("-"))
        if first <= top < last:
            end = min(last, top + _MAX_STACK)
        if "x" in fields[1] and len(fields) > 5:
            programs.append((first, last, fields[5].rpartition("/")[2]))
    for address in reversed(_memory(top, end)):
        for first, last, name in programs:
            if first <= address < last and not name.startswith(_SYSTEM_LIBRARIES):
                return name
    return ""


def _memory(first: int, end: int) -> list[int]:
    """The words of this process's memory between two addresses."""
    try:
        fd = posix.open("/proc/self/mem", posix.O_RDONLY | posix.O_CLOEXEC)
        try:
            data = posix.pread(fd, end - first, first)
        finally:
            posix.close(fd)
    except OSError:
        return []
    return list(memoryview(data[: len(data) // 8 * 8]).cast("Q"))


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
