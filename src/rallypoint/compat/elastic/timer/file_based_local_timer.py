"""In the place of `torch.distributed.elastic.timer.file_based_local_timer`."""

from __future__ import annotations

from rallypoint.compat.also import also
from rallypoint.watchdog.client import FileTimerClient
from rallypoint.watchdog.requests import FileTimerRequest
from rallypoint.watchdog.server import FileTimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

__getattr__ = also(__name__)
