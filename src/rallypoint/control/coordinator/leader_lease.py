"""How long an elected coordinator is certainly the only one."""

from __future__ import annotations

import math

from rallypoint.base.clock import BOOT_CLOCK, Clock


class LeaderLease:
    """Until when this process is certainly the only elected coordinator.

    etcd ends the lease of a leader that it has not heard from for the time to live, counted from when the last
    keep-alive arrived; counted from when that was sent, it ends no later. Suspended time counts. It is extended on the
    election's thread, and read on the loop's.
    """

    def __init__(self, clock: Clock = BOOT_CLOCK) -> None:
        self._clock = clock
        self._until = -math.inf

    def now(self) -> float:
        """The time at which a keep-alive is about to be sent."""
        return self._clock.monotonic()

    def extend(self, sent_at: float, seconds: float) -> None:
        """A keep-alive of that time was granted for so many seconds."""
        self._until = max(self._until, sent_at + seconds)

    def end(self) -> None:
        """The lease was lost or given up."""
        self._until = -math.inf

    def remaining(self) -> float:
        """Seconds that are left; negative if it has ended."""
        return self._until - self._clock.monotonic()
