"""In the place of `torch.distributed.elastic.agent.server.health_check_server`."""

from __future__ import annotations

from rallypoint.compat.reexports import reexports_of
from rallypoint.health.check import HealthCheckServer, create_healthcheck_server

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

__getattr__ = reexports_of(__name__)
