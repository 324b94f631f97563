"""In the place of `torch.distributed.elastic.timer.local_timer`."""

from __future__ import annotations

from rallypoint.compat.reexports import reexports_of
from rallypoint.watchdog.local import LocalTimerClient, LocalTimerServer, MultiprocessingRequestQueue

__all__ = ["LocalTimerClient", "LocalTimerServer", "MultiprocessingRequestQueue"]

__getattr__ = reexports_of(__name__)
