"""Work on a separate thread, whose result wakes the agent's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rallypoint.base.mailbox import Mailbox

T = TypeVar("T")


class Background(Generic[T]):
    """One piece of work at a time; only the result of the last one counts. All calls are made on the loop's thread.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mailbox: Mailbox[tuple[Callable[[], T], T]] = Mailbox()
        self._work: Callable[[], T] | None = None

    @property
    def busy(self) -> bool:
        """Whether a result is pending."""
        return self._work is not None

    def start(self, work: Callable[[], T]) -> None:
        """Begin a piece of work, which must not raise; the previous one is dropped."""
        self._work = work
        threading.Thread(target=lambda: self._mailbox.post((work, work())), name=self._name, daemon=True).start()

    def fds(self) -> list[int]:
        """Readable when there is a result."""
        return [self._mailbox.fileno()]

    def take(self) -> T | None:
        """Return the result, once it is available; only once."""
        found = None
        for work, result in self._mailbox.drain():
            if work is self._work:
                self._work, found = None, result
        return found

    def forget(self) -> None:
        """Drop the result. Idempotent."""
        self._work = None

    def close(self) -> None:
        """Release everything; a thread that still runs ends with its work. Idempotent."""
        self.forget()
        self._mailbox.close()
