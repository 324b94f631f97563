"""In the place of `torch.distributed.elastic.multiprocessing.errors.error_handler`."""

from __future__ import annotations

from rallypoint.failures.record import ErrorHandler

__all__ = ["ErrorHandler"]
