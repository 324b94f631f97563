"""Limits of connections to a control server that are not sessions yet: their number, time, and log lines."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.descriptors import limits
from rallypoint.base.log import RateLimitedLog, get_logger

log = get_logger(__name__)

_MAX_CONNECTIONS = 16384
"""Connections that are not sessions yet, up to which none has to make room."""
_MIN_AGE = 1.0
"""Seconds that each of them has in any case: many nodes may connect at once."""


class ConnectionLimiter:
    """All connections of a server that are not sessions yet, and the log lines about those that never will be.

    On the loop's thread.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        files = limits()[0]
        self._limit = _MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, max(8, files // 4))
        self._clock = clock
        self._waiting: dict[object, tuple[float, Callable[[], None]]] = {}
        """When each was added, the oldest first, and the function that ends it."""
        self._clearing: asyncio.TimerHandle | None = None
        self._lines = RateLimitedLog(log, "control connections refused", clock)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: object, evict: Callable[[], None]) -> None:
        """Add one, which `evict` ends. The oldest are ended if there are too many: that of a node becomes a session
        soon.
        """
        self._waiting[connection] = self._clock.monotonic(), evict
        if len(self._waiting) > self._limit and self._clearing is None:
            self._evict_oldest()

    def remove(self, connection: object) -> None:
        """It has become a session, or is gone. Idempotent."""
        self._waiting.pop(connection, None)

    def make_room(self) -> bool:
        """End the oldest one now; returns whether there was one."""
        oldest = next(iter(self._waiting), None)
        if oldest is None:
            return False
        self._waiting.pop(oldest)[1]()
        return True

    def log_refusal(self, line: str, *args: object) -> None:
        """Log a refused connection, unless there were too many such lines just now."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RateLimitedLog.WINDOW, self._sum_up)
        self._lines.warning(line, *args)

    def close(self) -> None:
        """Log what has not been logged yet."""
        for timer in (self._timer, self._clearing):
            if timer is not None:
                timer.cancel()
        self._sum_up()

    def _evict_oldest(self) -> None:
        self._clearing = None
        while len(self._waiting) > self._limit:
            oldest, (since, evict) = next(iter(self._waiting.items()))
            left = since + _MIN_AGE - self._clock.monotonic()
            if left > 0:
                self._clearing = asyncio.get_running_loop().call_later(left, self._evict_oldest)
                return
            del self._waiting[oldest]
            evict()

    def _sum_up(self) -> None:
        self._timer = None
        self._lines.summarize()
