"""The protocol between an agent and its reaper: requests, frames, and descriptors sent with them.

Laws:

1. Import only built-in modules: both ends import this one, and the reaper must be ready fast.
2. Frames are `marshal` data after a length: both ends are ours, on one host, with one interpreter.
"""

from __future__ import annotations

import _socket
import marshal
import posix
import sys
from _socket import SCM_RIGHTS, SOL_SOCKET

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Sequence
    from typing import Any

SPAWN, STATUS, SIGNAL, ADOPT, SIGNALS = "spawn", "status", "signal", "adopt", "signals"
SWEEP, GIVE_UP, FENCE, CLEANUP, RECORD, CLOSE = "sweep", "give up", "fence", "cleanup", "record", "close"
"""Requests `(name, *arguments)`. Requests with an arrow are answered by `(answer,)`, in order.

SPAWN     environment, (ignored signals, mask, umask), excluded, workers -> their pids, with a descriptor for each: its
          pidfd, or without pidfds the end of a pipe that is closed when it has ended; or minus errno, and then none
          is left. For each worker: arguments, its own variables, the positions of 0, 1 and 2 among the sent
          descriptors (the first of which is the folder of all workers), and its processors. No sweep touches excluded
          workers or their descendants until these workers have ended
STATUS    pid -> exit codes (-N for a signal) of all workers reaped since the last request, and whether this one is
          still to be reaped
SIGNAL    pids, number: a signal to each of them that is a worker, or was adopted, and has not ended
ADOPT     pid, excluded, opened -> whether it exists; if `opened`, with a descriptor as for SPAWN. As an orphan it will
          become a child of the reaper. It counts as a worker from now on; if excluded, it may become one, and until it
          is adopted as such no sweep touches it
SIGNALS   -> numbers of the signals that the reaper received since the last request or the last start of a worker
CLEANUP   folders to remove if they are empty, folders to remove whole
RECORD    folder, pid of the agent, text to write there if the agent ends without closing the reaper
SWEEP     seconds, pids, with the writing end of a pipe: SIGTERM to everything below, after so many seconds SIGKILL,
          again and again until nothing is left; 0 for SIGKILL at once. Spares the workers with these pids, with their
          descendants and their sessions. Replaces an earlier sweep. When it has ended or was given up, a byte goes into
          the pipe
GIVE_UP   give up the sweep
FENCE     a moment on CLOCK_BOOTTIME at which to kill everything below, unless a later one comes first
CLOSE     the agent no longer needs the reaper
"""

DENIED = {101: "setsid", 102: "prctl (PR_SET_CHILD_SUBREAPER)", 103: "prctl (PR_SET_PDEATHSIG)"}
"""Exit codes of a supervisor that was denied a system call it needs."""

CLOSED = -1
"""In place of the position of 0, 1 or 2: the worker starts without that descriptor."""

_DESCRIPTORS_AT_ONCE = 250
"""The kernel sends up to 253 per call."""
_ANCILLARY_SIZE = 64 + 4 * _DESCRIPTORS_AT_ONCE
_CLOSE_ON_EXEC: int = getattr(_socket, "MSG_CMSG_CLOEXEC", 0)
"""0 if the system does not have this flag."""
_HEAD = 4


def frame(message: tuple[Any, ...]) -> bytes:
    """Encode a message."""
    body = marshal.dumps(message)
    return len(body).to_bytes(_HEAD, "little") + body


def parse(buffer: bytearray) -> tuple[Any, ...] | None:
    """Remove and return the first message in the buffer; None if it is incomplete."""
    if len(buffer) < _HEAD:
        return None
    end = _HEAD + int.from_bytes(buffer[:_HEAD], "little")
    if len(buffer) < end:
        return None
    message: tuple[Any, ...] = marshal.loads(bytes(buffer[_HEAD:end]))
    del buffer[:end]
    return message


class Connection:
    """One end of a message stream; owns its socket."""

    def __init__(self, link: socket) -> None:
        self.socket = link
        self.buffer = bytearray()

    def send(self, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        """Send a message with descriptors. Raises OSError."""
        data, left = memoryview(frame(message)), list(descriptors)
        while left:  # send descriptors beyond one call with another byte
            some, left = left[:_DESCRIPTORS_AT_ONCE], left[_DESCRIPTORS_AT_ONCE:]
            packed = b"".join(fd.to_bytes(4, sys.byteorder) for fd in some)
            data = data[self.socket.sendmsg([data[:1]], [(SOL_SOCKET, SCM_RIGHTS, packed)]) :]
        self.socket.sendall(data)

    def receive(self) -> list[int]:
        """Read once into `buffer`. Returns the received descriptors. Raises OSError, and EOFError at the end."""
        data, ancillary, _, _ = self.socket.recvmsg(1 << 18, _ANCILLARY_SIZE, _CLOSE_ON_EXEC)
        if not data:
            raise EOFError
        self.buffer += data
        found: list[int] = []
        for level, kind, packed in ancillary:
            if level == SOL_SOCKET and kind == SCM_RIGHTS:
                found += [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed) - 3, 4)]
        if not _CLOSE_ON_EXEC:
            for fd in found:
                posix.set_inheritable(fd, False)
        return found

    def read(self) -> tuple[tuple[Any, ...], list[int]]:
        """Wait for the next message; return it and its descriptors. Raises as `receive` does."""
        descriptors: list[int] = []
        while (message := parse(self.buffer)) is None:
            descriptors += self.receive()
        return message, descriptors

    def close(self) -> None:
        self.socket.close()


def open_null() -> int:
    """Open /dev/null, or else the end of a pipe whose other end is closed, which leads nowhere either."""
    try:
        return posix.open("/dev/null", posix.O_RDWR)
    except OSError:
        reading, writing = posix.pipe()
        posix.close(writing)
        return reading
