"""In the place of `torch.distributed.elastic.events.api`."""

from __future__ import annotations

from rallypoint.telemetry.events import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]
