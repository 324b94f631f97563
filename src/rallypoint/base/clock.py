"""The one door through which time comes in.

Everything that decides takes `now` as a number; only shells hold a `Clock`. A clock of ours counts seconds on the
monotonic clock of this host and means nothing to another host.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol


class Clock(Protocol):
    """Where a shell reads the time."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this host; never goes back."""
        ...


class SystemClock:
    """The host's own monotonic clock."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this host; never goes back."""
        return time.monotonic()


SYSTEM_CLOCK = SystemClock()


class Deadline(NamedTuple):
    """A moment on one clock by which something must have happened.

    `at` is in seconds on `clock`; infinity means that there is no limit.
    """

    at: float
    clock: Clock

    @classmethod
    def after(cls, seconds: float, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        """The deadline `seconds` from now."""
        return cls(clock.monotonic() + seconds, clock)

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - self.clock.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the moment has come."""
        return self.clock.monotonic() >= self.at
