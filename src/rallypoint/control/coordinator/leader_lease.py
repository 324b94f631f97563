"""Tracks how long an elected coordinator is certainly the only one."""

from __future__ import annotations

import math

from rallypoint.base.clock import BOOT_CLOCK, Clock


class LeaderLease:
    """The time until which this process is certainly the only elected coordinator.

    etcd ends a leader's lease when its time to live has passed since the last keep-alive arrived. We count from when
    the keep-alive was sent, which is earlier. Suspended time counts. The election's thread extends the lease, and the
    loop's thread reads it.
    """

    def __init__(self, clock: Clock = BOOT_CLOCK) -> None:
        self._clock = clock
        self._until = -math.inf

    def now(self) -> float:
        """The time on the lease's clock; read it before sending a keep-alive."""
        return self._clock.monotonic()

    def extend(self, sent_at: float, seconds: float) -> None:
        """Extend the lease: etcd granted the keep-alive sent at `sent_at` for `seconds`."""
        self._until = max(self._until, sent_at + seconds)

    def end(self) -> None:
        """End the lease, which was lost or given up."""
        self._until = -math.inf

    def remaining(self) -> float:
        """The seconds left; negative if the lease has ended."""
        return self._until - self._clock.monotonic()
