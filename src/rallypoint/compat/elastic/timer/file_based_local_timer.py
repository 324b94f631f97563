"""In the place of `torch.distributed.elastic.timer.file_based_local_timer`."""

from __future__ import annotations

from rallypoint.compat.reexports import reexports_of
from rallypoint.watchdog.client import FileTimerClient
from rallypoint.watchdog.requests import FileTimerRequest
from rallypoint.watchdog.server import FileTimerServer

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

__getattr__ = reexports_of(__name__)
