"""`record`: a decorator of a program's main function, which reports its last exception to the launcher (contract
section 7.2).

It works under any launcher that sets `TORCHELASTIC_ERROR_FILE`, and does nothing without one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from rallypoint.base.light_typing import ParamSpec, TypeVar, overload
from rallypoint.base.log import get_logger
from rallypoint.failures.handler import ErrorHandler, get_error_handler

_logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


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
