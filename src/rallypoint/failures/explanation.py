"""Turns a failed worker's output and error file into a message and a traceback."""

from __future__ import annotations

import os
import signal
import sys

from rallypoint.failures.failure import NO_FILE, ProcessFailure
from rallypoint.failures.handlers import survives
from rallypoint.failures.texts import OF_STDOUT, TRUNCATION_MARK, exit_text
from rallypoint.failures.tracebacks import (
    LINES,
    Traceback,
    clean_lines,
    exception_line,
    is_said_after,
    last_lines,
    last_stacks,
    last_thrown,
    last_words,
    tracebacks,
    unfold_json,
)

_HIDDEN = "(standard output, which --local-ranks-filter hides from the console)"
_CRASHES = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
"""Signals with which a program ends itself."""
TOOL_FILES = ("uv-receipt.toml", "pipx_metadata.json")
"""Files that `uv tool` and `pipx` leave in an environment created for one program."""
_QUITS_PDB = "Quitting pdb will kill the process."
"""Last line of a program whose user quit the debugger, from Python 3.14 on, which raises no BdbQuit."""
_MOST_LOOKED_AT = 8
"""Maximum number of tracebacks whose source is read."""


def message_and_traceback(failure: ProcessFailure) -> tuple[str, str]:
    """Compose a failure's message and traceback.

    The traceback comes from the error file. Without one, the last Python traceback on standard error or standard output
    explains an exit by code, or, if the worker survived that exception, its last words afterwards. A death by signal is
    explained by the last lines on standard error, with the interpreter's stacks. A traceback further up shows an
    exception that the worker survived, unless it ended the program, which then crashed. A failure's `reason` is always
    its message.
    """
    message, traceback = failure.text, failure.callstack
    if not traceback:
        message, traceback = _from_output(failure, message, failure.error_file != NO_FILE)
    elif failure.context:
        traceback = f"{traceback.rstrip()}\n{failure.context}"
    if message.removeprefix("bdb.").startswith("BdbQuit") or _QUITS_PDB in traceback.rpartition("\n")[2]:
        message, traceback = "it was ended by its debugger", ""
    message += _environment_note(message, failure.program or sys.executable) or _user_note(message)
    if failure.remark:
        message += f" ({failure.remark})"
    return message, traceback


def _environment_note(message: str, python: str) -> str:
    """Write a note about a missing module if the workers' Python is not that of the active environment."""
    name = os.path.basename(python)
    if not (message.startswith("ModuleNotFoundError: ") and name.startswith("python") and os.path.isabs(python)):
        return ""
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    theirs = os.path.realpath(os.path.dirname(python) + "/..")
    ours = {os.path.realpath(sys.prefix)} if python == sys.executable else set()
    if active:
        if os.path.realpath(active) in ours | {theirs}:
            return ""
        advice = f"set PYTHON_EXEC={active}/bin/python to run them there"
        return f" (workers run {python}, but the active environment is {active}; {advice})"
    if python == sys.executable and any(os.path.exists(f"{sys.prefix}/{name}") for name in TOOL_FILES):
        advice = "activate the environment that has the module, or set PYTHON_EXEC to its Python"
        return f" (workers run {python}, where only Rallypoint is installed; {advice})"
    return ""


def _user_note(message: str) -> str:
    """Write a note for a program that asks for the user's name, which arbitrary user ids in containers lack."""
    # Errors of `getpass.getuser` before and since Python 3.13.
    if "getpwuid(): uid not found: " in message or message == "OSError: No username set in the environment":
        return " (this user id has no name on this machine; set LOGNAME or USER to one)"
    return ""


def _from_output(failure: ProcessFailure, message: str, recorded: bool) -> tuple[str, str]:
    """Message and traceback if no error file contains a traceback; `recorded`: an error file contains a message."""
    lines, printed = clean_lines(failure.last_lines), clean_lines(failure.last_stdout)
    by_code = failure.exitcode >= 0
    shown, traceback = _ended_by(lines) if by_code else ("", "")
    hidden, context = failure.stdout == os.devnull, failure.context
    if by_code and not traceback:  # it was logged, or printed to standard output
        shown, traceback = _ended_by(printed, last_words(lines, [], 0))
        if is_said_after(shown, traceback):
            traceback = f"{OF_STDOUT}\n{traceback}"
        if traceback and hidden:
            context = "\n".join(filter(None, (context, _HIDDEN)))
    if recorded:
        return message, traceback
    text = traceback if by_code else last_stacks(lines)
    text = text or last_lines(lines, os.path.abspath(failure.log) if failure.log else "")
    if -failure.exitcode in _CRASHES:
        raised = _raised_before_crash(lines)
        above = [part for part in (raised, last_thrown(lines)) if part and part not in text]
        text = f"\n{TRUNCATION_MARK}\n".join([*above, text])
        message += f", after {exception_line(raised)}" if raised and not failure.reason else ""
    if not text and by_code:
        path = os.path.abspath(failure.stdout) if failure.stdout and not hidden else ""
        text = last_lines(printed, path)
        text = f"{OF_STDOUT}\n{text}" if text else ""
    if by_code and not failure.reason:
        message = shown or exit_text(failure.exitcode) + ("" if text else " and wrote nothing")
    notes = [*filter(None, (failure.damaged, context))]
    # Without a line of the worker's own, our notes alone are not a traceback.
    return (message, "\n".join([text, *notes])) if text else ("; ".join([message, *notes]), "")


def _ended_by(printed: list[str], elsewhere: str = "") -> tuple[str, str]:
    """Find the last words about the reason from a worker that exited with a code, and the traceback for them. Empty if
    there is no traceback, or if the worker survived it and then said something `elsewhere`."""
    lines = unfold_json(printed)
    found = [*tracebacks(lines)]
    candidates = [traceback for traceback in found if not traceback.is_lesser] or found
    if not candidates:
        return "", ""
    last = ended = candidates[0]
    said, after = last_words(lines, found, last.behind), lines[last.behind :]
    is_far = TRUNCATION_MARK in after
    if (said or elsewhere or is_far or len(candidates) > 1) and _is_survived(last):
        if elsewhere or (is_far and not said):
            return "", ""
        if said:
            cut = [TRUNCATION_MARK] if len(after) > LINES else []
            return said, "\n".join([*lines[last.begin : last.behind], *cut, *after[-LINES:]])
        others = candidates[1:_MOST_LOOKED_AT]
        earlier = (traceback for traceback in others if traceback.is_of_program and not _is_survived(traceback))
        ended = next(earlier, last)
    return exception_line(ended.text), ended.text


def _raised_before_crash(lines: list[str]) -> str:
    """The traceback that ended a program which then crashed while cleaning up; empty if none."""
    last = next((traceback for traceback in tracebacks(lines) if not traceback.is_lesser), None)
    if last is None or not last.is_of_program or TRUNCATION_MARK in lines[last.behind :] or _is_survived(last):
        return ""
    return last.text


def _is_survived(traceback: Traceback) -> bool:
    return traceback.is_ignored or survives(traceback.file, traceback.line, traceback.function)
