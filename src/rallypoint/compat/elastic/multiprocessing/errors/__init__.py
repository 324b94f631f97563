"""In the place of `torch.distributed.elastic.multiprocessing.errors`."""

from __future__ import annotations

from rallypoint.compat.reexports import reexports_of
from rallypoint.failures.failure import ProcessFailure
from rallypoint.failures.record import ErrorHandler, get_error_handler, record
from rallypoint.failures.report import ChildFailedError

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

__getattr__ = reexports_of(__name__)
