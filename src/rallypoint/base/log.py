"""Rallypoint's own log lines, on standard error, in the form that torchrun's users know.

`LOGLEVEL` sets the level (default WARNING), contract section 1.12; each line starts with the level's letter, the
date and time, the process and the place, contract section 5.8.
"""

from __future__ import annotations

import logging
import os
import sys
import time

from rallypoint.base.errors import UserError

_ROOT = "rallypoint"


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
        return "\n".join(prefix + line for line in text.split("\n"))


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at that moment, as redirections and tests expect."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if sys.stderr is not None:  # as it is in a process without one; `print` would take standard output then
                print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


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


def configure() -> None:
    """Send Rallypoint's records to standard error at the level of `LOGLEVEL`. Idempotent.

    Raises:
        UserError: `LOGLEVEL` names no level.
    """
    logger = logging.getLogger(_ROOT)
    logger.setLevel(log_level())
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        handler = _Stderr()
        handler.setFormatter(_Lines())
        logger.addHandler(handler)
        logger.propagate = False
