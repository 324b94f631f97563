"""torch's timers for programs without an agent: servers that a program starts itself (contract sections 5.11, 8)."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from abc import ABC, abstractmethod
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

from rallypoint.base.clock import SYSTEM_CLOCK, Deadline
from rallypoint.base.kernel import Wakeup
from rallypoint.base.log import get_logger
from rallypoint.workers.timers import TimerClient, TimerRequest
from rallypoint.workers.watchdog import Report, Watchdog

log = get_logger(__name__)


class RequestQueue(ABC):
    """The source of a server's requests."""

    @abstractmethod
    def size(self) -> int:
        """Approximate number of queued requests."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Wait up to `timeout` seconds for up to `size` requests, and return those that have arrived."""

    def wake(self) -> None:
        """Make a waiting `get` return, if possible; otherwise `stop` waits for it."""
        return


class TimerServer(ABC):
    """A thread that reads requests and ends workers whose timers expire; a subclass has the timers.

    Args:
        request_queue: the source of requests.
        max_interval: the maximum number of seconds between two iterations.
        daemon: whether the program may end while the thread runs.
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
        """The timers that have expired by `deadline`, in epoch seconds, by worker."""

    @abstractmethod
    def _reap_worker(self, worker_id: Any) -> bool:
        """End a worker. Returns whether it has ended or will. If this raises, nothing else is tried."""

    def _due(self) -> float:
        """When to poll next, on the monotonic clock; infinity to wait for `max_interval`."""
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
                log.exception("the timer server continues after an error")
                self._ending.wait(min(1.0, self._max_interval))

    def _run_watchdog(self) -> None:
        seconds = max(0.0, min(self._max_interval, self._due() - SYSTEM_CLOCK.monotonic()))
        self.register_timers(self._request_queue.get(max(1, self._request_queue.size()), seconds))
        if self._ending.is_set():
            return
        ended = set()
        for worker, timers in self.get_expired_timers(time.time()).items():
            log.error("Reaping worker_id=[%s]. Expired timers: %s", worker, [timer.scope_id for timer in timers])
            if self._was_reaped(worker):
                ended.add(worker)
            else:
                log.error("Error reaping worker=[%s]; trying again", worker)
        self.clear_timers(ended)

    def _was_reaped(self, worker: Any) -> bool:
        try:
            return self._reap_worker(worker)
        except Exception:
            log.exception("worker %s cannot be killed, so its timers are being released", worker)
            return True


class LocalTimerClient(TimerClient):
    """Sets timers on the server that reads from `mp_queue`, which this process received at its start."""

    def __init__(self, mp_queue: Queue[Any]) -> None:
        super().__init__()
        self._queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """Requests from a `multiprocessing` queue."""

    def __init__(self, mp_queue: Queue[Any]) -> None:
        super().__init__()
        self._queue = mp_queue

    def size(self) -> int:
        return self._queue.qsize()

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        requests: list[TimerRequest] = []
        deadline = Deadline.after(timeout)
        with contextlib.suppress(Empty):
            while len(requests) < size and (request := self._queue.get(timeout=deadline.remaining())) is not None:
                requests.append(request)
        return requests

    def wake(self) -> None:
        self._queue.put(None)


class LocalTimerServer(TimerServer):
    """Sends SIGKILL to processes whose timers expire; for the arguments see `TimerServer`."""

    def __init__(self, mp_queue: Queue[Any], max_interval: float = 60, daemon: bool = True) -> None:
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)
        self._timers: dict[Any, dict[str, tuple[float, TimerRequest]]] = {}
        """By worker and name: when the timer expires, on the monotonic clock, and its request."""
        self._asked = -math.inf
        """When expired timers were last queried. Those were tried, and are tried again after the interval."""

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
            worker: sorted((timer for timer in own.values() if timer[0] <= now), key=lambda timer: timer[0])
            for worker, own in self._timers.items()
        }
        return {worker: [request for _, request in own] for worker, own in late.items() if own}

    def _due(self) -> float:
        times = (due for own in self._timers.values() for due, _ in own.values())
        return min((due for due in times if due > self._asked), default=math.inf)

    def _reap_worker(self, worker_id: Any) -> bool:
        if not isinstance(worker_id, int) or worker_id <= 1:  # to kill(2), such numbers mean groups
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker_id, signal.SIGKILL)
        return True


class FileTimerServer:
    """A `Watchdog` on its own thread, for programs without an agent (contract section 8). Unlike torch's, it does not
    end its own process after ending another.

    It enforces the timers of any process on this host that writes to its pipe. Nothing is opened before `start`.

    Args:
        file_path: the path of the pipe; an existing file with that name is removed.
        run_id: the job's id, for the log.
        max_interval: the maximum number of seconds between two steps.
        daemon: whether the program may end while the thread runs.
        log_event: called with each event, and its timer if it has one.
    """

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: Report | None = None,
    ) -> None:
        self._path = file_path
        self._run_id = run_id
        self._max_interval = max_interval
        self._daemon = daemon
        self._log_event = log_event
        self._stepped_at = time.time()
        self._running: tuple[Watchdog, threading.Thread, Wakeup] | None = None

    def start(self) -> None:
        """Create the pipe and start the thread. Idempotent.

        Raises:
            UserError: the pipe cannot be created, for the reason in the text.
        """
        if self._running is not None:
            return
        own = os.getpid()
        watchdog = Watchdog(self._path, lambda pid: pid not in (1, own), run_id=self._run_id, report=self._log_event)
        ending = Wakeup()
        thread = threading.Thread(
            target=self._run, args=(watchdog, ending), name="rallypoint-watchdog", daemon=self._daemon
        )
        self._running = watchdog, thread, ending
        thread.start()

    def stop(self) -> None:
        """End the thread and remove the pipe. Idempotent."""
        if self._running is None:
            return
        watchdog, thread, ending = self._running
        self._running = None
        ending.set()
        thread.join()
        ending.close()
        watchdog.close()

    def get_last_progress_time(self) -> int:
        """Epoch seconds of the last step; of now if no client has written yet."""
        client_seen = self._running is not None and self._running[0].client_seen
        return int(self._stepped_at if client_seen else time.time())

    def _run(self, watchdog: Watchdog, ending: Wakeup) -> None:
        while True:
            poller = select.poll()
            for fd in (ending.fileno(), *watchdog.fds()):
                poller.register(fd, select.POLLIN)
            seconds = min(self._max_interval, watchdog.wake_at() - SYSTEM_CLOCK.monotonic())
            ready = poller.poll(math.ceil(max(0.0, seconds) * 1000))
            if any(fd == ending.fileno() for fd, _ in ready):
                return
            try:
                watchdog.step()
            except Exception:
                log.exception("the watchdog continues after an error")
            self._stepped_at = time.time()
