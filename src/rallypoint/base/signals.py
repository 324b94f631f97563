"""Turns signals into events: a handler only posts the number.

Python runs a handler the next time that the main thread runs Python code. But the kernel may deliver a signal to any
other thread, and a main thread in `poll` then stays asleep. So it must also wait for the `SignalWakeup` of
`post_signals`. A ^C without another handler raises KeyboardInterrupt; `defer_interrupts` controls where.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from rallypoint.base.light_typing import Any


def signal_name(number: int) -> str:
    """`SIGTERM` for 15; `<N/A>` for a number that is not a signal here."""
    try:
        return signal.Signals(abs(number)).name
    except ValueError:
        return "<N/A>"


def signal_number(name: str) -> signal.Signals | None:
    """The signal called `name` (`SIGTERM`); None if this system does not have it."""
    try:
        return signal.Signals[name.strip()]
    except KeyError:
        return None


def how_it_ended(code: int) -> str:
    """Describe in words how a process ended: `was killed by SIGKILL` for -9, `ended with exit code 3`."""
    return f"was killed by {signal_name(code)}" if code < 0 else f"ended with exit code {code}"


def exit_codes_of(number: int) -> tuple[int, int]:
    """The two exit codes of workers that a signal ended: the signal's own, and the one that shells and handlers use."""
    return -number, 128 + number


class SignalWakeup:
    """Becomes readable after each signal with a Python handler, whichever thread receives it."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        for fd in (self._read_fd, self._write_fd):
            os.set_blocking(fd, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """The descriptor, readable from a signal until `clear`. The handler runs before the next sleep."""
        return self._read_fd

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous_fd, warn_on_full_buffer=False)
        os.close(self._write_fd)
        os.close(self._read_fd)


@contextmanager
def post_signals(post: Callable[[int], None], numbers: Iterable[int]) -> Iterator[SignalWakeup | None]:
    """While the block runs, pass each arriving signal of `numbers` to `post`, which must only enqueue.

    Yields an object that wakes the main thread. Outside the main thread, where Python cannot install handlers, it
    does nothing and yields None. Signals that the parent ignored stay ignored unless named. The previous handlers are
    restored when the block ends, or when `ignore_signals_at_exit` does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return

    def handler(number: int, _frame: FrameType | None) -> None:
        post(number)

    previous: dict[int, Any] = {}
    wakeup = SignalWakeup()
    try:
        for number in numbers:
            previous[number] = signal.signal(number, handler)
        yield wakeup
    finally:
        if _handlers_to_restore is None:
            _restore_handlers(previous)
        else:
            for number, old in previous.items():
                _handlers_to_restore.setdefault(number, old)
                signal.signal(number, signal.SIG_IGN)
        wakeup.close()


_INTERRUPT_TIMEOUT = 5.0
"""Seconds after which an unhandled ^C counts as stuck."""


@contextmanager
def defer_interrupts() -> Iterator[Callable[[], None]]:
    """While the block runs, a ^C raises KeyboardInterrupt only in calls of the yielded function.

    Elsewhere it could separate two steps that belong together: in an import, in a request to another process, under a
    lock. It wakes a sleep on the `SignalWakeup` of `post_signals`. If the function is not called for
    `_INTERRUPT_TIMEOUT` seconds, the next ^C raises immediately. Does nothing outside the main thread, or if ^C has
    another handler.
    """
    first: float | None = None

    def handler(_number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first >= _INTERRUPT_TIMEOUT:
            raise KeyboardInterrupt

    def raise_deferred() -> None:
        if first is not None:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield raise_deferred
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield raise_deferred
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_posting_handler(handler: Any) -> bool:
    return getattr(handler, "__module__", None) == __name__


_handlers_to_restore: dict[int, Any] | None = None
"""The handlers that `ignore_signals_at_exit` restores; used by the main thread only."""


@contextmanager
def ignore_signals_at_exit() -> Iterator[None]:
    """While the block runs, ignore the signals of `post_signals` after that function's block ends.

    No signal can then interrupt the release of resources, or change an outcome that was already decided. The
    outermost block restores the previous handlers. Does nothing in other threads.
    """
    global _handlers_to_restore
    if _handlers_to_restore is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _handlers_to_restore = {}
    try:
        yield
    finally:
        previous, _handlers_to_restore = _handlers_to_restore, None
        _restore_handlers(previous)


def _restore_handlers(previous: dict[int, Any]) -> None:
    for number, old in previous.items():
        signal.signal(number, old if old is not None else signal.SIG_DFL)


def _reset_after_fork() -> None:
    """Forget the parent's block in a forked process."""
    global _handlers_to_restore
    _handlers_to_restore = None


os.register_at_fork(after_in_child=_reset_after_fork)
