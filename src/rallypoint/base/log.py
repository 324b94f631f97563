"""Rallypoint's own log lines on standard error: readable on a terminal, and elsewhere in the format of torchrun.

`LOGLEVEL` sets the level (default WARNING), contract section 1.12. On a terminal, a message begins with the time and
the program. In a file or a pipe, each line begins with the level's letter, the date and time, the process and the
source line (contract section 5.8). A label, if set, precedes all of these.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import UserError
from rallypoint.base.stderr import print_error_line

_ROOT = "rallypoint"


def printable(text: str, most: int = 255) -> str:
    """A text from another machine, cut to `most` characters; question marks replace unprintable ones."""
    text = text[:most]
    return text if text.isprintable() else "".join(character if character.isprintable() else "?" for character in text)


def ranges(numbers: Iterable[int]) -> list[str]:
    """Format numbers for a message: 5, 0, 1 and 2 as `0-2` and `5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(low) if low == high else f"{low}-{high}" for low, high in runs]


def terminal_rewrites_lines() -> bool:
    """Whether the terminal named in `TERM` can rewrite a line."""
    return os.environ.get("TERM", "dumb") not in {"", "dumb", "unknown"}


def colours_wanted() -> bool:
    return not os.environ.get("NO_COLOR")


_label = ""


def with_label(text: str) -> str:
    return _label + text.replace("\n", f"\n{_label}") if _label else text


class _Glog(logging.Formatter):
    """Puts the prefix before every line of a message, so that grep for the process finds all of them."""

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


_SHOWN_LEVELS = ((logging.ERROR, "error: ", "31"), (logging.WARNING, "", "33"), (logging.NOTSET, "", "36"))
"""The level, the word for it, and its colour code; highest level first."""


class _ForPeople(logging.Formatter):
    """Puts the time and the program before the first line of a message only."""

    def __init__(self, program: str, *, colours: bool) -> None:
        super().__init__()
        self._program = program
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        word, colour = next((word, code) for level, word, code in _SHOWN_LEVELS if record.levelno >= level)
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        who = f"{self._program}: {word}"
        if self._colours:
            moment, who = f"\x1b[2m{moment}\x1b[0m", f"\x1b[{colour}m{who}\x1b[0m"
        text = record.getMessage().strip("\n").removeprefix("[default] ")  # the default role
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return with_label(f"{moment} {who}{text}")


class StderrHandler(logging.Handler):
    """Writes each record to standard error in whole lines; without a formatter, the message only."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_error_line(self.format(record))
        except Exception:
            self.handleError(record)


class RateLimitedLog:
    """Logs at most `LINES` warnings per `WINDOW` seconds, and counts the rest: "and 5 more `what`"."""

    LINES, WINDOW = 10, 10.0

    def __init__(self, logger: logging.Logger, what: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._logger = logger
        self._what = what
        self._clock = clock
        self._since = float("-inf")
        self._written = 0
        self._suppressed = 0

    def warning(self, text: str, *args: object) -> None:
        if self._clock.monotonic() - self._since >= self.WINDOW:
            self.summarize()
            self._since = self._clock.monotonic()
        if self._written < self.LINES:
            self._written += 1
            self._logger.warning(text, *args, stacklevel=2)
        else:
            self._suppressed += 1

    def summarize(self) -> None:
        if self._suppressed:
            seconds = self._clock.monotonic() - self._since
            self._logger.warning("and %d more %s in %.0f s", self._suppressed, self._what, seconds)
        self._written = self._suppressed = 0


def log_level() -> str:
    """The level's name from `LOGLEVEL`, in capitals. Raises UserError if Python's logging has no such level."""
    name = os.environ.get("LOGLEVEL", "WARNING").upper()
    if name not in logging.getLevelNamesMapping():
        allowed = ", ".join(sorted(logging.getLevelNamesMapping()))
        raise UserError(f"LOGLEVEL={name!r} is not a level of Python's logging; use one of {allowed}")
    return name


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def configure(label: str = "", program: str = "rallypoint", form: str = "auto") -> None:
    """Send Rallypoint's records to standard error at the level of `LOGLEVEL`, each line after `label`. Idempotent.

    Args:
        label: the text at the start of each line, such as this host's name.
        program: the program's name, shown on a terminal.
        form: `glog`, or `auto` (readable on a terminal, `glog` elsewhere).

    Raises:
        UserError: `LOGLEVEL` is not a level.
    """
    global _label
    _label = label
    logger = logging.getLogger(_ROOT)
    logger.setLevel(log_level())
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        handler = StderrHandler()
        for_people = form == "auto" and sys.stderr is not None and sys.stderr.isatty()
        colours = terminal_rewrites_lines() and colours_wanted()
        handler.setFormatter(_ForPeople(program, colours=colours) if for_people else _Glog())
        logger.addHandler(handler)
        logger.propagate = False
