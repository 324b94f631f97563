"""`record`, a decorator for a program's main function that reports its last exception to the launcher (contract section
7.2), and its error handler, which writes the exception to an error file (7.3 and 7.4).

Works under any launcher that sets `TORCHELASTIC_ERROR_FILE`, and does nothing otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps

from rallypoint.base.light_typing import TYPE_CHECKING, ParamSpec, TypeVar, overload
from rallypoint.base.log import get_logger

if TYPE_CHECKING:
    from rallypoint.failures.cause import Cause
    from rallypoint.failures.failure import JsonObject

VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable that contains the path."""

_logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class ErrorHandler:
    """Writes this process's own error file, at the path in `TORCHELASTIC_ERROR_FILE`. A subclass can do more."""

    _fn_name: str | None = None
    """The qualified name of the function that `record` runs, for subclasses; None if it has none."""

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """Store the function's name; called by `record` before `initialize`."""
        self._fn_name = fn_name

    def initialize(self) -> None:
        """Make a crash of the interpreter (such as SIGSEGV) print the Python stacks of all threads."""
        try:
            import faulthandler

            faulthandler.enable(all_threads=True)
        except Exception as error:  # standard error might be closed, or not a file
            _logger.warning("a crash of this process will not show a Python stack: %s", error)

    def record_exception(self, e: BaseException) -> None:
        """Write `e` and its traceback, if a path is set."""
        path = self._get_error_file_path()
        if path:
            # Take the time first: formatting the text can be slow.
            from time import time
            from traceback import format_exception

            now = time()
            from rallypoint.failures.failure import error_data, write_error_file

            write_error_file(path, error_data(f"{type(e).__name__}: {e}", "".join(format_exception(e)), now))

    def record_success(self) -> None:
        """Called by `record` when the function returns. Its own exceptions are not recorded as a failure."""
        return

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        """Change a launcher's report about a worker that died of a signal; this handler leaves `message` unchanged.

        Args:
            message: the traceback, or the explanation.
            error_file: the worker's error file, or `<N/A>`.
        """
        return message

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file to our own, with its exit code unless that is 0."""
        from rallypoint.failures.failure import ErrorFile, read_error_file

        reply = read_error_file(rootcause_error_file)
        if not isinstance(reply, ErrorFile):
            _logger.error("the error file %r cannot be read, so it will not be passed on", rootcause_error_file)
            return
        self.override_error_code_in_rootcause_data(rootcause_error_file, reply.data, error_code)
        path = self._get_error_file_path()
        if path:
            self._replace(path, reply.data)
        else:
            _logger.error("the error file %r will not be passed on: %s is not set", rootcause_error_file, VARIABLE)

    def dump_cause(self, cause: Cause) -> None:
        """Write a failure that left no error file on this node, if a path is set."""
        path = self._get_error_file_path()
        if not path:
            _logger.info("rank %d did not leave an error file to pass on", cause.rank)
            return
        from rallypoint.failures.failure import error_data
        from rallypoint.failures.report import failure_detail

        # A launcher above us shows only the call stack.
        data = error_data(cause.message, failure_detail(cause), cause.timestamp)
        self.override_error_code_in_rootcause_data(cause.error_file, data, cause.exitcode)
        self._replace(path, data)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: JsonObject, error_code: int = 0
    ) -> None:
        """Set `errorCode` in an error file's data, in place, unless it is 0; the path is for messages."""
        message = rootcause_error.get("message")
        if error_code == 0:
            return
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            _logger.warning("%r contains a plain message, which has no exit code", rootcause_error_file)

    def _get_error_file_path(self) -> str | None:
        """Path of this process's error file; None or empty without one."""
        return os.environ.get(VARIABLE)

    def _replace(self, path: str, data: JsonObject) -> None:
        from rallypoint.failures.failure import write_error_file

        if os.path.exists(path):
            _logger.warning("the error file %r already exists and is being replaced", path)
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

    Use it as `@record`, `@record()` or `record(fn)(...)`. It swallows an exit with code 0 (`sys.exit(0)`), so that code
    after the call still runs; other exits and interrupts pass. If this process is itself a launcher, a
    `ChildFailedError` passes on the first failure's own error file, or what is known about a failure without one.

    Args:
        fn: the function, normally a program's main.
        error_handler: writes the file; `ErrorHandler` by default.

    Returns:
        A function with the same arguments and result.
    """
    if fn is None:
        return lambda function: _recorded(function, error_handler or get_error_handler())
    return _recorded(fn, error_handler or get_error_handler())


def _recorded(fn: Callable[P, R], handler: ErrorHandler) -> Callable[P, R | None]:
    @wraps(fn)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.set_entrypoint_fn_name(getattr(fn, "__qualname__", None))  # a functools.partial has none
        handler.initialize()
        try:
            result = fn(*args, **kwargs)
        except SystemExit as leave:
            if leave.code == 0:
                return None
            raise
        except Exception as error:
            _write_error_file(handler, error)
            raise
        handler.record_success()
        return result

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
    except Exception:  # such as from an exception whose own text raises; it must not hide the exception of `fn`
        _logger.warning("the failure of this process could not be recorded", exc_info=True)
