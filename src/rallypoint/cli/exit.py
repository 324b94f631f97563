"""How a command ends: one sentence or one report on standard error, and an exit code (contract section 7.6).

Known causes are shown without tracebacks, which would concern the launcher and not the job. An unexpected exception
keeps its traceback, since the launcher or a plug-in then has a bug.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from contextlib import suppress

from rallypoint.base.errors import JobPreempted, NodeLeftInOrder, RallypointError, SignalException, UsageError
from rallypoint.base.log import with_label
from rallypoint.cli.process_setup import drop_output
from rallypoint.failures.record import record

FAILED, USAGE = 1, 2
PREEMPTED = 143
"""128 + SIGTERM, regardless of `--exit-codes`: only flags beyond torchrun's lead here."""
HUNG = 124
"""Like timeout(1), regardless of `--exit-codes`, for the same reason."""
INTERRUPTED = 130
"""The shell's code for a program that SIGINT ended: 128 + 2."""


Finish = Callable[[BaseException | None, int], int]
"""Receives the exception that ended the work, if any, and its exit code. Returns the final exit code."""


def exit_code_of(work: Callable[[], None], program: str = "rallyrun", finish: Finish | None = None) -> int:
    """Do the work, write errors to standard error, and return the exit code.

    The work runs under `record`, so its failure is also written to this process's own error file (contract section
    7.4). `finish` is called last.
    """
    error, code = _run_printed(work, program)
    return code if finish is None else finish(error, code)


def _run_printed(work: Callable[[], None], program: str) -> tuple[BaseException | None, int]:
    """Do the work. Returns the exception that ended it, after printing it, and the exit code."""

    orderly_end: NodeLeftInOrder | JobPreempted | None = None

    def recorded() -> None:
        nonlocal orderly_end
        try:
            work()
        except (NodeLeftInOrder, JobPreempted) as error:  # requested; nothing failed
            print_error(f"{program}: {error}")
            orderly_end = error

    try:
        record(recorded)()
    except RallypointError as error:
        print_error(_error_sentence(error, program))
        return error, _code_of(error)
    except KeyboardInterrupt as interrupt:
        print_error(f"{program}: interrupted")
        return interrupt, INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            print_error(f"{program}: error: {error.strerror}; raise the limit of this process (`ulimit -n`)")
            return error, FAILED
        import traceback

        with suppress(OSError, ValueError):
            traceback.print_exc()
        print_error(f"{program}: error: {_unexpected(error)}")
        return error, FAILED
    return orderly_end, PREEMPTED if isinstance(orderly_end, JobPreempted) else 0


def _code_of(error: RallypointError) -> int:
    if isinstance(error, UsageError):
        return USAGE
    from rallypoint.failures.cause import Ending

    return HUNG if getattr(error, "ending", None) == Ending.HANG else FAILED


def _error_sentence(error: RallypointError, program: str) -> str:
    from rallypoint.failures.report import ChildFailedError

    if isinstance(error, ChildFailedError):
        return str(error)
    if isinstance(error, SignalException) and not error.drained:
        from rallypoint.base.signals import signal_name

        return f"{program}: stopped by {signal_name(error.sigval)}"
    return f"{program}: error: {str(error) or type(error).__name__}"


def _unexpected(error: Exception) -> str:
    """The sentence about an unexpected exception, with its origin: a plug-in or this program."""
    name = type(error).__name__
    trace = error.__traceback__
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in {"rallypoint", "__main__"} and package not in sys.stdlib_module_names:
            return (
                f"{package} raised {name} ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}); see the "
                "traceback above, and report it to the package's authors"
            )
        trace = trace.tb_next
    return f"unexpected {name}; this is a bug in Rallypoint (please report it)"


class OutputError(RallypointError):
    """Standard output cannot be written."""


def print_error(text: str) -> None:
    """Write a line to standard error if possible; otherwise only the exit code reports the error."""
    if sys.stderr is not None:  # `print` would use standard output instead of None
        with suppress(OSError, ValueError):
            print(with_label(text), file=sys.stderr, flush=True)


def print_answer(text: str) -> None:
    """Write lines with the answer to standard output. Raises OutputError if nobody reads it or the disk is full."""
    write_answer(f"{text}\n")


def write_answer(text: str) -> None:
    """Like `print_answer`, without the newline."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        drop_output(sys.stdout)
        raise OutputError(f"standard output cannot be written: {error.strerror}; redirect it elsewhere") from None
