"""A queue for events from any thread, signal handler or callback, and one reader that can poll it.

A descriptor is readable while there are events, so that the reader waits for exits, sockets and events with one call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from rallypoint.base.kernel import Wakeup
from rallypoint.base.light_typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Many writers, one reader. Posting never blocks and is safe inside a signal handler."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wakeup = Wakeup()
        self._closed = False
        self._lock = threading.RLock()  # reentrant: a signal handler may post in the middle of a post

    def fileno(self) -> int:
        """Readable while events wait."""
        return self._wakeup.fileno()

    def post(self, event: T) -> None:
        """Add an event. After `close` it is dropped."""
        with self._lock:
            if not self._closed:
                self._items.append(event)
                self._wakeup.set()

    def drain(self) -> Iterator[T]:
        """Remove and yield the events, oldest first."""
        self._wakeup.clear()
        while self._items:
            yield self._items.popleft()

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._wakeup.close()
