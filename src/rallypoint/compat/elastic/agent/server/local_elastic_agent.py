"""In the place of `torch.distributed.elastic.agent.server.local_elastic_agent`."""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rallypoint.agent.rendezvous_client import rendezvous_of
from rallypoint.agent.signals import GracePeriods
from rallypoint.agent.spec import RunResult, WorkerGroup, WorkerSpec
from rallypoint.agent.workers import (
    TORCHELASTIC_ENABLE_FILE_TIMER,
    TORCHELASTIC_TIMER_FILE,
    TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT,
    WorkerController,
)
from rallypoint.compat.elastic.agent.server.api import OverriddenWorkers, SimpleElasticAgent, attribute_of
from rallypoint.compat.reexports import reexports_of
from rallypoint.health.check import VARIABLE as TORCHELASTIC_HEALTH_CHECK_PORT
from rallypoint.health.check import health_check
from rallypoint.logs.specs import LogsSpecs
from rallypoint.telemetry.lazy import profiled
from rallypoint.workers.escalation import StopInProgress

if TYPE_CHECKING:
    from rallypoint.health.check import HealthCheckServer

__all__ = [
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "LocalElasticAgent",
]

__getattr__ = reexports_of(__name__)


class OverriddenProcesses(OverriddenWorkers):
    """Processes that the methods of an agent start, watch and stop, for our loop."""

    def prepare(self) -> None:
        WorkerController.prepare(self)

    def exit_fds(self) -> list[int] | None:
        return WorkerController.exit_fds(self)

    def running(self) -> Collection[int]:
        return WorkerController.running(self)

    def ended_in_order(self) -> bool:
        return WorkerController.ended_in_order(self)

    def begin_stop(self, death_sig: signal.Signals, timeout: float, *, keeps: bool) -> StopInProgress | None:
        # A subclass may have a way of its own to stop workers, which must be gone then.
        if self.overrides("_stop_workers", LocalElasticAgent) or self.overrides("_shutdown", LocalElasticAgent):
            return super().begin_stop(death_sig, timeout, keeps=keeps)
        return WorkerController.begin_stop(self, death_sig, timeout, keeps=keeps)


class LocalElasticAgent(SimpleElasticAgent):
    """The agent whose workers are processes of this host.

    Args:
        spec, exit_barrier_timeout, shutdown_timeout: see `SimpleElasticAgent`.
        logs_specs, start_method, log_line_prefix_template, uninterruptible_state_timeout: see `WorkerController`.
        health_check_server: see `health_check`.
    """

    _workers: OverriddenProcesses

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
    ) -> None:
        workers = OverriddenProcesses(
            spec,
            rendezvous_of(spec, exit_barrier_timeout),
            GracePeriods(shutdown_timeout),
            logs_specs,
            start_method,
            log_line_prefix_template,
            uninterruptible_state_timeout,
        )
        health = health_check(health_check_server)
        super().__init__(spec, exit_barrier_timeout, shutdown_timeout, workers, health)

    _pcontext = attribute_of(lambda agent: agent._workers, "pcontext")
    _logs_specs = attribute_of(lambda agent: agent._workers, "logs_specs")
    _start_method = attribute_of(lambda agent: agent._workers, "start_method")
    _log_line_prefix_template = attribute_of(lambda agent: agent._workers, "log_line_prefix_template")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._own_loop is not None:
            self._own_loop.begin(self._until_the_end, self._health)
        return dict(self._workers.start_workers())

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._own_loop is not None:
            self._own_loop.step()
        result = WorkerController.poll(self._workers)
        if result.is_failed():
            self._failed_with = result
        if self._workers.beyond_help:
            self._remaining_restarts = 0
        return result

    @profiled("LocalElasticAgent._stop_workers")
    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._workers.end(signal.SIGTERM, self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._workers.end(death_sig, timeout)
        if not self._runs:
            self._workers.close()
