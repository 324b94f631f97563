"""The events of an agent's run, with the fields of contract section 5.9.

Laws:

1. Recording never fails: an exception of a handler is logged. The agent's objects are typed by protocols, since they
   belong to higher layers.
2. Each worker's START is followed by one end before the next start: its own (FAILED, SUCCEEDED) or the agent's
   (TERMINATED).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import Any, Protocol
from rallypoint.telemetry.events import Event, EventMetadataValue, EventSource
from rallypoint.telemetry.lazy import logging_errors
from rallypoint.telemetry.recording import record


class WorkerLike(Protocol):
    """A worker with its ranks; `id` is its process id."""

    @property
    def id(self) -> Any: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def role_rank(self) -> int: ...
    @property
    def role_world_size(self) -> int: ...


class GroupLike(Protocol):
    """The workers of a node; group rank and size are None before the first round."""

    @property
    def group_rank(self) -> int | None: ...
    @property
    def group_world_size(self) -> int | None: ...
    @property
    def workers(self) -> Sequence[WorkerLike]: ...


class FailureLike(Protocol):
    """A worker's failure, with the data of its error file."""

    @property
    def exitcode(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def error_file_data(self) -> Mapping[str, object]: ...


class TimerLike(Protocol):
    """A request of a watchdog timer."""

    @property
    def worker_pid(self) -> int: ...
    @property
    def scope_id(self) -> str: ...
    @property
    def expiration_time(self) -> float: ...
    @property
    def signal(self) -> int: ...


class EventFactory:
    """Makes and records the events of one run.

    Args:
        destination: the name of the handler.
        run_id: the job.
        role: of the workers.
        rdzv_backend: the rendezvous backend's name.
        entry_point: what the workers run; the base name of a program is recorded.
        began: when the run began, on `clock`; None for now.
        clock: measures the run.
        wall_clock: dates events, in epoch seconds.
    """

    def __init__(
        self,
        destination: str,
        run_id: str,
        role: str,
        rdzv_backend: str,
        entry_point: str,
        began: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._destination = destination
        self._run_id = run_id
        self._role = role
        self._backend = rdzv_backend
        self._entry_point = os.path.basename(entry_point)
        self._clock = clock
        self._wall_clock = wall_clock
        self._began = clock.monotonic() if began is None else began

    def record(self, event: Event) -> None:
        """Record an event. Never raises."""
        logging_errors("events", lambda: record(event, self._destination))

    def step_done(self, state: str, group: GroupLike, restarts: int, seconds: float) -> None:
        """The agent has done `state` (RENDEZVOUS, ASSIGN_WORKER_RANKS), which took so many seconds."""
        self.record(self.agent_event(state, group, restarts, duration_ms=seconds * 1000))

    def workers_started(self, group: GroupLike, restarts: int) -> None:
        """The workers have been started."""
        for worker in group.workers:
            self.record(self.worker_event("START", group, restarts, worker))

    def workers_ended(
        self,
        state: str,
        group: GroupLike,
        restarts: int,
        failures: Mapping[int, FailureLike],
        succeeded: Collection[int] = (),
    ) -> None:
        """The workers of one round have ended.

        Args:
            state: of the group.
            group: the workers.
            restarts: restarts before this round.
            failures: by global rank.
            succeeded: global ranks that succeeded, in a group that did not; the others were terminated.
        """
        for worker in group.workers:
            rank = worker.global_rank
            failure = failures.get(rank)
            well = state == "SUCCEEDED" or rank in succeeded
            own = "FAILED" if failure is not None else "SUCCEEDED" if well else "TERMINATED"
            self.record(self.worker_event(own, group, restarts, worker, failure))

    def watchdog_event(self, name: str, group: GroupLike, restarts: int, timer: TimerLike | None) -> Event:
        """An event of the watchdog, with its timer if there is one."""
        more = {"watchdog_event": name}
        if timer is not None:
            more["worker_pid"] = str(timer.worker_pid)
            more["scope_id"] = timer.scope_id
            more["expiration_time"] = str(timer.expiration_time)
            more["signal"] = str(timer.signal)
        metadata = self._metadata("RUNNING", group, restarts, more)
        return Event(name, EventSource.AGENT, int(self._wall_clock()), metadata)

    def agent_event(
        self,
        state: str,
        group: GroupLike,
        restarts: int,
        *,
        duration_ms: float | None = None,
        raw_error: str | None = None,
    ) -> Event:
        """An event about the agent itself."""
        more = self._size_and_program(group)
        metadata = self._metadata(state, group, restarts, more, raw_error=raw_error)
        return self._status(state, EventSource.AGENT, {**metadata, "duration_ms": duration_ms})

    def worker_event(
        self, state: str, group: GroupLike, restarts: int, worker: WorkerLike, failure: FailureLike | None = None
    ) -> Event:
        """An event about a worker."""
        more = {
            **self._size_and_program(group),
            "local_rank": [worker.local_rank],
            "role_rank": [worker.role_rank],
            "role_world_size": [worker.role_world_size],
            "exit_code": [None if failure is None else failure.exitcode],
            "worker_pid": [None if failure is None else failure.pid],
        }
        error = None if failure is None else json.dumps(failure.error_file_data)
        metadata = self._metadata(state, group, restarts, more, worker.global_rank, str(worker.id), error)
        return self._status(state, EventSource.WORKER, {**metadata, "duration_ms": None})

    def _status(self, state: str, source: EventSource, metadata: dict[str, EventMetadataValue]) -> Event:
        return Event(f"torchelastic.worker.status.{state}", source, int(self._wall_clock()), metadata)

    def _size_and_program(self, group: GroupLike) -> dict[str, object]:
        return {"group_world_size": group.group_world_size, "entry_point": self._entry_point}

    def _metadata(
        self,
        state: str,
        group: GroupLike,
        restarts: int,
        more: Mapping[str, object],
        global_rank: int | None = None,
        worker_id: str | None = None,
        raw_error: str | None = None,
    ) -> dict[str, EventMetadataValue]:
        return {
            "run_id": self._run_id,
            "global_rank": global_rank,
            "group_rank": group.group_rank,
            "worker_id": worker_id,
            "role": self._role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": int(self._clock.monotonic() - self._began),
            "rdzv_backend": self._backend,
            "raw_error": raw_error,
            "metadata": json.dumps(more),
            "agent_restarts": restarts,
        }
