"""Timers over a queue of `multiprocessing`, for processes that have one in common (contract section 5.11)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.watchdog.client import TimerClient
from rallypoint.watchdog.queueing import RequestQueue, TimerServer
from rallypoint.watchdog.requests import TimerRequest
from rallypoint.watchdog.table import TimerTable

_LIMIT = 1 << 20


class LocalTimerClient(TimerClient):
    """Sets timers at the server that reads from the other end of a queue."""

    def __init__(self, mp_queue: Queue[Any]) -> None:
        """Args: `mp_queue`: the server's queue, handed to this process when that was started."""
        super().__init__()
        self._queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Set a timer; see `TimerClient`."""
        self._queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """Let go of a timer."""
        self._queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """Requests out of a queue of `multiprocessing`."""

    def __init__(self, mp_queue: Queue[Any]) -> None:
        super().__init__()
        self._queue = mp_queue

    def size(self) -> int:
        """About how many wait."""
        return self._queue.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests; waits for so many up to `timeout` seconds in all, and no longer once it is woken."""
        found: list[TimerRequest] = []
        deadline = Deadline.after(timeout)
        try:
            while len(found) < size:
                request = self._queue.get(timeout=max(0.0, deadline.remaining()))
                if request is None:
                    break
                found.append(request)
        except Empty:
            pass
        return found

    def wake(self) -> None:
        """Have a `get` that waits return."""
        self._queue.put(None)


class LocalTimerServer(TimerServer):
    """Ends processes with SIGKILL whose timers run out."""

    def __init__(self, mp_queue: Queue[Any], max_interval: float = 60, daemon: bool = True) -> None:
        """Nothing is done before `start`.

        Args:
            mp_queue: where requests come from.
            max_interval: seconds at most between two turns.
            daemon: whether the thread lets the program end.
        """
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._timers: TimerTable[TimerRequest] = TimerTable(_LIMIT)

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Set those timers, and let go of those with a negative expiration time."""
        now, wall = SYSTEM_CLOCK.monotonic(), time.time()
        for request in timer_requests:
            self._timers.register(request, now, wall)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Let go of all timers of some workers."""
        for worker in worker_ids:
            self._timers.drop_worker(worker)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Those that have run out at a time, in epoch seconds, by worker."""
        now = SYSTEM_CLOCK.monotonic() + (deadline - time.time())
        return {worker: [each.request for each in own] for worker, own in self._timers.expired(now).items()}

    def _due(self) -> float:
        return self._timers.due

    def _reap_worker(self, worker_id: Any) -> bool:
        if not isinstance(worker_id, int) or worker_id <= 1:  # to kill(2), such numbers are whole groups
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker_id, signal.SIGKILL)
        return True
