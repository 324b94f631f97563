"""In the place of `torch.distributed.elastic.timer`."""

from __future__ import annotations

from rallypoint.compat.elastic.timer.api import TimerClient, TimerRequest, TimerServer, configure, expires
from rallypoint.compat.elastic.timer.file_based_local_timer import FileTimerClient, FileTimerRequest, FileTimerServer
from rallypoint.compat.elastic.timer.local_timer import LocalTimerClient, LocalTimerServer

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]
