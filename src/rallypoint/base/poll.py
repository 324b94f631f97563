"""Sleeping until something happens: the one call in which every loop of this program waits."""

from __future__ import annotations

import select
from collections.abc import Iterable

_MAX_SECONDS = 86_400.0
"""The kernel takes milliseconds in 31 bits."""


def until_readable(fds: Iterable[int], seconds: float) -> None:
    """Sleep until one of the descriptors is readable, or for so many seconds, a day at most.

    Milliseconds are rounded up, so that what was due within a day is due when this returns.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(min(max(0.0, seconds), _MAX_SECONDS) * 1000 + 1)
