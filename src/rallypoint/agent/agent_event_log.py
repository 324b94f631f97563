"""Records an agent's part in the job as typed events, if a handler takes these (`observe.telemetry.agent_events`)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from rallypoint.agent.policy import Phase, PolicyState
from rallypoint.agent.progress import Reached
from rallypoint.agent.spec import WorkerGroup, node_failure
from rallypoint.agent.steps import Event, FailHung, RequestJoin, StartWorkers, Step, StopWorkers, WorkersStopped
from rallypoint.base.light_typing import Any
from rallypoint.control.membership.state import Fail
from rallypoint.control.protocol.messages import HangReport, JobEnded, OperatorAction, Placed, RoundEnded
from rallypoint.failures.cause import Cause, Ending
from rallypoint.failures.texts import first_line
from rallypoint.observe.telemetry import agent_events as events
from rallypoint.observe.telemetry.agent_events import NodePhase, PhaseClock
from rallypoint.observe.telemetry.handlers import record_agent_event
from rallypoint.observe.telemetry.lazy import logging_errors


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
        """Further receivers of each event, besides the handler."""
        self._clock: PhaseClock | None = None
        self._round = -1
        self._rejoins = False
        """Whether another round has been requested."""
        self._held_until = 0.0
        """Until when the next round is held back, on `time.monotonic`."""

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
                case FailHung(text=text):
                    self._failed(node_failure(text, Ending.HANG, exitcode=1))
                case StopWorkers() if before.phase is not Phase.CHECKING:  # then it is the check that is stopped
                    self._enter(NodePhase.STOPPING)
                case _:
                    pass

    def started(self) -> None:
        """The workers run."""
        pids = tuple(each.id if isinstance(each.id, int) else 0 for each in self._group.workers)
        self._tell(events.WorkersStarted, pids=pids, survived=self._group.survived)
        self._enter(NodePhase.RUNNING)

    def progress(self, reached: Reached, from_file: bool) -> None:
        """The workers have made progress."""
        age = max(0.0, time.monotonic() - reached.at)
        source = "file" if from_file else "call"
        self._tell(events.ProgressMade, step=reached.step, age=age, source=source, first_step=reached.first)

    def ended(self, outcome: str, detail: str) -> None:
        """The agent is about to exit. Waits a moment until that is written."""
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
        """A place in the next round is requested; the workers of the previous one may still have to be stopped."""
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
        logging_errors("events", lambda: self._record(self._made(kind, fields)))

    def _record(self, event: events.AgentEvent) -> None:
        for observer in self.observers:
            observer(event)
        if self._destination:
            record_agent_event(event, self._destination)

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
