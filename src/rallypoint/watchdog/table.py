"""All timers that are set, and which of them have expired. Pure.

Laws:

1. A request's wall-clock time is turned into a time of the monotonic clock once, when the request arrives. What the
   wall clock does later moves no timer.
2. One worker has one timer of a name: a later request replaces the earlier one.
3. `due` is never later than the first timer that `expired` has not returned. It may be earlier, by a timer that was
   released since the last call of `expired`.
4. There are never more than `limit` timers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from rallypoint.watchdog.requests import TimerRequest

LIMIT = 4096
"""Timers of one node: a job has a few for each worker."""

R = TypeVar("R", bound=TimerRequest)


class Timer(NamedTuple, Generic[R]):
    """A timer: `due` is in seconds on the monotonic clock; `seconds` is what it had to run when its request arrived."""

    request: R
    due: float
    seconds: float


class TimerTable(Generic[R]):
    """The one owner of the timers of one node."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._timers: dict[Any, dict[str, Timer[R]]] = {}
        self._number = 0
        self.due = math.inf
        """When to call `expired` next, on the monotonic clock; infinite for never."""

    def __len__(self) -> int:
        return self._number

    def has_timer(self, worker: Any) -> bool:
        """Whether a worker has any timer."""
        return worker in self._timers

    def register(self, request: R, now: float, wall: float) -> bool:
        """Set a timer, or release it if its expiration time is negative; returns whether it fits into the table.

        Args:
            request: what has arrived.
            now: seconds on the monotonic clock.
            wall: epoch seconds at the same moment.
        """
        if request.expiration_time < 0:
            self._remove(request.worker_id, request.scope_id)
            return True
        own = self._timers.get(request.worker_id, {})
        if request.scope_id not in own:
            if self._number >= self._limit:
                return False
            self._number += 1
        seconds = request.expiration_time - wall
        self._timers.setdefault(request.worker_id, own)[request.scope_id] = Timer(request, now + seconds, seconds)
        self.due = min(self.due, now + seconds)
        return True

    def expired(self, now: float) -> dict[Any, list[Timer[R]]]:
        """Those that have expired, by worker, the earliest first. They stay until they are dropped."""
        self.due = math.inf
        found: dict[Any, list[Timer[R]]] = {}
        for worker, own in self._timers.items():
            late = sorted((each for each in own.values() if each.due <= now), key=lambda each: each.due)
            if late:
                found[worker] = late
            if len(late) < len(own):
                self.due = min(self.due, *(each.due for each in own.values() if each.due > now))
        return found

    def drop(self, timers: Iterable[Timer[R]]) -> None:
        """Release some timers."""
        for each in timers:
            self._remove(each.request.worker_id, each.request.scope_id)

    def drop_worker(self, worker: Any) -> None:
        """Release all timers of a worker."""
        self._subtract(len(self._timers.pop(worker, {})))

    def _remove(self, worker: Any, scope: str) -> None:
        own = self._timers.get(worker, {})
        if own.pop(scope, None) is not None:
            self._subtract(1)
            if not own:
                del self._timers[worker]

    def _subtract(self, number: int) -> None:
        self._number -= number
        if not self._number:
            self.due = math.inf
