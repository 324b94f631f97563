"""A clock for tests of code that waits."""

from __future__ import annotations

from rallypoint.base.clock import SYSTEM_CLOCK


class HandClock:
    """Stands still until a test moves it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


class ShiftedClock:
    """The host's monotonic clock, and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic() + self.ahead
