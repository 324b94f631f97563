"""In the place of `torch.distributed.elastic.metrics`."""

from __future__ import annotations

from rallypoint.compat.elastic.metrics import api
from rallypoint.compat.elastic.metrics.api import *  # noqa: F403 - all that is public there
from rallypoint.telemetry.metrics import initialize_metrics

__all__ = [*api.__all__, "initialize_metrics"]  # noqa: PLE0604
