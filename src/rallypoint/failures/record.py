"""The file in which a worker leaves the exception that ended it (contract section 7.1).

Reading never fails: a file that is cut off or is not an error file counts as absent, with its text kept for the report.
The worker chose what is at the path: only a regular file is read, at most `MAX_SIZE` bytes of it, and its numbers and
texts are checked. Writing follows no symbolic link.

`record`: a decorator of a program's main function, which reports its last exception to the launcher (contract
section 7.2); and its error handler, which writes the exception to an error file (7.3 and 7.4).

It works under any launcher that sets `TORCHELASTIC_ERROR_FILE`, and does nothing without one.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import wraps

from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import replace_file

if TYPE_CHECKING:
    from rallypoint.failures.cause import Cause

JsonObject: TypeAlias = dict[str, object]

VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable with the path."""

MAX_SIZE = 4 * 1024 * 1024
"""Bytes of an error file that are read; a traceback has some thousand."""
_MAX_RAW = 4096
_LATEST = 253402214400.0
"""Epoch seconds at the beginning of the last day of the year 9999, which every time zone can show."""

_logger = get_logger(__name__)


class ErrorFile(NamedTuple):
    """The contents of an error file: `data` is the parsed file, `message` its `message` member (a text in newer files).

    `text` and `callstack` are that message and the formatted traceback as texts. `timestamp` is in whole epoch seconds,
    `exact` the same with a fraction if the file's own time has it, else None.
    """

    path: str
    data: JsonObject
    message: str | JsonObject
    text: str
    callstack: str
    timestamp: int
    exact: float | None


class UnreadableErrorFile(NamedTuple):
    path: str
    raw: str


def read_error_file(path: str) -> ErrorFile | UnreadableErrorFile | None:
    """The contents of an error file; None if there is none, if it is empty, or if `path` is."""
    if not path or path == os.devnull:
        return None
    try:
        # O_NONBLOCK: a named pipe without a writer would block the agent forever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            return None
        if not stat.S_ISREG(status.st_mode):
            return UnreadableErrorFile(
                path, f"(nothing: it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'not a regular file')})"
            )
        data = _read(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    raw = data[:MAX_SIZE].decode(errors="replace")
    if not raw.strip():
        return None
    whole = len(data) <= MAX_SIZE
    written = min(max(status.st_mtime, 0.0), _LATEST)
    return (_parse(path, raw, written) if whole else None) or UnreadableErrorFile(path, raw[:_MAX_RAW])


def _read(fd: int) -> bytes:
    """At most one byte more than `MAX_SIZE`."""
    data = b""
    while len(data) <= MAX_SIZE and (more := os.read(fd, MAX_SIZE + 1 - len(data))):
        data += more
    return data


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def write_error_file(path: str, data: JsonObject) -> None:
    """Write an error file atomically. A failure is logged."""
    import json

    try:
        replace_file(path, json.dumps(data).encode(), mode=0o666)
    except OSError as error:
        _logger.warning("the error file %r cannot be written: %s", path, error)


def error_data(text: str, callstack: str, timestamp: float) -> JsonObject:
    """The contents of an error file; `text` is `<exception class>: <its text>`, `timestamp` epoch seconds."""
    extra: JsonObject = {"py_callstack": callstack, "timestamp": str(int(timestamp))}
    return {"message": {"message": text, "extraInfo": extra}}


def _parse(path: str, raw: str, written: float) -> ErrorFile | None:
    import json

    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    match data.get("message"):
        case str(text):
            timestamp = _timestamp_seconds(data.get("timestamp"), written)
            return ErrorFile(path, data, text, text, "", timestamp, _exact(timestamp, written))
        case dict(message):
            extra = message.get("extraInfo")
            known = extra if isinstance(extra, dict) else {}
            text = str(message.get("message", ""))
            callstack = str(known.get("py_callstack") or "")
            timestamp = _timestamp_seconds(known.get("timestamp"), written)
            return ErrorFile(path, data, message, text, callstack, timestamp, _exact(timestamp, written))
        case _:
            return None


def _timestamp_seconds(value: object, otherwise: float) -> int:
    """The file's timestamp, a number or its text; else the time at which the file was written."""
    if isinstance(value, str | int | float):
        with suppress(ValueError, OverflowError):  # not a number
            seconds = float(value)
            if math.isfinite(seconds) and 0 <= seconds < _LATEST:  # not nanoseconds, say
                return int(seconds)
    return int(otherwise)


def _exact(timestamp: int, written: float) -> float | None:
    """The file is written right after the exception was caught, so its own time adds the fraction of the second.

    Only if it is close: the time of a copied file, or of one on another machine's disk, means nothing.
    """
    return refine_timestamp(timestamp, written) if timestamp <= written < timestamp + 2 else None


def refine_timestamp(timestamp: int, moment: float) -> float:
    """The time in the second that begins at `timestamp` that is nearest to `moment`; both in epoch seconds."""
    return min(max(moment, float(timestamp)), timestamp + 0.999999)


P = ParamSpec("P")
R = TypeVar("R")


class ErrorHandler:
    """Writes this process's own error file, whose path is in `TORCHELASTIC_ERROR_FILE`."""

    def initialize(self) -> None:
        """Have a crash of the interpreter (such as SIGSEGV) print the Python stacks of all threads."""
        try:
            import faulthandler

            faulthandler.enable(all_threads=True)
        except Exception as error:  # standard error may be closed, or not be a file
            _logger.warning("a crash of this process will show no Python stack: %s", error)

    def record_exception(self, e: BaseException) -> None:
        """Write `e` and its traceback, if there is a path for it."""
        path = self._get_error_file_path()
        if path:
            # The time first: formatting the text may take long.
            from time import time
            from traceback import format_exception

            now = time()
            write_error_file(path, error_data(f"{type(e).__name__}: {e}", "".join(format_exception(e)), now))

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file to our own, with its exit code unless that is 0."""

        reply = read_error_file(rootcause_error_file)
        if not isinstance(reply, ErrorFile):
            _logger.error("the error file %r cannot be read and is not passed on", rootcause_error_file)
            return
        self.override_error_code_in_rootcause_data(rootcause_error_file, reply.data, error_code)
        path = self._get_error_file_path()
        if path:
            self._replace(path, reply.data)
        else:
            _logger.error("the error file %r is not passed on: %s is not set", rootcause_error_file, VARIABLE)

    def dump_cause(self, cause: Cause) -> None:
        """Write a failure that left no error file on this node, if there is a path for it."""
        path = self._get_error_file_path()
        if not path:
            _logger.info("rank %d left no error file to pass on", cause.rank)
            return
        from rallypoint.failures.report import failure_detail

        # A launcher above us shows the call stack only.
        data = error_data(cause.message, failure_detail(cause), cause.timestamp)
        self.override_error_code_in_rootcause_data(cause.error_file, data, cause.exitcode)
        self._replace(path, data)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: JsonObject, error_code: int = 0
    ) -> None:
        """Put `errorCode` into the data of an error file, in place, unless it is 0; the path is for messages."""
        message = rootcause_error.get("message")
        if error_code == 0:
            return
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            _logger.warning("%r has a message of the plain form, which has no exit code", rootcause_error_file)

    def _get_error_file_path(self) -> str | None:
        return os.environ.get(VARIABLE)

    def _replace(self, path: str, data: JsonObject) -> None:
        if os.path.exists(path):
            _logger.warning("the error file %r exists already and is replaced", path)
        write_error_file(path, data)


def get_error_handler() -> ErrorHandler:
    return ErrorHandler()


@overload
def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]: ...


@overload
def record(
    fn: None = None, error_handler: ErrorHandler | None = None
) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...


def record(
    fn: Callable[P, R] | None = None, error_handler: ErrorHandler | None = None
) -> Callable[P, R | None] | Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Write the exception that ends `fn` to this process's error file, and raise it again.

    Use it as `@record`, `@record()` or `record(fn)(...)`. An exit with code 0 (`sys.exit(0)`) is swallowed, so that
    what follows the call still runs; other exits and interrupts pass. A `ChildFailedError` (this process is itself a
    launcher) passes on the first failure's own error file, or what is known of the failure without one.

    Args:
        fn: the function, normally a program's main.
        error_handler: what writes the file; None means `ErrorHandler`.

    Returns:
        A function with the same arguments and result.
    """
    if fn is None:
        return lambda function: _recorded(function, error_handler or get_error_handler())
    return _recorded(fn, error_handler or get_error_handler())


def _recorded(fn: Callable[P, R], handler: ErrorHandler) -> Callable[P, R | None]:
    @wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as leave:
            if leave.code == 0:
                return None
            raise
        except Exception as error:
            _write_error_file(handler, error)
            raise

    return recorded


def _write_error_file(handler: ErrorHandler, error: Exception) -> None:
    from rallypoint.failures.report import ChildFailedError

    try:
        if not isinstance(error, ChildFailedError):
            handler.record_exception(error)
        elif path := error.root_error_file():
            handler.dump_error_file(path, error.root_cause().exitcode)
        else:
            handler.dump_cause(error.root_cause())
    except Exception:  # such as an exception whose own text raises; it must not hide what `fn` raised
        _logger.warning("the failure of this process could not be recorded", exc_info=True)
