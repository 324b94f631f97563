"""What a failed worker has left, as a message and a traceback."""

from __future__ import annotations

import os
import sys

from rallypoint.failures.failure import NO_FILE, ProcessFailure
from rallypoint.failures.texts import (
    OF_STDOUT,
    clean_lines,
    exception_line,
    exit_text,
    last_lines,
    last_stacks,
    last_traceback,
)

_HIDDEN = "(standard output, which --local-ranks-filter keeps from the console)"


def message_and_traceback(failure: ProcessFailure) -> tuple[str, str]:
    """The texts of a failure.

    The traceback comes from the error file; without one, an exit by code is explained by the last Python traceback on
    standard error or standard output, and a death by signal by the last lines on standard error, with the stacks that
    the interpreter left (a traceback further up was an exception that the worker survived). A failure's `reason` is its
    message in any case.
    """
    message, traceback = failure.text, failure.callstack
    if not traceback:
        message, traceback = _from_output(failure, message, failure.error_file != NO_FILE)
    elif failure.context:
        traceback = f"{traceback.rstrip()}\n{failure.context}"
    if message.removeprefix("bdb.").startswith("BdbQuit"):
        message, traceback = "it was ended by its debugger", ""
    message += _environment_note(message)
    if failure.not_ended:
        message += f" ({failure.not_ended})"
    return message, traceback


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


def _from_output(failure: ProcessFailure, message: str, recorded: bool) -> tuple[str, str]:
    """Message and traceback if no error file has a traceback; `recorded` if one has a message."""
    lines, printed = clean_lines(failure.last_lines), clean_lines(failure.last_stdout)
    by_code = failure.exitcode >= 0
    traceback = last_traceback(lines) if by_code else ""
    hidden = failure.stdout == os.devnull
    if by_code and not traceback and (traceback := last_traceback(printed)) and hidden:  # logged, or printed there
        failure.context = "\n".join(filter(None, (failure.context, _HIDDEN)))
    if recorded:
        return message, traceback
    text = traceback if by_code else last_stacks(lines)
    text = text or last_lines(lines, os.path.abspath(failure.log) if failure.log else "")
    if not text and by_code:
        path = os.path.abspath(failure.stdout) if failure.stdout and not hidden else ""
        text = last_lines(printed, path)
        text = f"{OF_STDOUT}\n{text}" if text else ""
    detail = "\n".join(filter(None, (text, failure.damaged, failure.context)))
    if failure.reason or not by_code:
        return message, detail
    if traceback:
        return exception_line(traceback), detail
    return exit_text(failure.exitcode) + ("" if detail else " and wrote nothing"), detail
