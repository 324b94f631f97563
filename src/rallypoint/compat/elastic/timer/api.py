"""In the place of `torch.distributed.elastic.timer.api`."""

from __future__ import annotations

from rallypoint.watchdog.client import TimerClient, configure, expires
from rallypoint.watchdog.local import RequestQueue, TimerServer
from rallypoint.watchdog.requests import TimerRequest

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]
