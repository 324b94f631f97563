"""The line of an agent that waits for others, rewritten in place where standard error is a terminal.

Laws:

1. Other writers erase it first (`base.stderr.OutputLock`), so that no line of theirs is mixed with it.
2. It does not wait for a terminal that accepts nothing at the moment: the line is left out.
3. A background job of the shell draws nothing.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from functools import partial

from rallypoint.base.log import terminal_rewrites_lines
from rallypoint.base.stderr import ERASE_LINE, STDERR_LOCK, draw

_STDERR = 2
_LOCK_TIMEOUT = 0.1
"""Seconds to wait for other writers; after that the line is left out this time."""
_LEAST_WIDTH = 20


def shows_live_line() -> bool:
    """Whether standard error is a terminal that can rewrite a line."""
    return os.isatty(_STDERR) and terminal_rewrites_lines()


class LiveLine:
    """One line, from `show` until `end`."""

    def __init__(self, since: float) -> None:
        """Nothing is shown yet.

        Args:
            since: the moment from which time is counted, on the clock of the other methods' `now`.
        """
        self._since = since
        self._words = ("", "")
        self._shown = False

    def show(self, words: tuple[str, str], now: float) -> None:
        """Show the elapsed time, between these two texts."""
        self._words = words
        self.redraw(now)

    def redraw(self, now: float) -> None:
        """Show the same texts with the time that has passed until now."""
        if self._words[0]:
            self._shown = True
            draw(partial(_write, composed(self._words, now - self._since, _width())), needed=False)

    def end(self) -> None:
        """Erase the line. Idempotent."""
        self._words = ("", "")
        if self._shown:
            self._shown = False
            draw(_erase)


def composed(words: tuple[str, str], seconds: float, width: int) -> str:
    """The line in at most this many columns."""
    before, after = words
    text = f"{before}, {_elapsed(seconds)}{f', {after}' if after else ''}"
    most = max(_LEAST_WIDTH, width - 1)  # a terminal wraps behind its last column
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _elapsed(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def _width() -> int:
    try:
        return os.get_terminal_size(_STDERR).columns or 80
    except OSError:
        return 80


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(_STDERR) == os.getpgrp()
    except OSError:  # a terminal that is not the one of our session has no jobs
        return True


def _erase() -> None:
    if STDERR_LOCK.shows_live_line:
        _write("")


def _write(text: str) -> None:
    """Replace the line by this text, or erase it if that is empty."""
    if not _in_foreground():
        return
    writable = select.poll()
    writable.register(_STDERR, select.POLLOUT)
    if not writable.poll(0):
        return
    with STDERR_LOCK.hold(_LOCK_TIMEOUT), suppress(OSError):
        begun = "\n" if STDERR_LOCK.line_unfinished and text else ERASE_LINE
        os.write(_STDERR, f"{begun}{text}".encode())
        if text:
            STDERR_LOCK.line_unfinished = False
        STDERR_LOCK.shows_live_line = bool(text)
