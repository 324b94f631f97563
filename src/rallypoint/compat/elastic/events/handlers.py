"""In the place of `torch.distributed.elastic.events.handlers`."""

from __future__ import annotations

from rallypoint.telemetry.handlers import get_logging_handler, log_handlers

__all__ = ["get_logging_handler"]

_log_handlers = log_handlers
"""Not public in torch either, but the one place there to which a program can add a handler of its own."""
