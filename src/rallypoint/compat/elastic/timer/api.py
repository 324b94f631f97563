"""In the place of `torch.distributed.elastic.timer.api`."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.log import get_logger
from rallypoint.watchdog.client import TimerClient, configure, expires
from rallypoint.watchdog.requests import TimerRequest

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]

log = get_logger(__name__)


class RequestQueue(ABC):
    """The source of a server's requests."""

    @abstractmethod
    def size(self) -> int:
        """About how many wait."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Up to `size` requests; waits for them up to `timeout` seconds, and returns those that have come."""

    def wake(self) -> None:
        """Make a waiting `get` return, where that is possible; otherwise `stop` waits for it."""
        return


class TimerServer(ABC):
    """A thread that reads requests and ends workers whose timers expire; a subclass has the timers.

    Args:
        request_queue: the source of requests.
        max_interval: seconds at most between two iterations.
        daemon: whether the thread lets the program end.
    """

    def __init__(self, request_queue: RequestQueue, max_interval: float, daemon: bool = True) -> None:
        super().__init__()
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    @abstractmethod
    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        """Set timers, and release those with a negative expiration time."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Release all timers of some workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        """Those that have expired at a time, in epoch seconds, by worker."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker. Returns whether it has ended, or will; if it raises, nothing more is tried."""

    def _due(self) -> float:
        """When to poll next, on the monotonic clock; infinite for after `max_interval`."""
        return math.inf

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._ending.clear()
            self._thread = threading.Thread(target=self._watchdog_loop, name="rallypoint-timers", daemon=self._daemon)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending.set()
            self._request_queue.wake()
            thread.join()

    def _watchdog_loop(self) -> None:
        while not self._ending.is_set():
            try:
                self._run_watchdog()
            except Exception:
                log.exception("the timer server goes on after an error")
                self._ending.wait(min(1.0, self._max_interval))

    def _run_watchdog(self) -> None:
        seconds = max(0.0, min(self._max_interval, self._due() - SYSTEM_CLOCK.monotonic()))
        self.register_timers(self._request_queue.get(max(1, self._request_queue.size()), seconds))
        if self._ending.is_set():
            return
        ended = set()
        for worker, timers in self.get_expired_timers(time.time()).items():
            log.error("Reaping worker_id=[%s]. Expired timers: %s", worker, [each.scope_id for each in timers])
            if self._was_reaped(worker):
                ended.add(worker)
            else:
                log.error("Error reaping worker=[%s]; it is tried again", worker)
        self.clear_timers(ended)

    def _was_reaped(self, worker: Any) -> bool:
        try:
            return self._reap_worker(worker)
        except Exception:
            log.exception("worker %s cannot be ended; its timers are released", worker)
            return True
