"""In the place of `torch.distributed.elastic.multiprocessing.errors.handlers`."""

from __future__ import annotations

from rallypoint.compat.reexports import reexports_of
from rallypoint.failures.record import get_error_handler

__all__ = ["get_error_handler"]

__getattr__ = reexports_of(__name__)
