"""In the place of `torch.distributed.elastic.timer.local_timer`: timers over a queue (contract section 5.11)."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.compat.elastic.timer.api import RequestQueue, TimerClient, TimerRequest, TimerServer
from rallypoint.compat.reexports import reexports_of

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

__getattr__ = reexports_of(__name__)


class LocalTimerClient(TimerClient):
    """Sets timers at the server that reads from `mp_queue`, which this process was given when it was started."""

    def __init__(self, mp_queue: Queue[Any]) -> None:
        super().__init__()
        self._queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """Requests out of a queue of `multiprocessing`."""

    def __init__(self, mp_queue: Queue[Any]) -> None:
        super().__init__()
        self._queue = mp_queue

    def size(self) -> int:
        return self._queue.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        found: list[TimerRequest] = []
        deadline = Deadline.after(timeout)
        with contextlib.suppress(Empty):
            while len(found) < size and (request := self._queue.get(timeout=deadline.remaining())) is not None:
                found.append(request)
        return found

    def wake(self) -> None:
        self._queue.put(None)


class LocalTimerServer(TimerServer):
    """Ends processes whose timers expire with SIGKILL; for the arguments see `TimerServer`."""

    def __init__(self, mp_queue: Queue[Any], max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._timers: dict[Any, dict[str, tuple[float, TimerRequest]]] = {}
        """By worker and name: when it expires, on the monotonic clock, and its request."""
        self._asked = -math.inf
        """The time for which expired timers were asked for last; those were tried, and are again after the interval."""

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        ahead = SYSTEM_CLOCK.monotonic() - time.time()
        for request in timer_requests:
            own = self._timers.setdefault(request.worker_id, {})
            own.pop(request.scope_id, None)
            if request.expiration_time >= 0:
                own[request.scope_id] = request.expiration_time + ahead, request

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for worker in worker_ids:
            self._timers.pop(worker, None)

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        self._asked = now = SYSTEM_CLOCK.monotonic() + (deadline - time.time())
        late = {
            worker: sorted((each for each in own.values() if each[0] <= now), key=lambda each: each[0])
            for worker, own in self._timers.items()
        }
        return {worker: [request for _, request in own] for worker, own in late.items() if own}

    def _due(self) -> float:
        times = (due for own in self._timers.values() for due, _ in own.values())
        return min((due for due in times if due > self._asked), default=math.inf)

    def _reap_worker(self, worker_id: Any) -> bool:
        if not isinstance(worker_id, int) or worker_id <= 1:  # to kill(2), such numbers are whole groups
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker_id, signal.SIGKILL)
        return True
