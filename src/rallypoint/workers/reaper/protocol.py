"""What an agent and its guardian say to each other: requests, their frames, and descriptors beside them.

Laws:

1. Both ends import this, and the guardian's must be ready fast: built-in modules only.
2. Frames are `marshal` behind a length: both ends are ours, on one host, under one interpreter.
"""

from __future__ import annotations

import marshal
import sys
from _socket import SCM_RIGHTS, SOL_SOCKET

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SPAWN, STATUS, KILL, SWEEP, GIVE_UP = "spawn", "status", "kill", "sweep", "give up"
CLEANUP, SHRINK, CLOSE = "cleanup", "shrink", "close"
ADOPT, HEARD = "adopt", "heard"
"""The requests `(number, name, *arguments)`; they are answered by `(number, answer)`, a sweep when it is over.

SPAWN  programs, arguments, environment, descriptors, ignored signals, mask, umask, cpus, kept
            -> pid and a pidfd, or minus errno; no sweep touches a kept one or what is below it, until it has ended
STATUS pid  -> exit code (-N for a signal), and forgets it; NOT_YET while it is not reaped, None if it is not known
KILL   pid  -> nothing; SIGKILL to one worker
ADOPT  pid  -> whether it is there; from now on it counts as a worker: it will fall to the guardian as an orphan
HEARD       -> numbers of the signals that the guardian was sent since it last told, or last started a worker
SWEEP  seconds -> nothing; SIGTERM to all that is below, after so many seconds SIGKILL, again and again until nothing is
            left; 0 for SIGKILL at once. It takes the place of a sweep before it, and goes on until
GIVE_UP     it is given up: no answer of its own
CLEANUP folders to remove where they are empty, folders to remove whole -> nothing
SHRINK      no answer; there is time to give memory back
CLOSE       no answer
"""

NOT_YET = "not yet"

DENIED = {101: "setsid", 102: "prctl (PR_SET_CHILD_SUBREAPER)"}
"""Exit codes of a keeper that is denied a system call, which it cannot do without."""

CLOSED = -1
"""In `descriptors` of SPAWN (for 0, 1 and 2, which of the sent ones it shall be): the worker starts without it."""

MAX_DESCRIPTORS = 4
_HEAD = 4


def frame(message: tuple[Any, ...]) -> bytes:
    """The bytes of a message."""
    body = marshal.dumps(message)
    return len(body).to_bytes(_HEAD, "little") + body


def parse(buffer: bytearray) -> tuple[Any, ...] | None:
    """Take the first message off the buffer; None if it is not whole yet."""
    if len(buffer) < _HEAD:
        return None
    end = _HEAD + int.from_bytes(buffer[:_HEAD], "little")
    if len(buffer) < end:
        return None
    message: tuple[Any, ...] = marshal.loads(bytes(buffer[_HEAD:end]))
    del buffer[:end]
    return message


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            found += [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data) - 3, 4)]
    return found


def ancillary_data(descriptors: list[int]) -> list[tuple[int, int, bytes]]:
    """The ancillary data that carries descriptors."""
    data = b"".join(fd.to_bytes(4, sys.byteorder) for fd in descriptors)
    return [(SOL_SOCKET, SCM_RIGHTS, data)] if descriptors else []
