"""In the place of `torch.distributed.elastic.events`."""

from __future__ import annotations

from rallypoint.compat.elastic.events import api
from rallypoint.compat.elastic.events.api import *  # noqa: F403 - all that is public there
from rallypoint.telemetry.handlers import (
    construct_and_record_rdzv_event,
    get_logging_handler,
    record,
    record_rdzv_event,
)

__all__ = [  # noqa: PLE0604
    *api.__all__,
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]
