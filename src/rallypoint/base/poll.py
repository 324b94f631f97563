"""Sleeping until something happens: the one call in which every loop of this launcher waits."""

from __future__ import annotations

import select
from collections.abc import Iterable

_MAX_SECONDS = 86_400.0
"""Seconds; the kernel is told milliseconds in 31 bits."""


def until_readable(fds: Iterable[int], seconds: float) -> None:
    """Sleep until one of the descriptors is readable, or so many seconds are over, of which a day may count as all.

    What was due at a moment within a day is due when this returns: a part of a millisecond is slept as a whole one.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(min(max(0.0, seconds), _MAX_SECONDS) * 1000 + 1)
