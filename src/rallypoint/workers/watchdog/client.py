"""What a worker uses: timers around blocks that must not take longer (contract sections 5.11 and 8)."""

from __future__ import annotations

import errno
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from signal import SIGKILL

from rallypoint.workers.watchdog.requests import MAX_LINE, FileTimerRequest

_TRIES, _PAUSE = 10, 0.1
"""Attempts to write to a pipe that has no server or is full, and the seconds between them."""


class TimerClient(ABC):
    """Where a worker's timers are set."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set this worker's timer of that name; at `expiration_time`, in epoch seconds, the worker is ended."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Release a timer. Nothing happens if there is none of that name."""


_configured: TimerClient | None = None


def configure(timer_client: TimerClient) -> None:
    """Set the client of `expires` calls that give none."""
    global _configured
    _configured = timer_client


def expires(after: float, scope: str | None = None, client: TimerClient | None = None) -> AbstractContextManager[None]:
    """End this worker if the block takes longer than `after` seconds.

    Args:
        after: seconds from the beginning of the block.
        scope: the timer's name; by default file and line of the caller.
        client: where the timer is set; by default the one given to `configure`.

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
    """Sets timers at the agent, through the pipe that `TORCHELASTIC_TIMER_FILE` names, which is opened when one is set.

    Args:
        file_path: of the pipe.
        signal: sent to this process when a timer expires; 0 only writes a line to the agent's log.
    """

    def __init__(self, file_path: str, signal: int = SIGKILL) -> None:
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
        """Release a timer; for what is raised see `acquire`."""
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
