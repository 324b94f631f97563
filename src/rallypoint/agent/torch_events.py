"""The events of an agent's run under torch's names, with the fields of contract section 5.9: a projection of what the
agent knows, which records nothing; and the names and values of its metrics.

Law: each worker's START is followed by one end before the next start: its own (FAILED, SUCCEEDED) or the agent's
(TERMINATED).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.observe.telemetry.agent_events import Event, EventMetadataValue, EventSource
from rallypoint.observe.telemetry.lazy import put_metric_if_wanted

if TYPE_CHECKING:
    from rallypoint.agent.spec import Worker, WorkerGroup
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.workers.timers import FileTimerRequest


class TorchEvents:
    """Makes the events of one run.

    Args:
        group: the workers of the node.
        began: when the run began, on `clock`; None for now.
        clock: measures the run.
        wall_clock: dates events, in epoch seconds.
    """

    def __init__(
        self,
        group: WorkerGroup,
        began: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._group = group
        self._clock = clock
        self._wall_clock = wall_clock
        self._began = clock.monotonic() if began is None else began

    def step_done(self, state: str, seconds: float) -> Event:
        """The agent has done `state` (RENDEZVOUS, ASSIGN_WORKER_RANKS), which took so many seconds."""
        return self.agent_event(state, duration_ms=seconds * 1000)

    def workers_started(self) -> Iterator[Event]:
        """The workers have been started."""
        return (self.worker_event("START", worker) for worker in self._group.workers)

    def workers_ended(
        self, state: str, failures: Mapping[int, ProcessFailure], succeeded: Collection[int] = ()
    ) -> Iterator[Event]:
        """The workers of one round have ended.

        Args:
            state: of the group.
            failures: by global rank.
            succeeded: global ranks that succeeded, in a group that did not; the others were terminated.
        """
        for worker in self._group.workers:
            rank = worker.global_rank
            failure = failures.get(rank)
            well = state == "SUCCEEDED" or rank in succeeded
            own = "FAILED" if failure is not None else "SUCCEEDED" if well else "TERMINATED"
            yield self.worker_event(own, worker, failure)

    def watchdog_event(self, name: str, timer: FileTimerRequest | None) -> Event:
        """An event of the watchdog, with its timer if there is one."""
        more = {"watchdog_event": name}
        if timer is not None:
            more["worker_pid"] = str(timer.worker_pid)
            more["scope_id"] = timer.scope_id
            more["expiration_time"] = str(timer.expiration_time)
            more["signal"] = str(timer.signal)
        return Event(name, EventSource.AGENT, int(self._wall_clock()), self._metadata("RUNNING", more))

    def agent_event(self, state: str, *, duration_ms: float | None = None, raw_error: str | None = None) -> Event:
        """An event about the agent itself."""
        metadata = self._metadata(state, self._size_and_program(), raw_error=raw_error)
        return self._status(state, EventSource.AGENT, {**metadata, "duration_ms": duration_ms})

    def worker_event(self, state: str, worker: Worker, failure: ProcessFailure | None = None) -> Event:
        """An event about a worker."""
        more = {
            **self._size_and_program(),
            "local_rank": [worker.local_rank],
            "role_rank": [worker.role_rank],
            "role_world_size": [worker.role_world_size],
            "exit_code": [None if failure is None else failure.exitcode],
            "worker_pid": [None if failure is None else failure.pid],
        }
        error = None if failure is None else json.dumps(failure.error_file_data)
        metadata = self._metadata(state, more, worker.global_rank, str(worker.id), error)
        return self._status(state, EventSource.WORKER, {**metadata, "duration_ms": None})

    def _status(self, state: str, source: EventSource, metadata: dict[str, EventMetadataValue]) -> Event:
        return Event(f"torchelastic.worker.status.{state}", source, int(self._wall_clock()), metadata)

    def _size_and_program(self) -> dict[str, object]:
        program = os.path.basename(self._group.spec.get_entrypoint_name())
        return {"group_world_size": self._group.group_world_size, "entry_point": program}

    def _metadata(
        self,
        state: str,
        more: Mapping[str, object],
        global_rank: int | None = None,
        worker_id: str | None = None,
        raw_error: str | None = None,
    ) -> dict[str, EventMetadataValue]:
        spec = self._group.spec
        return {
            "run_id": spec.rdzv_handler.get_run_id(),
            "global_rank": global_rank,
            "group_rank": self._group.group_rank,
            "worker_id": worker_id,
            "role": spec.role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": int(self._clock.monotonic() - self._began),
            "rdzv_backend": spec.rdzv_handler.get_backend(),
            "raw_error": raw_error,
            "metadata": json.dumps(more),
            "agent_restarts": self._group.restarts,
        }


# The metrics of an agent's run


def put_worker_state(role: str, state: str, remaining_restarts: int) -> None:
    """The agent has polled its workers: the state of their group, and the failures that the job would still survive."""
    put_metric_if_wanted(f"workers.{role}.remaining_restarts", remaining_restarts)
    put_metric_if_wanted(f"workers.{role}.{state.lower()}", 1)


def put_run_result(role: str, failed: bool, remaining_restarts: int, max_restarts: int) -> None:
    """The run has ended: whether it failed, and how many of its restarts remained."""
    retried = remaining_restarts < max_restarts
    put_metric_if_wanted(f"workers.{role}.flakiness", flakiness(failed, remaining_restarts, max_restarts))
    put_metric_if_wanted(f"workers.{role}.run_total", 1)
    for outcome, holds in (("success", not failed), ("failed", failed)):
        put_metric_if_wanted(f"workers.{role}.run_{outcome}_with_retries", int(holds and retried))
        put_metric_if_wanted(f"workers.{role}.run_{outcome}_no_retries", int(holds and not retried))


def flakiness(failed: bool, remaining_restarts: int, max_restarts: int) -> int:
    """The share of its restarts that a job used, in percent: 0 without any, 100 if it failed."""
    return 100 if failed else int(100 - 100 * (remaining_restarts + 1) / (max_restarts + 1))
