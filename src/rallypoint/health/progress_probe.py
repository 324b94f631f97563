"""Whether an agent makes progress, from two calls of its loop: it goes to sleep, it wakes.

A loop that waits for events may sleep for hours and be healthy, so the time of its last event says nothing. Laws:

- a sleeping loop makes progress until the time at which it wakes by itself; after that it has stood still since then;
- a loop that is awake has stood still since it woke: each of its steps should take moments;
- the loop only replaces one reference, so that no reader can block it, and each reader sees one moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock


class _Snapshot(NamedTuple):
    stands_from: float  # no progress from this time of the clock on; in the future while the loop sleeps
    status: Mapping[str, object]


class ProgressProbe:
    """Written by one thread, read by any; `clock` is the one of `wake_at`."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._snapshot = _Snapshot(clock.monotonic(), {})

    def going_to_sleep(self, wake_at: float, status: Mapping[str, object]) -> None:
        """The loop is about to wait for events, until `wake_at` of the clock (maybe infinity) at the latest.

        `status` is shown to who asks: plain data that is not changed any more.
        """
        self._snapshot = _Snapshot(wake_at, status)

    def woken(self) -> None:
        """The loop has something to do."""
        self._snapshot = _Snapshot(self._clock.monotonic(), self._snapshot.status)

    def age(self) -> float:
        """Seconds without progress; 0 while the loop is healthy."""
        stands_from = self._snapshot.stands_from
        return 0.0 if math.isinf(stands_from) else max(0.0, self._clock.monotonic() - stands_from)

    def last_progress(self) -> float:
        """The same as a time in epoch seconds, for an `alive_callback`."""
        return time.time() - self.age()

    def status(self) -> Mapping[str, object]:
        """The status when the loop last went to sleep."""
        return self._snapshot.status
