"""A queue for events from any thread, signal handler or callback, and one reader that can poll it.

A descriptor is readable while there are events, so that the reader waits for exits, sockets and events with one call.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator

from rallypoint.base.light_typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Many writers, one reader. Posting never blocks and is safe inside a signal handler."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._lock = threading.RLock()  # reentrant: a signal handler may post in the middle of a post

    def fileno(self) -> int:
        """Readable while events wait."""
        return self._fd

    def post(self, event: T) -> None:
        """Add an event. After `close` it is dropped."""
        with self._lock:
            if not self._closed:
                self._items.append(event)
                os.eventfd_write(self._fd, 1)

    def drain(self) -> Iterator[T]:
        """Remove and yield the events, oldest first."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        while self._items:
            yield self._items.popleft()

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
