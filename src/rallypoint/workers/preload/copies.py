"""Copies of a zygote, made before they are needed: each waits for the request that says which worker it becomes.

Laws:

1. A copy that is not used yet is spared by sweeps, and ends when its agent drops it or is gone.
2. It counts as a worker before it is sent its request, so that none can end before its end is waited for.
3. Messages in order: `received` pairs descriptors with those that bring them, also if several are read at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Sequence
from socket import socket
from typing import Any, NamedTuple

from rallypoint.base.poll import readable
from rallypoint.workers.reaper.client import ReaperClient, ReaperLost, StartedWorker
from rallypoint.workers.reaper.protocol import Connection

_DESCRIPTORS = 2
"""The descriptors that come with a copy: its pidfd, and the connection to it."""


class _Copy(NamedTuple):
    started: StartedWorker
    link: Connection


class WaitingCopies:
    """The waiting copies of one zygote.

    Args:
        reaper: the reaper that they are below.
        timeout: seconds within which a request must be sent.
    """

    def __init__(self, reaper: ReaperClient, timeout: float) -> None:
        self.expected = 0
        """The number of copies that were requested and have not arrived."""
        self._reaper = reaper
        self._timeout = timeout
        self._copies: deque[_Copy] = deque()
        self._descriptors: list[int] = []

    def __len__(self) -> int:
        return len(self._copies)

    def received(self, descriptors: Sequence[int]) -> None:
        """Take descriptors that came with a message which has been read or is about to be."""
        self._descriptors += descriptors

    def add(self, pid: int) -> None:
        """Add one that the zygote has made. Raises OSError if its descriptors did not come with it."""
        self.expected -= 1
        mine, self._descriptors = self._descriptors[:_DESCRIPTORS], self._descriptors[_DESCRIPTORS:]
        if len(mine) < _DESCRIPTORS:  # the kernel drops those for which we have no room
            for fd in mine:
                os.close(fd)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        link = socket(fileno=mine[1])
        link.settimeout(self._timeout)
        self._copies.append(_Copy(StartedWorker(pid, mine[0]), Connection(link)))
        with contextlib.suppress(ReaperLost):  # then nothing is left of what was below it
            self._reaper.adopt(pid, excluded=True)

    def use(self, message: tuple[Any, ...], descriptors: Sequence[int]) -> StartedWorker | None:
        """Turn one into the worker that this request describes; None if all waiting ones have ended.

        Raises:
            ReaperLost: the reaper has ended.
        """
        while self._copies:
            copy = self._copies.popleft()
            used = False
            try:
                used = self._adopt(copy.started) and _sent(copy.link, message, descriptors)
            finally:
                copy.link.close()
                if not used:
                    os.close(copy.started.pidfd)
            if used:
                return copy.started
        return None

    def _adopt(self, started: StartedWorker) -> bool:
        # Checked after it was adopted: by then no other process can have its pid.
        return self._reaper.adopt(started.pid) and not readable(started.pidfd)

    def close(self) -> None:
        """Drop all copies: they end. Idempotent."""
        while self._copies:
            copy = self._copies.popleft()
            copy.link.close()
            os.close(copy.started.pidfd)
        while self._descriptors:
            os.close(self._descriptors.pop())


def _sent(link: Connection, message: tuple[Any, ...], descriptors: Sequence[int]) -> bool:
    try:
        link.send(message, descriptors)
    except OSError:  # it has ended
        return False
    return True
