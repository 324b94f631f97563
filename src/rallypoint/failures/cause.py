"""One failure as plain, bounded data that can travel."""

from __future__ import annotations

import os
import sys
from enum import StrEnum

from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rallypoint.failures.failure import ProcessFailure

MAX_TRACEBACK = 16 * 1024
MAX_MESSAGE = 2 * 1024
MAX_PATH = 4 * 1024
"""Bounds of the texts, in bytes of UTF-8."""

_MORE_ON_CONSOLE = "[its standard output went to the console, and may say more]"
OF_STDOUT = "standard output:"
"""The first line of a traceback that is the end of a worker's standard output, and no traceback."""
_STDERR_COPY = "the worker's standard error, which -t 2 keeps in a file as well"


class Restarts(NamedTuple):
    """Restarts used, of those allowed; 0 allowed also where that is not known."""

    used: int = 0
    allowed: int = 0

    def __str__(self) -> str:
        return f"{self.used} of {self.allowed}"


NO_RESTARTS = Restarts()


class Ending(StrEnum):
    """Why a job, or an agent, has not succeeded, as schedulers see it (`--exit-codes=classified`)."""

    PROGRAM = "the program failed"
    CONFIGURATION = "a value cannot work"
    INFRASTRUCTURE = "the infrastructure failed"
    REPEATED = "the same failure came back without progress"
    HANG = "the program hangs"
    PREEMPTED = "preempted after the workers had saved"
    STOPPED = "an operator stopped the job"


class Cause(NamedTuple):
    """One failed worker.

    `exitcode` is 0 to 255, or -N for death by signal N; `timestamp` is in epoch seconds on `host`'s clock, for people
    and not to be compared; `error_file` is a path on `host`, empty if the worker left none. `traceback` is the
    exception's traceback, else the end of the worker's standard error, else empty. A `rank` below 0: not a worker has
    failed, but something that its node needs to start workers. `ending` is why the job fails if this is its cause.
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
    ending: Ending = Ending.PROGRAM

    @classmethod
    def from_failure(cls, failure: ProcessFailure, rank: int, host: str) -> Cause:
        """The cause of a failure.

        The traceback comes from the error file; without one, an exit by code is explained by the last Python traceback
        on standard error, and a death by signal by the last lines there, with the stacks that the interpreter left (a
        traceback further up was an exception that the worker survived). A failure's `reason` is its message in any
        case.
        """
        from rallypoint.failures.failure import NO_FILE
        from rallypoint.failures.texts import truncate, truncate_end

        message, traceback = failure.text, failure.callstack
        if not traceback:
            message, traceback = _from_standard_error(failure, message, failure.error_file != NO_FILE)
        elif failure.context:
            traceback = f"{traceback.rstrip()}\n{failure.context}"
        if message.removeprefix("bdb.").startswith("BdbQuit"):
            message, traceback = "it was ended by its debugger", ""
        message += _environment_note(message)
        if failure.raised_before is not None:
            message += f" (raised {failure.raised_before:.1f} s earlier, and the worker has not ended)"
        error_file = "" if failure.error_file == NO_FILE else truncate_end(failure.error_file, MAX_PATH)
        path = (error_file if failure.callstack else "") or failure.log
        where = f"{os.path.abspath(path)} on {host}" if path else _STDERR_COPY
        return cls(
            rank=rank,
            local_rank=failure.local_rank,
            host=truncate_end(host, MAX_MESSAGE),
            pid=failure.pid,
            exitcode=failure.exitcode,
            message=truncate(message, MAX_MESSAGE),
            traceback=truncate(traceback, MAX_TRACEBACK, where),
            timestamp=failure.moment,
            error_file=error_file,
        )

    def is_of(self, other: Cause | None) -> bool:
        """Whether it is the same failure, even if its texts were cut on their way."""
        return other is not None and (self.rank, self.pid, self.timestamp) == (other.rank, other.pid, other.timestamp)

    @property
    def headline(self) -> str:
        from rallypoint.failures.texts import first_line

        if self.rank < 0:
            line = first_line(self.message)
            of_all = self.ending is Ending.HANG or line.startswith(self.host)
            return line if of_all else f"{self.host}: {line}"
        how = f"exit code {self.exitcode}" + (f", {self.signal_name}" if self.exitcode < 0 else "")
        return f"rank {self.rank} failed on {self.host} ({how}): {first_line(self.message)}"

    @property
    def signal_name(self) -> str:
        """`SIGKILL` and the like; `<N/A>` if no signal ended the worker."""
        from rallypoint.base.signals import signal_name

        return signal_name(-self.exitcode) if self.exitcode < 0 else "<N/A>"


def _environment_note(message: str) -> str:
    """For a missing module: that the workers' Python is not that of the active environment, if it is not."""
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if not message.startswith("ModuleNotFoundError: ") or not active:
        return ""
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    if os.path.realpath(active) in {os.path.realpath(sys.prefix), os.path.realpath(os.path.dirname(python) + "/..")}:
        return ""
    advice = "install Rallypoint there, and use its rallyrun"
    return f" (workers run {python}, and the active environment is {active}; {advice})"


def exit_text(exitcode: int) -> str:
    """The message for an exit if only its code is known."""
    return f"it exited with code {exitcode}"


def _from_standard_error(failure: ProcessFailure, message: str, recorded: bool) -> tuple[str, str]:
    """Message and traceback if no error file has a traceback; `recorded` if one has a message."""
    from rallypoint.failures.texts import clean_lines, exception_line, last_lines, last_stacks, last_traceback

    lines = clean_lines(failure.last_lines)
    by_code = failure.exitcode >= 0
    traceback = last_traceback(lines) if by_code else ""
    if by_code and not traceback:  # logged, or printed there
        traceback = last_traceback(clean_lines(failure.last_stdout))
    if recorded:
        return message, traceback
    text = traceback if by_code else last_stacks(lines)
    text = text or last_lines(lines, os.path.abspath(failure.log) if failure.log else "")
    if text and by_code and not (traceback or failure.last_stdout or failure.stdout):
        text = f"{_MORE_ON_CONSOLE}\n{text}"
    if not text and by_code:
        path = os.path.abspath(failure.stdout) if failure.stdout else ""
        text = last_lines(clean_lines(failure.last_stdout), path)
        text = f"{OF_STDOUT}\n{text}" if text else ""
    detail = "\n".join(filter(None, (text, failure.damaged, failure.context)))
    if failure.reason or not by_code:
        return message, detail
    if traceback:
        return exception_line(traceback), detail
    return exit_text(failure.exitcode) + ("" if detail else f" and wrote nothing{_where_stdout_went(failure)}"), detail


def _where_stdout_went(failure: ProcessFailure) -> str:
    """Where to look for the reason of a worker that has left none that we have seen."""
    if failure.stdout == os.devnull:
        return " to standard error; its standard output was not kept: --local-ranks-filter or --redirects has hidden it"
    return "" if failure.stdout else " to standard error; its standard output went to the console"
