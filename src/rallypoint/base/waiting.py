"""Sleeping until something happens: the one call in which every loop of this launcher waits."""

from __future__ import annotations

import math
import select
from collections.abc import Iterable


def until_readable(fds: Iterable[int], seconds: float) -> None:
    """Sleep until one of the descriptors is readable, or so many seconds are over; infinite for no limit.

    What was due at a moment is due when this returns: a part of a millisecond is slept as a whole one.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(None if math.isinf(seconds) else max(0.0, seconds) * 1000 + 1)
