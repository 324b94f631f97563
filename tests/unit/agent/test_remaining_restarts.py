"""Metrics and health check agree on how many more failures the job would survive."""

from __future__ import annotations

import pytest

from rallypoint.agent.spec import RunResult, WorkerState
from rallypoint.failures.failure import ProcessFailure
from rallypoint.observe.telemetry import metrics
from tests.unit.agent.third_party import outcome
from tests.unit.agent.thread_workers import ThreadWorkers
from tests.unit.telemetry.test_agent import MemoryMetrics

pytestmark = pytest.mark.process


class StuckWorkers(ThreadWorkers):
    """A worker that no signal ends, as `WorkerController` finds one: no restart would help, though one is left."""

    def poll(self) -> RunResult:
        return RunResult(WorkerState.UNHEALTHY, failures={0: ProcessFailure(0, 1, -9, "")})

    def restart_limit(self) -> int:
        return 0


def test_a_stuck_worker_leaves_no_restart_in_metrics_and_health_check() -> None:
    workers = StuckWorkers(lambda rank, start, stopping: stopping.wait(30))
    kept = MemoryMetrics()
    metrics.configure(kept)
    try:
        result = outcome(workers)
    finally:
        metrics.configure(metrics.NullMetricHandler())
        metrics._handlers.clear()
    assert result.is_failed()
    assert workers.look().status()["remaining_restarts"] == 0
    remaining = [value for _, name, value in kept.seen if name == "workers.default.remaining_restarts"]
    assert remaining == [0]
