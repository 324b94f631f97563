"""Events and metrics of an agent's run, for an event log handler, a metrics handler, or the agent's pages. Imported
only if one of these is used.

    TorchEvents     events under torch's names, with the fields of contract section 5.9
    AgentEventLog   the agent's part in the job as typed events (`observe.telemetry.agent_events`)
    AgentEvents     decides what to record and when, mostly by observing the loop

Law: after each worker's START comes exactly one end before the next start: its own (FAILED, SUCCEEDED) or the agent's
(TERMINATED).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps

from rallypoint.agent.folder import Reached
from rallypoint.agent.policy import Phase, PolicyState
from rallypoint.agent.sources import guarded
from rallypoint.agent.spec import WorkerGroup, WorkerState, node_failure
from rallypoint.agent.steps import (
    Event,
    FailNode,
    RequestJoin,
    StartWorkers,
    Step,
    StopWorkers,
    WorkersStopped,
    WorkersSucceeded,
)
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import TYPE_CHECKING, Any, ParamSpec, Protocol
from rallypoint.control.membership.state import Fail
from rallypoint.control.protocol.messages import HangReport, JobEnded, OperatorAction, Placed, RoundEnded
from rallypoint.failures.cause import Cause
from rallypoint.failures.texts import first_line
from rallypoint.observe.telemetry import agent_events as events
from rallypoint.observe.telemetry.agent_events import Event as TorchEvent
from rallypoint.observe.telemetry.agent_events import EventMetadataValue, EventSource, NodePhase, PhaseClock
from rallypoint.observe.telemetry.handlers import (
    get_logging_handler,
    record,
    record_agent_event,
    takes_agent_events,
)
from rallypoint.observe.telemetry.lazy import metrics_wanted, put_metric_if_wanted, to_handlers

if TYPE_CHECKING:
    from rallypoint.agent.spec import RunResult, Worker
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.workers.timers import FileTimerRequest


class Workers(Protocol):
    """The part of a `WorkerController` that recording uses."""

    group: WorkerGroup
    began: float
    failures: Mapping[int, ProcessFailure]

    def succeeded(self) -> tuple[int, ...]:
        """Global ranks of the workers that succeeded before anything stopped them."""

    def remaining(self) -> int:
        """How many more failures the job would survive."""


P = ParamSpec("P")


def _never_raises(method: Callable[P, None]) -> Callable[P, None]:
    """Log a method's exceptions instead of raising them: recording must not disturb the job."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        guarded("recording events", method, *args, **kwargs)

    return call


class AgentEvents:
    """Records the run of one agent.

    Args:
        workers: the workers of its node.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._group = workers.group
        self._destination = workers.group.spec.event_log_handler
        self._torch = TorchEvents(workers.group, workers.began)
        self._log: AgentEventLog | None = None
        """Receives the typed events, if anybody wants them."""
        self._stop_began: float | None = None
        self._restart_began: float | None = None
        self._running = False
        """Whether a start of workers was recorded but not yet their end."""
        self._result = ""
        """The running workers' result as decided by the policy; empty if the agent stops them."""
        if self._destination != "null" and takes_agent_events(self._destination):
            self._log = AgentEventLog(self._group, self._destination, workers.began)

    def listen(self, take: Callable[[events.AgentEvent], None]) -> None:
        """Also pass the typed events to `take` from now on, on the agent's thread."""
        if self._log is None:
            self._log = AgentEventLog(self._group, "", self._workers.began)
        self._log.observers.append(take)

    # Observing the loop

    def observe(self, before: PolicyState, event: Event | None, after: PolicyState, steps: tuple[Step, ...]) -> None:
        """An `Observer` of the loop."""
        if self._log is not None:
            self._log.observe(before, event, after, steps)
        if isinstance(event, WorkersStopped):
            self.workers_ended()
        elif isinstance(event, WorkersSucceeded):
            self._result = WorkerState.SUCCEEDED.value
        for step in steps:
            match step:
                case Fail():
                    self._result = WorkerState.FAILED.value
                case StartWorkers():
                    self._result = ""
                case StopWorkers() if self._running and metrics_wanted():
                    self._stop_began = None if self._result == WorkerState.SUCCEEDED.value else time.monotonic()
                    self._restart_began = time.monotonic() if step.restarts else None
                case _:
                    pass

    @_never_raises
    def placed(self, assigning: float) -> None:
        """Record that the node got its place in a round; assigning the ranks took this many seconds."""
        began = self._group.join_requested_at
        _put_step("SimpleElasticAgent._rendezvous", began)
        self._record([self._torch.step_done("RENDEZVOUS", time.monotonic() - began)])
        self._record([self._torch.step_done("ASSIGN_WORKER_RANKS", assigning)])

    @_never_raises
    def workers_started(self) -> None:
        """Record that the workers were started."""
        began, self._restart_began = self._restart_began, None
        _put_step("SimpleElasticAgent._restart_workers", began)
        self._running = True
        if self._log is not None:
            self._log.started()
        self._record(self._torch.workers_started())

    @_never_raises
    def workers_ended(self) -> None:
        """Record that a round's workers are gone. Idempotent."""
        began, self._stop_began = self._stop_began, None
        _put_step("LocalElasticAgent._stop_workers", began)
        running, self._running = self._running, False
        if running:
            failures = self._workers.failures if self._result == WorkerState.FAILED.value else {}
            self._record(self._torch.workers_ended(self._result, failures, self._workers.succeeded()))

    @_never_raises
    def polled(self, state: WorkerState) -> None:
        """Record a poll of the workers."""
        put_worker_state(self._group.spec.role, state, self._workers.remaining())

    # Other events

    @_never_raises
    def progress(self, reached: Reached, from_file: bool) -> None:
        """Record the workers' progress."""
        if self._log is not None:
            self._log.progress(reached, from_file)

    @_never_raises
    def watched(self, name: str, timer: FileTimerRequest | None) -> None:
        """Record the watchdog's action `name`, on the worker of this timer if there is one."""
        self._record([self._torch.watchdog_event(name, timer)])

    @contextmanager
    def duration(self, state: str) -> Iterator[None]:
        """Record a state's event with the duration of the `with` block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._record([self._torch.step_done(state, time.monotonic() - began)])

    @_never_raises
    def run_ended(self, result: RunResult) -> None:
        """Record the result that the loop returned."""
        spec = self._group.spec
        put_run_result(spec.role, result.is_failed(), self._workers.remaining(), spec.max_restarts)

    def agent_ended(self, outcome: str, error: BaseException | None = None) -> None:
        """Record that the agent is about to exit (`AgentEnded`). Returns when the handler has written all events."""
        self._record([self.succeeded() if error is None or outcome == "left" else self.failed()])
        if self._log is not None:
            self._log.ended(outcome, "" if error is None else first_line(str(error)))
            get_logging_handler(self._destination).flush()

    def succeeded(self) -> TorchEvent:
        """The event for a run that returned."""
        return self._torch.agent_event("SUCCEEDED")

    def failed(self) -> TorchEvent:
        """The event for a run that ended with the exception being handled."""
        import traceback

        return self._torch.agent_event("FAILED", raw_error=traceback.format_exc())

    def _record(self, made: Iterable[TorchEvent]) -> None:
        """Record events. Never raises: logs the handler's exceptions."""
        if self._destination != "null":
            guarded("recording events", self._record_each, made)

    def _record_each(self, made: Iterable[TorchEvent]) -> None:
        for event in made:
            to_handlers("event", partial(record, event, self._destination))


def _put_step(name: str, began: float | None) -> None:
    """Record a step that is one method in torch but several events in our loop. None: the step never began."""
    if began is not None:
        put_metric_if_wanted(f"{name}.success", 1)
        put_metric_if_wanted(f"{name}.duration.ms", int((time.monotonic() - began) * 1000))


# Torch's events


class TorchEvents:
    """Creates the events of one run.

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

    def step_done(self, state: str, seconds: float) -> TorchEvent:
        """The event for a finished `state` (RENDEZVOUS, ASSIGN_WORKER_RANKS) that took this many seconds."""
        return self.agent_event(state, duration_ms=seconds * 1000)

    def workers_started(self) -> Iterator[TorchEvent]:
        """Events for the start of the workers."""
        return (self.worker_event("START", worker) for worker in self._group.workers)

    def workers_ended(
        self, state: str, failures: Mapping[int, ProcessFailure], succeeded: Collection[int] = ()
    ) -> Iterator[TorchEvent]:
        """Events for the end of one round's workers.

        Args:
            state: the group's state.
            failures: by global rank.
            succeeded: global ranks of workers that succeeded in a group that failed; the others were terminated.
        """
        for worker in self._group.workers:
            rank = worker.global_rank
            failure = failures.get(rank)
            well = state == "SUCCEEDED" or rank in succeeded
            own = "FAILED" if failure is not None else "SUCCEEDED" if well else "TERMINATED"
            yield self.worker_event(own, worker, failure)

    def watchdog_event(self, name: str, timer: FileTimerRequest | None) -> TorchEvent:
        """A watchdog event, with its timer if there is one."""
        more = {"watchdog_event": name}
        if timer is not None:
            more["worker_pid"] = str(timer.worker_pid)
            more["scope_id"] = timer.scope_id
            more["expiration_time"] = str(timer.expiration_time)
            more["signal"] = str(timer.signal)
        return TorchEvent(name, EventSource.AGENT, int(self._wall_clock()), self._metadata("RUNNING", more))

    def agent_event(self, state: str, *, duration_ms: float | None = None, raw_error: str | None = None) -> TorchEvent:
        """An event about the agent itself."""
        metadata = self._metadata(state, self._size_and_program(), raw_error=raw_error)
        return self._status(state, EventSource.AGENT, {**metadata, "duration_ms": duration_ms})

    def worker_event(self, state: str, worker: Worker, failure: ProcessFailure | None = None) -> TorchEvent:
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

    def _status(self, state: str, source: EventSource, metadata: dict[str, EventMetadataValue]) -> TorchEvent:
        return TorchEvent(f"torchelastic.worker.status.{state}", source, int(self._wall_clock()), metadata)

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


# Typed events


class AgentEventLog:
    """The typed events of one agent.

    Args:
        group: the agent's workers.
        destination: the name of the handler; empty for none.
        began: when the agent began, on `time.monotonic`.
    """

    def __init__(self, group: WorkerGroup, destination: str, began: float) -> None:
        self._group = group
        self._destination = destination
        self._began = began
        self.observers: list[Callable[[events.AgentEvent], None]] = []
        """Receivers of each event besides the handler."""
        self._clock: PhaseClock | None = None
        self._round = -1
        self._rejoins = False
        """Whether another round has been requested."""
        self._held_until = 0.0
        """When the next round may begin, on `time.monotonic`."""

    def observe(self, before: PolicyState, event: Event | None, _after: PolicyState, steps: tuple[Step, ...]) -> None:
        """An `Observer` of the loop."""
        if event is not None:
            self._heard(event)
        if isinstance(event, WorkersStopped):
            self._stopped()
        for step in steps:
            match step:
                case RequestJoin():
                    self._joins()
                case StartWorkers():
                    self._rejoins = False
                    self._enter(NodePhase.STARTING)
                case Fail(cause=cause):
                    self._failed(cause)
                case FailNode(text=text, ending=ending):
                    self._failed(node_failure(text, ending, exitcode=1))
                case StopWorkers() if before.phase is not Phase.CHECKING:  # in CHECKING, the check is being stopped
                    self._enter(NodePhase.STOPPING)
                case _:
                    pass

    def started(self) -> None:
        """Note that the workers are running."""
        pids = tuple(worker.id if isinstance(worker.id, int) else 0 for worker in self._group.workers)
        self._tell(events.WorkersStarted, pids=pids, survived=self._group.survived)
        self._enter(NodePhase.RUNNING)

    def progress(self, reached: Reached, from_file: bool) -> None:
        """Emit the workers' progress."""
        age = max(0.0, time.monotonic() - reached.at)
        source = "file" if from_file else "call"
        self._tell(events.ProgressMade, step=reached.step, age=age, source=source, first_step=reached.first)

    def ended(self, outcome: str, detail: str) -> None:
        """Emit the agent's exit. Waits a moment until it is written."""
        if self._clock is not None:
            now = time.monotonic()
            seconds = self._clock.seconds(now)
            self._tell(events.AgentEnded, elapsed=now - self._began, outcome=outcome, detail=detail, seconds=seconds)

    # Inside

    def _heard(self, event: Event) -> None:
        match event:
            case Placed(placement=placed):
                self._round = placed.round
                self._tell(
                    events.RoundStarted,
                    group_rank=placed.group_rank,
                    group_world_size=placed.group_world_size,
                    first_rank=placed.ranks.base_rank,
                    local_world_size=self._group.spec.local_world_size,
                    world_size=placed.ranks.world_size,
                    restarts=placed.restarts,
                    max_restarts=placed.max_restarts,
                    origin=placed.origin,
                )
            case RoundEnded(end=end):
                self._held_until = time.monotonic() + end.held_back
                self._tell(
                    events.RoundOver,
                    round=end.round,
                    reason=end.reason.name.lower(),
                    node=end.node,
                    detail=end.detail,
                    failure=None if end.cause is None else _failure(end.cause),
                    restarts=end.restarts.used,
                    max_restarts=end.restarts.allowed,
                    held_back=end.held_back,
                )
            case JobEnded(verdict=verdict):
                failure = None if verdict.cause is None else _failure(verdict.cause)
                self._tell(events.JobOver, outcome=verdict.outcome.value, detail=verdict.detail, failure=failure)
            case OperatorAction(by=by, text=text):
                self._tell(events.OperatorActed, by=by, text=text)
            case HangReport(report=report):
                self._tell(events.HangReported, report=report)
            case _:
                pass

    def _joins(self) -> None:
        """Note that this node requests a place in the next round; its previous workers may still have to be stopped."""
        self._rejoins = True
        if self._clock is None:
            spec = self._group.spec
            self._clock = PhaseClock(self._began)
            self._tell(
                events.AgentStarted,
                role=spec.role,
                program=spec.get_program_name(),
                backend=spec.rdzv_handler.get_backend(),
                local_world_size=spec.local_world_size,
                max_restarts=spec.max_restarts,
            )
            self._tell(events.PhaseBegan, phase=NodePhase.RENDEZVOUS)

    def _stopped(self) -> None:
        if self._clock is None or not self._rejoins:
            return
        left = self._held_until - time.monotonic()
        self._enter(NodePhase.HELD_BACK if left > 0 else NodePhase.RENDEZVOUS, max(0.0, left))

    def _failed(self, cause: Cause) -> None:
        self._tell(events.WorkerFailed, failure=_failure(cause))
        self._enter(NodePhase.STOPPING)

    def _enter(self, phase: NodePhase, held_back: float = 0.0) -> None:
        if self._clock is None or self._clock.phase is phase:
            return
        now = time.monotonic()
        self._clock.enter(phase, now, held_back)
        self._tell(events.PhaseBegan, elapsed=now - self._began, phase=phase, seconds=held_back)

    def _tell(self, kind: type[events.AgentEvent], **fields: Any) -> None:
        guarded("recording events", self._record, kind, fields)

    def _record(self, kind: type[events.AgentEvent], fields: dict[str, Any]) -> None:
        event = self._made(kind, fields)
        for observer in self.observers:
            observer(event)
        if self._destination:
            to_handlers("event", partial(record_agent_event, event, self._destination))

    def _made(self, kind: type[events.AgentEvent], more: dict[str, Any]) -> events.AgentEvent:
        common: dict[str, Any] = {
            "time": time.time(),
            "elapsed": time.monotonic() - self._began,
            "job": self._group.spec.rdzv_handler.get_run_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "round": self._round,
        }
        return kind(**common | more)


def _failure(cause: Cause) -> events.Failure:
    return events.Failure(
        rank=cause.rank,
        local_rank=cause.local_rank,
        host=cause.host,
        pid=cause.pid,
        exit_code=cause.exitcode,
        message=first_line(cause.message),
    )


# The metrics of an agent's run


def put_worker_state(role: str, state: str, remaining_restarts: int) -> None:
    """Put the state of the polled worker group, and how many more failures the job can survive."""
    put_metric_if_wanted(f"workers.{role}.remaining_restarts", remaining_restarts)
    put_metric_if_wanted(f"workers.{role}.{state.lower()}", 1)


def put_run_result(role: str, failed: bool, remaining_restarts: int, max_restarts: int) -> None:
    """Put whether the run failed, and how many of its restarts remained."""
    retried = remaining_restarts < max_restarts
    put_metric_if_wanted(f"workers.{role}.flakiness", flakiness(failed, remaining_restarts, max_restarts))
    put_metric_if_wanted(f"workers.{role}.run_total", 1)
    for outcome, holds in (("success", not failed), ("failed", failed)):
        put_metric_if_wanted(f"workers.{role}.run_{outcome}_with_retries", int(holds and retried))
        put_metric_if_wanted(f"workers.{role}.run_{outcome}_no_retries", int(holds and not retried))


def flakiness(failed: bool, remaining_restarts: int, max_restarts: int) -> int:
    """Percentage of its restarts that a job used: 0 without any, 100 if it failed."""
    return 100 if failed else int(100 - 100 * (remaining_restarts + 1) / (max_restarts + 1))
