"""Extracts the end of a worker's output for the report. Imported after workers start: no start waits for it.

Laws:
- the end has at most `TAIL_SIZE` bytes;
- a long line loses its middle, so that it does not displace other lines;
- a traceback that may have ended the program, but is not among the last lines, is put before them with a line `[...]`
between. Libraries that are destroyed after an exception can write megabytes.
"""

from __future__ import annotations

import os
from contextlib import suppress

TAIL_SIZE = 64 * 1024
"""Bytes per stream of a worker that the report uses."""
_MAX_LINE = 4 * 1024
"""Maximum bytes per line."""
_HEADING = b"Traceback (most recent call last)"
_OUTERMOST = b"<module>", b"_run_module_as_main"
"""Functions in the first frame of an exception that ended a program, however the traceback is drawn."""
_TRACEBACK_SIZE, _ABOVE = 24 * 1024, 4 * 1024
"""Maximum bytes of a traceback, and how many of them may precede its heading, for earlier exceptions."""
_BLOCK, _SEARCHED = 1024 * 1024, 8 * 1024 * 1024
"""Bytes of a file to read at once, and bytes at its end to search for a traceback."""
_GAP = b"\n[...]\n"


def end_of_file(path: str) -> bytes:
    """The end of a file's contents; empty if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        begin = max(0, size - _BLOCK)
        traceback, data = shortened(os.pread(fd, _BLOCK, begin))
        while not traceback and begin and size - begin < _SEARCHED:
            until, begin = begin, max(0, begin - _BLOCK)
            traceback = _last_of_a_program(os.pread(fd, until - begin + _TRACEBACK_SIZE, begin), until - begin)
        return joined(traceback, data)
    return b""


def shortened(data: bytes, traceback: bytes = b"") -> tuple[bytes, bytes]:
    """Split the data: the last traceback before the end that may have ended the program (or the given one), and the
    end."""
    data = _without_long_middles(data)
    return _last_of_a_program(data, max(0, len(data) - TAIL_SIZE)) or traceback, data[-TAIL_SIZE:]


def joined(traceback: bytes, data: bytes) -> bytes:
    """Join both results of `shortened`."""
    return traceback + _GAP + data[len(traceback) + len(_GAP) - TAIL_SIZE :] if traceback else data


def _last_of_a_program(data: bytes, end: int) -> bytes:
    """The last traceback before `end` whose first frame can be a program's; empty if none."""
    at = data.rfind(_HEADING, 0, end + len(_HEADING) - 1)
    while at >= 0:
        head = b"\n".join(data[at : at + 500].split(b"\n", 3)[:3])
        if any(function in head for function in _OUTERMOST):
            return data[max(0, at - _ABOVE) : at - _ABOVE + _TRACEBACK_SIZE]
        at = data.rfind(_HEADING, 0, at)
    return b""


def _without_long_middles(data: bytes) -> bytes:
    if len(data) <= TAIL_SIZE:
        return data
    lines = data.split(b"\n")
    half = _MAX_LINE // 2
    return b"\n".join(line if len(line) <= _MAX_LINE else line[:half] + b"[...]" + line[-half:] for line in lines)
