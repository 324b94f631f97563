"""A queue for events from any thread, signal handler or callback. Its one reader can poll it.

Its descriptor is readable while events are queued, so the reader waits for exits, sockets and events in one call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from rallypoint.base.kernel import Wakeup
from rallypoint.base.light_typing import Generic, TypeVar
from rallypoint.base.side_thread import start_thread

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Many writers, one reader. Posting never blocks and is safe inside a signal handler."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wakeup = Wakeup()
        self._closed = False
        self._lock = threading.RLock()  # reentrant: a signal handler may post while its thread is posting

    def fileno(self) -> int:
        """The descriptor, readable while events are queued."""
        return self._wakeup.fileno()

    def post(self, event: T) -> None:
        """Add an event; after `close`, drop it."""
        with self._lock:
            if not self._closed:
                self._items.append(event)
                self._wakeup.set()

    def drain(self) -> Iterator[T]:
        self._wakeup.clear()
        while self._items:
            yield self._items.popleft()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._wakeup.close()


class Background(Generic[T]):
    """Runs one task at a time in the background; only the latest result counts. Call on the loop's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._mailbox: Mailbox[tuple[Callable[[], T], T]] = Mailbox()
        self._work: Callable[[], T] | None = None

    @property
    def busy(self) -> bool:
        return self._work is not None

    def start(self, work: Callable[[], T]) -> bool:
        """Start a task, which must not raise. The result of the previous one is dropped.

        Returns:
            Whether it started; False if this machine does not allow another thread.
        """
        is_started = start_thread(lambda: self._mailbox.post((work, work())), self._name) is not None
        self._work = work if is_started else None
        return is_started

    def fds(self) -> list[int]:
        return [self._mailbox.fileno()]

    def take_result(self) -> T | None:
        item = None
        for work, result in self._mailbox.drain():
            if work is self._work:
                self._work, item = None, result
        return item

    def forget(self) -> None:
        """Drop the result. Idempotent."""
        self._work = None

    def close(self) -> None:
        self.forget()
        self._mailbox.close()
