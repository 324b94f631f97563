"""One queue into which any thread, signal handler or callback drops typed events, and one reader that can poll it.

Law 5 of the design: everything that happens becomes one event in one loop. The mailbox is the door of that loop: a
file descriptor becomes readable when something is in it, so the reader waits for exits, sockets and mail with one call.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Many writers, one reader. Posting never blocks and is safe inside a signal handler."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._lock = threading.RLock()  # reentrant: a signal handler may post in the middle of a post

    def fileno(self) -> int:
        """The descriptor that is readable while letters wait."""
        return self._fd

    def post(self, letter: T) -> None:
        """Drop a letter in. After `close` it is thrown away."""
        with self._lock:
            if not self._closed:
                self._items.append(letter)
                os.eventfd_write(self._fd, 1)

    def drain(self) -> Iterator[T]:
        """Take out the letters one by one, oldest first, until none is left."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        while self._items:
            yield self._items.popleft()

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
