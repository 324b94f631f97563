"""The one source of time.

Code that decides takes `now` as a number; only shells have a `Clock`. A clock counts seconds on this host's monotonic
clock; other hosts cannot compare them with theirs.
"""

from __future__ import annotations

import time

from rallypoint.base.light_typing import NamedTuple, Protocol


class Clock(Protocol):
    """The source of time for a shell, such as the module `time`."""

    def monotonic(self) -> float:
        """Seconds since a fixed moment on this host; never goes back."""


SYSTEM_CLOCK: Clock = time


_BOOT_TIME: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class _BootClock:
    def monotonic(self) -> float:
        return time.clock_gettime(_BOOT_TIME)


BOOT_CLOCK: Clock = _BootClock()
"""Like `SYSTEM_CLOCK`, but on Linux also counts time while the machine is suspended."""


class Deadline(NamedTuple):
    """A time `at`, in seconds on `clock`, by which something must happen; infinity for no limit."""

    at: float
    clock: Clock

    @classmethod
    def after(cls, seconds: float, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        return cls(clock.monotonic() + seconds, clock)

    def remaining(self) -> float:
        return max(0.0, self.at - self.clock.monotonic())

    @property
    def expired(self) -> bool:
        return self.clock.monotonic() >= self.at
