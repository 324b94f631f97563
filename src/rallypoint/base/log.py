"""Rallypoint's own log lines, on standard error, in the form that torchrun's users know.

`LOGLEVEL` sets the level (default WARNING), contract section 1.12; each line starts with the level's letter, the
date and time, the process and the place, contract section 5.8. Where a label was set, that stands before all of it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import UserError

_ROOT = "rallypoint"

_LOCK_TIMEOUT = 5.0
"""Seconds that a line of ours waits for what is being written to standard error; a console may take nothing at all."""


def printable(text: str, most: int = 255) -> str:
    """What others have said, as it may stand in a line: what is no printable character becomes a question mark.

    Args:
        text: of another machine, perhaps of a stranger.
        most: characters that are kept.
    """
    return "".join(each if each.isprintable() else "?" for each in text[:most])


class OutputLock:
    """The right of one thread to write to a place that threads share, first come, first served."""

    def __init__(self) -> None:
        self.line_unfinished = False
        """Whether what was written last there has not ended its line."""
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Nobody has it: so it is in a forked child, whose other threads are gone."""
        self._queue_lock = (
            threading.RLock()
        )  # held while waiting, so that who writes on and on does not come back before us
        self._write_lock = threading.RLock()

    @contextmanager
    def hold(self, patience: float = -1) -> Iterator[None]:
        """Have it inside the `with`, or after so many seconds go on without; negative waits for ever."""
        with self._queue_lock:
            has_it = self._write_lock.acquire(timeout=patience)
        try:
            yield
        finally:
            if has_it:
                self._write_lock.release()


STDERR_LOCK = OutputLock()
"""For descriptor 2: whoever writes lines there in several pieces has it until a line has ended."""

os.register_at_fork(after_in_child=STDERR_LOCK.reset_after_fork)


def print_error_line(text: str) -> None:
    """Write a line to what `sys.stderr` is at this moment, as redirections and tests expect; whole, and in its turn."""
    if sys.stderr is None:  # as it is in a process without one; `print` would take standard output then
        return
    with STDERR_LOCK.hold(_LOCK_TIMEOUT):
        begun, STDERR_LOCK.line_unfinished = STDERR_LOCK.line_unfinished, False
        sys.stderr.write(("\n" if begun else "") + text + "\n")  # in one piece: agents share a terminal
        sys.stderr.flush()


_label = ""


def with_label(text: str) -> str:
    """A text with the label of `configure` before each line; blank lines get it too."""
    return _label + text.replace("\n", f"\n{_label}") if _label else text


class _Lines(logging.Formatter):
    """Every line of a message gets the prefix, so that a grep for the process finds all of it."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micro = int(record.created % 1 * 1_000_000)
        path = record.pathname.rpartition("/src/")[2] if "/src/" in record.pathname else record.pathname
        path = path.rpartition("/site-packages/")[2]
        prefix = f"{record.levelname[0]}{moment}.{micro:06d} {record.process} {path}:{record.lineno}] "
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return with_label("\n".join(prefix + line for line in text.split("\n")))


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_error_line(self.format(record))
        except Exception:
            self.handleError(record)


class RateLimitedLog:
    """Warnings of which there may be any number: some in each window are written, the others counted.

    Whoever reads standard error may be slow, and must not hold up the jobs. For one thread.

    Args:
        logger: where they go.
        what: what those are that are only counted, in words that stand behind "and 5 more".
    """

    LINES, WINDOW = 10, 10.0
    """Lines that are written in so many seconds."""

    def __init__(self, logger: logging.Logger, what: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._logger = logger
        self._what = what
        self._clock = clock
        self._since = float("-inf")
        self._written = 0
        self._suppressed = 0

    def warning(self, text: str, *args: object) -> None:
        """A warning, if there were not too many just now."""
        if self._clock.monotonic() - self._since >= self.WINDOW:
            self.summarize()
            self._since = self._clock.monotonic()
        if self._written < self.LINES:
            self._written += 1
            self._logger.warning(text, *args, stacklevel=2)
        else:
            self._suppressed += 1

    def summarize(self) -> None:
        """The window is over: say how many more there were."""
        if self._suppressed:
            seconds = self._clock.monotonic() - self._since
            self._logger.warning("and %d more %s in %.0f s", self._suppressed, self._what, seconds)
        self._written = self._suppressed = 0


def log_level() -> str:
    """The level's name from `LOGLEVEL`, in capitals.

    Raises:
        UserError: the name is not a level of Python's logging.
    """
    name = os.environ.get("LOGLEVEL", "WARNING").upper()
    if name not in logging.getLevelNamesMapping():
        allowed = ", ".join(sorted(logging.getLevelNamesMapping()))
        raise UserError(f"LOGLEVEL={name!r} is not a level of Python's logging; use one of {allowed}")
    return name


def get_logger(name: str) -> logging.Logger:
    """The logger for a module (`__name__`). The handler is set up once, by `configure`."""
    return logging.getLogger(name)


def configure(label: str = "") -> None:
    """Send Rallypoint's records to standard error at the level of `LOGLEVEL`. Idempotent.

    Args:
        label: what stands before each line of ours that is shown, such as `node1: `.

    Raises:
        UserError: `LOGLEVEL` names no level.
    """
    global _label
    _label = label
    logger = logging.getLogger(_ROOT)
    logger.setLevel(log_level())
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        handler = _Stderr()
        handler.setFormatter(_Lines())
        logger.addHandler(handler)
        logger.propagate = False
