"""The standard error of this process, which the log, a live line and workers' output share.

Laws:

1. A writer of a line in several pieces keeps `STDERR_LOCK` until the line has ended, so that lines stay whole.
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
"""Seconds that a direct write waits for other writers; a console may block forever."""
_MOST_BYTES = 1024 * 1024
"""The largest size of waiting lines."""
_DRAIN = 5.0
"""Seconds that the end of a run waits for the console."""

ERASE_LINE = "\r\x1b[K"
"""The terminal sequence that erases the cursor's line."""


class OutputLock:
    """The lock on an output shared by threads; first come, first served."""

    def __init__(self) -> None:
        self.line_unfinished = False
        """Whether the last output did not end its line."""
        self.shows_live_line = False
        """Whether the last output is a line that is rewritten in place: the next writer erases it first."""
        self.writing_since: float | None = None
        """When the write in progress began, on the monotonic clock: long ago if nobody reads."""
        self.reset_after_fork()

    def take_live_line(self) -> str:
        """The sequence that erases the live line, if shown; its owner draws it again. Call with the lock."""
        shown, self.shows_live_line = self.shows_live_line, False
        return ERASE_LINE if shown else ""

    def blocked_for(self) -> float:
        """For how many seconds the write in progress has lasted; 0.0 without one."""
        since = self.writing_since
        return 0.0 if since is None else time.monotonic() - since

    def reset_after_fork(self) -> None:
        """Unlock, in a forked child, where the other threads do not exist."""
        # Taken while waiting, so that a continuous writer does not overtake waiting ones.
        self._queue_lock = threading.RLock()
        self._write_lock = threading.RLock()
        self.writing_since = None

    @contextmanager
    def hold(self, timeout: float = -1) -> Iterator[None]:
        """Take the lock inside the `with`; after a `timeout` that is not negative, continue without it.

        The owner's thread gets it again at once, ahead of waiting threads: a signal handler may write in the middle of
        a line, or interrupt code that has the lock.
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
    if sys.stderr is None:  # closed; `print` would take standard output
        return
    if _writer is None or _writer.thread.runs_this():
        _write_line(sys.stderr, text, _LOCK_TIMEOUT)
    else:
        _writer.put(text, partial(_write_line, sys.stderr))


def draw(write: Callable[[], None], *, needed: bool = True) -> None:
    """Draw something that is no line: at once, or on the thread of `written_beside`.

    Args:
        write: draws it.
        needed: whether to draw it even if the console is busy now.
    """
    if _writer is None:
        write()
    elif needed or _writer.thread.is_idle:
        _writer.thread.post("live line", write)


@contextmanager
def written_beside() -> Iterator[None]:
    """Inside the `with`, a separate thread writes lines: no caller waits for the console."""
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
    """The queue of lines. It bounds their bytes; its thread bounds their number."""

    def __init__(self) -> None:
        self.thread = SideThread("rallypoint-console", self._failed)
        self._waiting = 0
        """Bytes that wait."""
        self._lost = 0
        """Lines dropped since the last written one."""
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
        """Write the waiting lines as long as the console takes them, and end the thread."""
        if self.thread.wait_idle(_DRAIN) and self._lost and sys.stderr is not None:
            self.thread.post("line", partial(_write_line, sys.stderr, _missing(self._lost), -1))
        left = self.thread.close(_DRAIN)
        if self.thread.busy_for():  # nobody reads
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
        """The console is gone: there is nowhere to report it."""


def _missing(lines: int) -> str:
    return f"{lines} lines of this log are missing here, since nobody read it"


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
    """A forked child has no writing thread."""
    global _writer, _users
    _writer, _users = None, 0
    STDERR_LOCK.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)
