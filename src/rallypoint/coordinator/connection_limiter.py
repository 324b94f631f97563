"""What a control server grants to connections that are no sessions yet: a number, a time, and some log lines."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.descriptors import limits
from rallypoint.base.log import RateLimitedLog, get_logger

log = get_logger(__name__)

_MAX_CONNECTIONS = 16384
"""Connections that are no sessions yet, and of which none has to make room."""
_MIN_AGE = 1.0
"""Seconds that each of them has in any case: many nodes may come at once."""


class ConnectionLimiter:
    """All connections of a server that are no sessions yet, and what is said of those that never will be.

    On the loop's thread.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        files = limits()[0]
        self._limit = _MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, max(8, files // 4))
        self._clock = clock
        self._waiting: dict[object, tuple[float, Callable[[], None]]] = {}
        """When each came, the oldest first, and what ends it."""
        self._clearing: asyncio.TimerHandle | None = None
        self._lines = RateLimitedLog(log, "control connections refused", clock)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: object, evict: Callable[[], None]) -> None:
        """One more has come, which `evict` ends. The oldest are ended if there are too many: a node's becomes a session
        soon."""
        self._waiting[connection] = self._clock.monotonic(), evict
        if len(self._waiting) > self._limit and self._clearing is None:
            self._evict_oldest()

    def remove(self, connection: object) -> None:
        """It has become a session, or is gone. Idempotent."""
        self._waiting.pop(connection, None)

    def log_refusal(self, line: str, *args: object) -> None:
        """A log line about a connection that is of no use, if there were not too many just now."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RateLimitedLog.WINDOW, self._sum_up)
        self._lines.warning(line, *args)

    def close(self) -> None:
        """Say what is left to say."""
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
