"""Signals become letters: a handler does nothing but post the number.

Python runs a handler in the main thread when that next runs Python code, but the kernel may hand a signal to any other
thread, and then one that sleeps in `poll` sleeps on. So who sleeps must also wait for the bell of `post_signals`.

Names and numbers are translated here too, so that every message names a signal as people do (`SIGTERM`, not 15).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def signal_name(number: int) -> str:
    """`SIGTERM` for 15; `<N/A>` for a number that is no signal here."""
    try:
        return signal.Signals(abs(number)).name
    except ValueError:
        return "<N/A>"


def signal_number(name: str) -> signal.Signals | None:
    """The signal called `name` (`SIGTERM`), or None if this system has none of that name."""
    try:
        return signal.Signals[name.strip()]
    except KeyError:
        return None


def exit_codes_of(number: int) -> tuple[int, int]:
    """The exit codes of workers that end because of a signal: by it, or as shells and handlers put it."""
    return -number, 128 + number


class SignalWakeup:
    """Rings at every signal that Python has a handler for, whichever thread gets it."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Readable from a signal until `hush`; its handler runs before the next sleep."""
        return self._read_fd

    def clear(self) -> None:
        """Be silent until the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def close(self) -> None:
        """Hand over to what was there before. Call it once."""
        signal.set_wakeup_fd(self._previous_fd, warn_on_full_buffer=False)
        os.close(self._write_fd)
        os.close(self._read_fd)


@contextmanager
def post_signals(post: Callable[[int], None], numbers: Iterable[int]) -> Iterator[SignalWakeup | None]:
    """While the block runs, each of `numbers` that arrives is handed to `post`, which must only enqueue.

    Yields the bell that wakes who sleeps; None if no handlers are in place: Python lets only the main thread install
    them, so elsewhere this does nothing. Signals that the parent had set to be ignored stay ignored only if not named.
    The former handlers are back at the end, or at that of `ignore_signals_at_exit`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return

    def handler(number: int, _frame: FrameType | None) -> None:
        post(number)

    former: dict[int, Any] = {}
    bell = SignalWakeup()
    try:
        for number in numbers:
            former[number] = signal.signal(number, handler)
        yield bell
    finally:
        if _handlers_to_restore is None:
            _restore_handlers(former)
        else:
            for number, old in former.items():
                _handlers_to_restore.setdefault(number, old)
                signal.signal(number, signal.SIG_IGN)
        bell.close()


def is_posting_handler(handler: Any) -> bool:
    """Whether a signal's handler is one that `post_signals` has put there."""
    return getattr(handler, "__module__", None) == __name__


_handlers_to_restore: dict[int, Any] | None = None
"""In `ignore_signals_at_exit`: the handlers to put back. The main thread's alone."""


@contextmanager
def ignore_signals_at_exit() -> Iterator[None]:
    """While the block runs, signals that `post_signals` has had mean nothing any more once that has ended.

    So what is to be let go of when the outcome is settled is let go of in peace, and no outcome is turned over. At the
    end of the block, of the outermost of several, the former handlers are back. In other threads it does nothing.
    """
    global _handlers_to_restore
    if _handlers_to_restore is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _handlers_to_restore = {}
    try:
        yield
    finally:
        former, _handlers_to_restore = _handlers_to_restore, None
        _restore_handlers(former)


def _restore_handlers(former: dict[int, Any]) -> None:
    for number, old in former.items():
        signal.signal(number, old if old is not None else signal.SIG_DFL)


def _reset_after_fork() -> None:
    """The block is the original's, not that of a copy of the process."""
    global _handlers_to_restore
    _handlers_to_restore = None


os.register_at_fork(after_in_child=_reset_after_fork)
