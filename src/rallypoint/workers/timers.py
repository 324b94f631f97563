"""Timers that workers set around blocks that must not take longer (contract sections 5.11 and 8), and their protocol.

A request is one line of JSON in a named pipe. The agent enforces timers: `watchdog`.

Laws:

1. Any bytes are accepted. Bytes that are no request of this protocol cause a complaint, never an exception.
2. A whole request counts even after another writer's half line: the kernel never splits a write of up to `MAX_LINE`
   bytes, so a request after the rest of a dead writer's line is complete.
3. At most `MAX_LINE` bytes of an unfinished line are stored.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from signal import SIGKILL
from typing import Any, TypeGuard

_TRIES, _PAUSE = 10, 0.1
"""Attempts to write to a pipe that has no server or is full, and the seconds between them."""
VERSION = 1
MAX_LINE = 4096
"""Maximum bytes of a request with its newline: Linux writes this many to a pipe in one piece (PIPE_BUF)."""
_HIGHEST_SIGNAL = 64
_START = b'{"version"'
"""The start of requests from our clients and torch's."""
_MAX_SHOWN = 80
"""Maximum bytes of a damaged line to show in a complaint."""


# For workers


class TimerClient(ABC):
    """Sets a worker's timers."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set this worker's timer with this name. The worker is ended at `expiration_time`, in epoch seconds."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Release a timer. Does nothing if no timer has this name."""


_configured: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Set the client for `expires` calls without one."""
    global _configured
    _configured = timer_client


def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> AbstractContextManager[None]:
    """End this worker if the block takes longer than `after` seconds.

    Args:
        after: seconds from the start of the block.
        scope: the timer's name; by default the caller's file and line.
        client: sets the timer; by default the client set with `configure`.

    Raises:
        RuntimeError: no client is set.
    """
    client = client or _configured
    if client is None:
        raise RuntimeError("no timer client is configured; call configure(FileTimerClient(path)) first")
    if scope is None:
        caller = sys._getframe(1)
        scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
    return _timer_held(client, scope, after)


@contextmanager
def _timer_held(client: TimerClient, scope: str, after: float) -> Iterator[None]:
    client.acquire(scope, time.time() + after)
    try:
        yield
    finally:
        client.release(scope)


class FileTimerClient(TimerClient):
    """Sets timers in the agent, through the pipe in `TORCHELASTIC_TIMER_FILE`. Opens the pipe for each request.

    Args:
        file_path: the path of the pipe.
        signal: the signal to this process when a timer expires; 0 only logs a line in the agent.
    """

    def __init__(self, file_path: str, signal: int = SIGKILL) -> None:
        self._path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer; see `TimerClient`.

        Raises:
            BrokenPipeError: no server is running.
            RuntimeError: the name is too long.
        """
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        """Release a timer; raises the errors of `acquire`."""
        self._send(FileTimerRequest(os.getpid(), scope_id, -1))

    def _send(self, request: FileTimerRequest) -> None:
        line = request.to_json().encode() + b"\n"
        if len(line) > MAX_LINE:
            raise RuntimeError(f"a timer request can have at most {MAX_LINE} bytes; {line[:200]!r}... has {len(line)}")
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE)
            try:
                self._write(line)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENXIO, errno.EAGAIN, errno.EPIPE):
                    raise
            else:
                return
        raise BrokenPipeError(
            f"no watchdog reads from {self._path!r}; check that TORCHELASTIC_ENABLE_FILE_TIMER=1 is set"
        )

    def _write(self, line: bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


# The protocol


@dataclass
class TimerRequest:
    """A worker's request to set a timer or, with a negative expiration time, to release it.

    `worker_id` is the worker, `scope_id` the timer's name (unique per worker), and `expiration_time` is in epoch
    seconds.
    """

    worker_id: Any
    scope_id: str
    expiration_time: float


@dataclass(init=False)
class FileTimerRequest(TimerRequest):
    """A request to the file timer. At expiry, the process receives `signal`; 0 only reports the expiry."""

    signal: int
    version: int

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_pid, scope_id, expiration_time)
        self.signal = signal
        self.version = VERSION

    @property
    def worker_pid(self) -> int:
        pid: int = self.worker_id
        return pid

    def to_json(self) -> str:
        """The request's line, without the newline."""
        values = {
            "version": self.version,
            "pid": self.worker_pid,
            "scope_id": self.scope_id,
            "expiration_time": self.expiration_time,
            "signal": int(self.signal),
        }
        return json.dumps(values)


class RequestReader:
    """Parses requests from the bytes in the pipe."""

    def __init__(self) -> None:
        self._partial_line = b""

    def feed(self, data: bytes) -> tuple[list[FileTimerRequest], list[str]]:
        """Add bytes. Returns the requests that are now complete, in order, and complaints."""
        *lines, rest = (self._partial_line + data).split(b"\n")
        self._partial_line = rest[-MAX_LINE:]
        requests, complaints = [], []
        for line in lines:
            # Other bytes might precede it.
            end = line[-MAX_LINE:]
            request = parse(end) or parse(end[max(0, end.rfind(_START)) :])
            if request is not None:
                requests.append(request)
            elif line.strip():
                complaints.append(f"not a timer request: {line[:_MAX_SHOWN]!r}")
        return requests, complaints


def parse(line: bytes) -> FileTimerRequest | None:
    """Parse a whole line; None if it is not a request."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.get("version") != VERSION:
        return None
    pid, scope, signal = values.get("pid"), values.get("scope_id"), values.get("signal")
    expiration = _finite(values.get("expiration_time"))
    if not _is_whole(pid) or not _is_whole(signal) or not isinstance(scope, str) or expiration is None:
        return None
    if not 0 < pid < 1 << 31 or signal > _HIGHEST_SIGNAL:
        return None
    return FileTimerRequest(pid, scope, expiration, max(0, signal))


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
