"""A thread that does work for threads that must never wait: in order, one task at a time.

Laws:

1. `post` never blocks and never raises, whatever the work does or the machine lacks.
2. The queue is bounded. Work that does not fit is dropped and counted, and `post` returns False.
3. Work that raises is reported; the next task follows.
4. The thread starts with the first task. If it cannot start (an exhausted pids cgroup), the work stays queued, and each
   later `post` tries again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from rallypoint.base.light_typing import NamedTuple


class Work(NamedTuple):
    """A task; `what` names it in messages."""

    what: str
    run: Callable[[], object]


class SideThread:
    """One worker thread and its queue. Any thread or signal handler may call its methods.

    Args:
        name: the name of the thread.
        failed: called on the thread with the name of a task that raised, while its exception is being handled.
        limit: the maximum number of queued tasks.
    """

    def __init__(self, name: str, failed: Callable[[str], None], limit: int = 1000) -> None:
        self._name = name
        self._failed = failed
        self._limit = limit
        self._queue: deque[Work] = deque()
        # Reentrant, since a signal handler may post while its thread is posting.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._busy_since: float | None = None
        self.dropped = 0
        """Number of tasks that did not fit."""

    def start(self) -> None:
        """Start the thread before there is work, while the machine still allows another thread."""
        with self._changed:
            if self._thread is None:
                self._start()

    def post(self, what: str, run: Callable[[], object]) -> bool:
        """Queue a task. Returns False if the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._queue) >= self._limit:
                self.dropped += 1
                return False
            self._queue.append(Work(what, run))
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        return True

    def busy_for(self) -> float:
        """How many seconds the current task has been running; 0.0 if idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def is_idle(self) -> bool:
        """Whether all posted work is done."""
        return not self._queue and self._busy_since is None

    def runs_this(self) -> bool:
        """Whether this thread is the caller."""
        return threading.current_thread() is self._thread

    def wait_idle(self, seconds: float) -> bool:
        """Wait at most `seconds` until all posted work is done. Returns whether it is."""
        with self._changed:
            if self._thread is None and self._queue:
                self._start()
            return self._changed.wait_for(lambda: self.is_idle, seconds)

    def close(self, seconds: float) -> list[Work]:
        """Accept no more work, and wait at most `seconds` for posted work. Idempotent.

        Returns:
            The dropped work, which did not start in time.
        """
        self.wait_idle(seconds)
        with self._changed:
            self._closed = True
            left = [*self._queue]
            self._queue.clear()
            self._changed.notify_all()
        return left

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread = thread  # set it before the start: a signal handler may post meanwhile
        try:
            thread.start()
        except RuntimeError:  # no thread can start now; see law 4
            self._thread = None

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            try:
                work.run()
            except Exception:
                self._failed(work.what)
            del work  # otherwise its references would live until the next task

    def _next_work(self) -> Work | None:
        with self._changed:
            self._busy_since = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            self._busy_since = time.monotonic()
            return self._queue.popleft()


def start_thread(run: Callable[[], object], name: str) -> threading.Thread | None:
    """Start a daemon thread; None if the machine allows no more (an exhausted pids cgroup or user limit)."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
