"""What a worker uses: timers that it sets around what must not take longer (contract sections 5.11 and 8)."""

from __future__ import annotations

import errno
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from signal import SIGKILL

from rallypoint.watchdog.requests import MAX_LINE, FileTimerRequest

_TRIES, _PAUSE = 10, 0.1
"""How often a pipe is tried that has no server or no room, and the seconds between."""


class TimerClient(ABC):
    """Where a worker's timers are set."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer.

        Args:
            scope_id: its name; one worker has one timer of a name.
            expiration_time: epoch seconds at which the worker shall be ended.
        """

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Let go of a timer. Nothing happens if there is none of that name."""


_configured: TimerClient | None = None


def configure(client: TimerClient) -> None:
    """Have `expires` use a client where it is given none."""
    global _configured
    _configured = client


def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> AbstractContextManager[None]:
    """End this worker if the block takes longer.

    Args:
        after: seconds from the beginning of the block.
        scope: the timer's name; file and line of the caller if not given.
        client: where the timer is set; what `configure` was given if not given.

    Raises:
        RuntimeError: there is no client.
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
    """Sets timers at the agent, through the pipe that `TORCHELASTIC_TIMER_FILE` names."""

    def __init__(self, file_path: str, signal: int = SIGKILL) -> None:
        """Nothing is opened yet.

        Args:
            file_path: of the pipe.
            signal: what this process is sent when a timer runs out; 0 for nothing but a line in the agent's log.
        """
        self._path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer; see `TimerClient`.

        Raises:
            BrokenPipeError: there is no server.
            RuntimeError: the name is too long.
        """
        self._send(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        """Let go of a timer; see `acquire` for what is raised."""
        self._send(FileTimerRequest(os.getpid(), scope_id, -1))

    def _send(self, request: FileTimerRequest) -> None:
        line = request.to_json().encode() + b"\n"
        if len(line) > MAX_LINE:
            raise RuntimeError(f"a timer request has {MAX_LINE} bytes at most; {line[:200]!r}... has {len(line)}")
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
        raise BrokenPipeError(f"no watchdog reads from {self._path!r}; is TORCHELASTIC_ENABLE_FILE_TIMER=1 set?")

    def _write(self, line: bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
