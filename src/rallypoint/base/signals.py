"""Signals become letters: a handler does nothing but post the number.

Names and numbers are translated here too, so that every message names a signal as people do (`SIGTERM`, not 15).
"""

from __future__ import annotations

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


@contextmanager
def signals_to(post: Callable[[int], None], numbers: Iterable[int]) -> Iterator[bool]:
    """While the block runs, each of `numbers` that arrives is handed to `post`, which must only enqueue.

    Yields whether handlers are in place: Python lets only the main thread install them, so elsewhere this does
    nothing and yields False. Signals that the parent had set to be ignored stay ignored only if not named.
    The former handlers are back at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return

    def handler(number: int, _frame: FrameType | None) -> None:
        post(number)

    former: dict[int, Any] = {}
    try:
        for number in numbers:
            former[number] = signal.signal(number, handler)
        yield True
    finally:
        for number, old in former.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
