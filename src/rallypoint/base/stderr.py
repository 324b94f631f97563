"""The standard error of this process, which the log, the live line and the workers' output share.

Laws:

1. A writer that writes a line in several pieces keeps `STDERR_LOCK` until the line ends, so that lines stay whole.
2. While an agent runs (`written_beside`), its main thread does not write: a console that nobody reads (a stopped pager,
   a dead ssh session, a container's log driver) would block the job. Another thread writes, in order, from a bounded
   queue.
3. Lines that do not fit into the queue are counted, and the next line reports the count.
4. At the end, the queue has a few seconds to empty. No error here ends a job.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.side_thread import SideThread

if TYPE_CHECKING:
    from typing import TextIO

_LOCK_TIMEOUT = 5.0
"""Seconds that a direct write waits for other writers, since a console may block forever."""
_MOST_BYTES = 1024 * 1024
"""The maximum size of queued lines."""
_DRAIN = 5.0
"""Seconds to wait for the console when a run ends."""

ERASE_LINE = "\r\x1b[K"
"""The terminal sequence that erases the cursor's line."""


class OutputLock:
    """A lock on an output that threads share; first come, first served."""

    def __init__(self) -> None:
        self.line_unfinished = False
        """Whether the last output ended in the middle of a line."""
        self.shows_live_line = False
        """Whether the last output was a live line: the next writer erases it first."""
        self.writing_since: float | None = None
        """When the current write began, on the monotonic clock. Long ago if nobody reads."""
        self.reset_after_fork()

    def take_live_line(self) -> str:
        """The sequence that erases the live line, if shown; its owner redraws it. Call with the lock taken."""
        shown, self.shows_live_line = self.shows_live_line, False
        return ERASE_LINE if shown else ""

    def blocked_for(self) -> float:
        """How many seconds the current write has lasted; 0.0 if none."""
        since = self.writing_since
        return 0.0 if since is None else time.monotonic() - since

    def reset_after_fork(self) -> None:
        """Unlock in a forked child, which has no other threads."""
        # Waiting threads take this lock, so that a continuous writer cannot overtake them.
        self._queue_lock = threading.RLock()
        self._write_lock = threading.RLock()
        self.writing_since = None

    @contextmanager
    def hold(self, timeout: float = -1) -> Iterator[None]:
        """Take the lock inside the `with`. After a `timeout` that is not negative, continue without it.

        The thread that has the lock can take it again immediately, ahead of waiting threads: a signal handler may write
        in the middle of a line, or interrupt code that has the lock.
        """
        owned = self._write_lock._is_owned()  # type: ignore[attr-defined]
        locked = self._write_lock.acquire() if owned else self._acquire_in_turn(timeout)
        try:
            yield
        finally:
            if locked:
                self._write_lock.release()

    def _acquire_in_turn(self, timeout: float) -> bool:
        began = time.monotonic()
        if not self._queue_lock.acquire(timeout=timeout):
            return False
        try:
            left = timeout if timeout < 0 else max(0.0, timeout - (time.monotonic() - began))
            return self._write_lock.acquire(timeout=left)
        finally:
            self._queue_lock.release()


STDERR_LOCK = OutputLock()
"""The lock on descriptor 2."""


def print_error_line(text: str) -> None:
    """Write a whole line to the current `sys.stderr` (which may be redirected), between others' lines."""
    if sys.stderr is None:  # closed: `print` would use standard output
        return
    if _writer is None or _writer.thread.runs_this():
        _write_line(sys.stderr, text, _LOCK_TIMEOUT)
    else:
        _writer.put(text, partial(_write_line, sys.stderr))


def draw(write: Callable[[], None], *, needed: bool = True) -> None:
    """Draw something other than a line: immediately, or on the thread of `written_beside`.

    Args:
        write: draws it.
        needed: whether to draw even if the console is busy.
    """
    if _writer is None:
        write()
    elif needed or _writer.thread.is_idle:
        _writer.thread.post("live line", write)


@contextmanager
def written_beside() -> Iterator[None]:
    """Inside the `with`, write lines on a separate thread, so that no caller waits."""
    global _writer, _users
    if _writer is None:
        _writer = _LineWriter()
    _users += 1
    try:
        yield
    finally:
        _users -= 1
        if not _users:
            ending, _writer = _writer, None
            if ending is not None:
                ending.end()


class _LineWriter:
    """The queue of lines. It limits their bytes; its thread limits their number."""

    def __init__(self) -> None:
        self.thread = SideThread("rallypoint-console", self._failed)
        self._waiting = 0
        """Number of queued bytes."""
        self._lost = 0
        """Number of lines dropped since the last written one."""
        self._lock = threading.RLock()  # reentrant, for signal handlers

    def put(self, text: str, write: Callable[[str, float], None]) -> None:
        with self._lock:
            if self._lost:
                text = f"{_missing(self._lost)}\n{text}"
            size = len(text)
            fits = self._waiting + size <= _MOST_BYTES
            if fits and self.thread.post("line", partial(self._write, text, size, write)):
                self._waiting += size
                self._lost = 0
            else:
                self._lost += 1

    def end(self) -> None:
        """Write the queued lines while the console accepts them, and end the thread."""
        if self.thread.wait_idle(_DRAIN) and self._lost and sys.stderr is not None:
            self.thread.post("line", partial(_write_line, sys.stderr, _missing(self._lost), -1))
        left = self.thread.close(_DRAIN)
        if self.thread.busy_for():  # nobody is reading
            return
        for work in left:  # no thread could be started
            if not _takes_output():
                break
            with suppress(Exception):
                work.run()

    def _write(self, text: str, size: int, write: Callable[[str, float], None]) -> None:
        with self._lock:
            self._waiting -= size
        write(text, -1)

    def _failed(self, _what: str) -> None:
        """Ignore that the console is gone."""


def _missing(lines: int) -> str:
    return f"{lines} lines of this log are missing here because nothing read it"


def _write_line(stream: TextIO, text: str, timeout: float) -> None:
    lock = STDERR_LOCK
    with lock.hold(timeout):
        line_unfinished, lock.line_unfinished = lock.line_unfinished, False
        erase = lock.take_live_line()
        lock.writing_since = time.monotonic()
        try:
            stream.write(("\n" if line_unfinished else erase) + text + "\n")  # in one piece: agents share a terminal
            stream.flush()
        finally:
            lock.writing_since = None


def _takes_output() -> bool:
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    return bool(poller.poll(0))


_writer: _LineWriter | None = None
_users = 0


def _reset_after_fork() -> None:
    """Reset the state in a forked child, which has no writing thread."""
    global _writer, _users
    _writer, _users = None, 0
    STDERR_LOCK.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)
