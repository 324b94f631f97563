"""In the place of `torch.distributed.elastic.events`."""

from __future__ import annotations

from rallypoint.telemetry.events import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent
from rallypoint.telemetry.handlers import get_logging_handler
from rallypoint.telemetry.recording import construct_and_record_rdzv_event, record, record_rdzv_event

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "record",
    "record_rdzv_event",
]
