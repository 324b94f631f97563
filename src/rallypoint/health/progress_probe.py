"""Whether an agent gets on, told by the agent's own loop in two words: it goes to sleep, it wakes.

A loop that waits for events may sleep for hours and be well, so the time of its last event says nothing. Laws:

- asleep until a moment that has not come, it gets on; past that moment it has stood still since then;
- awake, it has stood still since it woke: it is at something that should have taken moments;
- the loop only replaces one reference, so that nobody who looks can hold it up, and whoever looks sees one moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock


class _Snapshot(NamedTuple):
    stands_from: float
    """From this moment of the clock on nothing has moved; in the future while the loop sleeps."""
    status: Mapping[str, object]


class ProgressProbe:
    """Written by one thread, read by any.

    Args:
        clock: on which `wake_at` is.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._snapshot = _Snapshot(clock.monotonic(), {})

    def going_to_sleep(self, wake_at: float, status: Mapping[str, object]) -> None:
        """The loop is about to wait for events.

        Args:
            wake_at: the moment of the clock at which it wakes at the latest; infinity for never by itself.
            status: what is to be shown of the agent, plain data that nobody changes any more.
        """
        self._snapshot = _Snapshot(wake_at, status)

    def woken(self) -> None:
        """The loop has something to do."""
        self._snapshot = _Snapshot(self._clock.monotonic(), self._snapshot.status)

    def age(self) -> float:
        """Seconds for which nothing has moved; 0 if all is well."""
        stands_from = self._snapshot.stands_from
        return 0.0 if math.isinf(stands_from) else max(0.0, self._clock.monotonic() - stands_from)

    def last_progress(self) -> float:
        """The same as a moment, in epoch seconds: what an `alive_callback` returns."""
        return time.time() - self.age()

    def status(self) -> Mapping[str, object]:
        """What the agent left to be shown when it last went to sleep."""
        return self._snapshot.status
