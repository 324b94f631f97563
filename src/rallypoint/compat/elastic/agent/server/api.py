"""In the place of `torch.distributed.elastic.agent.server.api`."""

from __future__ import annotations

from rallypoint.agent.api import ElasticAgent, SimpleElasticAgent
from rallypoint.agent.spec import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.compat.also import also

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

__getattr__ = also(__name__)
