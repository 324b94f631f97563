"""The file timer's protocol: one request is one line of JSON (contract section 5.11). Pure.

Laws:

1. Any bytes are accepted; what is not a request of this protocol gives a complaint, never an exception.
2. A whole request counts even behind another writer's half line: the kernel never splits a write of up to `MAX_LINE`
   bytes, so what follows the rest of a dead writer's is complete.
3. At most `MAX_LINE` bytes are kept of a line that has not ended.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, TypeGuard

VERSION = 1
MAX_LINE = 4096
"""Bytes of one request with its newline: what Linux writes to a pipe in one piece (PIPE_BUF)."""
_HIGHEST_SIGNAL = 64
_START = b'{"version"'
"""How the requests of our clients and of torch's begin."""
_MAX_SHOWN = 80
"""Bytes of a damaged line that a complaint shows."""


@dataclass
class TimerRequest:
    """A worker's request to set a timer or, with a negative expiration time, to release it.

    `worker_id` is who asks, `scope_id` the timer's name (one worker has one timer of a name), and `expiration_time` is
    in epoch seconds.
    """

    worker_id: Any
    scope_id: str
    expiration_time: float


@dataclass(init=False)
class FileTimerRequest(TimerRequest):
    """A request of the file timer; `signal` is sent to the process at expiry, and with 0 that is only reported."""

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
        """The request as it is written, without the newline."""
        values = {
            "version": self.version,
            "pid": self.worker_pid,
            "scope_id": self.scope_id,
            "expiration_time": self.expiration_time,
            "signal": int(self.signal),
        }
        return json.dumps(values)


class RequestReader:
    """Parses requests from the bytes that come out of the pipe."""

    def __init__(self) -> None:
        self._partial_line = b""

    def feed(self, data: bytes) -> tuple[list[FileTimerRequest], list[str]]:
        """Take bytes as they come; returns the requests that are complete now, in order, and complaints."""
        *lines, rest = (self._partial_line + data).split(b"\n")
        self._partial_line = rest[-MAX_LINE:]
        requests, complaints = [], []
        for line in lines:
            request = _request_at_end(line)
            if request is not None:
                requests.append(request)
            elif line.strip():
                complaints.append(f"no timer request: {line[:_MAX_SHOWN]!r}")
        return requests, complaints


def parse(line: bytes) -> FileTimerRequest | None:
    """The request of a whole line; None if it is not one."""
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


def _request_at_end(line: bytes) -> FileTimerRequest | None:
    """The request in a line, which may have something else before it."""
    line = line[-MAX_LINE:]
    return parse(line) or parse(line[max(0, line.rfind(_START)) :])


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
