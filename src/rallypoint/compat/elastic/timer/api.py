"""In the place of `torch.distributed.elastic.timer.api`."""

from __future__ import annotations

from rallypoint.watchdog import client
from rallypoint.watchdog.client import TimerClient, expires
from rallypoint.watchdog.local import RequestQueue, TimerServer
from rallypoint.watchdog.requests import TimerRequest

__all__ = ["RequestQueue", "TimerClient", "TimerRequest", "TimerServer", "configure", "expires"]


def configure(timer_client: TimerClient) -> None:
    """Set the client that `expires` uses where it is given none."""
    client.configure(timer_client)
