"""What is told of one failure beyond its node: plain, bounded data that can travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rallypoint.failures.failure import ProcessFailure

MAX_TRACEBACK = 16 * 1024
MAX_MESSAGE = 2 * 1024
MAX_PATH = 4 * 1024
"""Bounds of the texts, in bytes of UTF-8."""

_CUT = b"[...]\n"


class Cause(NamedTuple):
    """One failed worker.

    `exitcode` is 0 to 255, or -N for death by signal N; `timestamp` is in epoch seconds on `host`'s own clock, for
    people to read and not to compare; `error_file` is a path on `host`, empty if the worker left no error file.
    `traceback` is the exception's traceback, else the last lines of the worker's standard error, else empty.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    exitcode: int
    message: str
    traceback: str
    timestamp: float
    error_file: str

    @classmethod
    def of(cls, failure: ProcessFailure, rank: int, host: str) -> Cause:
        """What is to be told of `failure`.

        The traceback comes from the error file; without one, an exit by code is explained by the last Python
        traceback on standard error, and a death by signal by the last lines there, with the stacks that the
        interpreter has left (a traceback further up was an exception that the worker survived). A failure's `reason`
        is its message whatever else is known.
        """
        from rallypoint.failures.failure import NO_FILE
        from rallypoint.failures.last_words import is_traceback

        message, traceback = failure.text, failure.callstack
        if not traceback:
            message, traceback = _from_standard_error(failure, message, failure.error_file != NO_FILE)
        elif failure.beside:
            traceback = f"{traceback.rstrip()}\n{failure.beside}"
        return cls(
            rank=rank,
            local_rank=failure.local_rank,
            host=_beginning(host, MAX_MESSAGE),
            pid=failure.pid,
            exitcode=failure.exitcode,
            message=_beginning(message, MAX_MESSAGE),
            traceback=_ending(traceback, MAX_TRACEBACK, headed=is_traceback(traceback)),
            timestamp=failure.moment,
            error_file="" if failure.error_file == NO_FILE else _beginning(failure.error_file, MAX_PATH),
        )

    @property
    def signal_name(self) -> str:
        """`SIGKILL` and the like; `<N/A>` if no signal ended the worker."""
        from rallypoint.base.signals import signal_name

        return signal_name(-self.exitcode) if self.exitcode < 0 else "<N/A>"


def exited(exitcode: int) -> str:
    """What is said of an exit of which nothing more is known than its code."""
    return f"it exited with code {exitcode}"


def _from_standard_error(failure: ProcessFailure, message: str, recorded: bool) -> tuple[str, str]:
    """Message and traceback where no error file holds a traceback; `recorded` if one holds the message at least."""
    from rallypoint.failures.last_words import clean_lines, closing_line, last_lines, last_stacks, last_traceback

    lines = clean_lines(failure.last_lines)
    by_code = failure.exitcode >= 0
    traceback = last_traceback(lines) if by_code else ""
    if recorded:
        return message, traceback
    words = traceback if by_code else last_stacks(lines)
    words = words or last_lines(lines)
    told = "\n".join(text for text in (words, failure.damaged, failure.beside) if text)
    if failure.reason or not by_code:
        return message, told
    if traceback:
        return closing_line(traceback), told
    return exited(failure.exitcode) + ("" if told else " and said nothing on standard error"), told


# Whatever UTF-8 has no room for (half a surrogate pair out of a worker's JSON) becomes a question mark in both.


def _beginning(text: str, limit: int) -> str:
    return text.encode("utf-8", errors="replace")[:limit].decode("utf-8", errors="ignore")


def _ending(text: str, limit: int, headed: bool) -> str:
    """The end of a text, with a mark where its beginning was cut off; the first line stays if it is a heading."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= limit:
        return data.decode("utf-8")
    head = (data[: data.find(b"\n") + 1] if headed else b"") + _CUT
    return (head + data[len(head) - limit :]).decode("utf-8", errors="ignore")
