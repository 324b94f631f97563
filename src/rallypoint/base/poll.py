"""Sleeps until something happens: the one call in which every loop of this program waits."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

_MAX_SECONDS = 86_400.0
"""The kernel takes milliseconds in 31 bits."""


def readable(fd: int, seconds: float = 0.0, events: int = select.POLLIN) -> bool:
    """Whether a descriptor is readable, or becomes so within this time; no `events`: whether the other end is gone."""
    poller = select.poll()
    poller.register(fd, events)
    return bool(poller.poll(seconds * 1000))


def always_readable() -> int:
    """A descriptor that is always readable, like that of a process that has ended. Raises OSError."""
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def until_readable(fds: Iterable[int], seconds: float) -> None:
    """Sleep until one of the descriptors is readable, or for this many seconds, a day at most.

    Milliseconds are rounded up, so that whatever was due within that time is due when this returns.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(min(max(0.0, seconds), _MAX_SECONDS) * 1000 + 1)
