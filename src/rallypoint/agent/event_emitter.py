"""The events and metrics of an agent's run; nothing is created, or even imported, unless a receiver is configured."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from rallypoint.agent.spec import RunResult, WorkerGroup, WorkerState
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.observe.telemetry.lazy import logging_errors, metrics_wanted, put_metric_if_wanted

if TYPE_CHECKING:
    from rallypoint.agent.agent_event_log import AgentEventLog
    from rallypoint.agent.progress import Reached
    from rallypoint.agent.torch_events import TorchEvents
    from rallypoint.observe.telemetry.agent_events import AgentEvent, Event
    from rallypoint.workers.timers import FileTimerRequest


class EventEmitter:
    """The events and metrics of one agent, whose workers are `group`."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.began = time.monotonic()
        self._torch: TorchEvents | None = None
        self._stop_began: float | None = None
        self._restart_began: float | None = None
        self._running = False
        """Whether the start of workers was recorded, and their end was not."""
        self.log: AgentEventLog | None = None
        """Takes the typed events, if the handler wants them."""
        if self._wanted:
            from rallypoint.observe.telemetry.handlers import takes_agent_events

            if takes_agent_events(group.spec.event_log_handler):
                from rallypoint.agent.agent_event_log import AgentEventLog

                self.log = AgentEventLog(group, group.spec.event_log_handler, self.began)

    def observe(self, take: Callable[[AgentEvent], None]) -> None:
        """Pass the typed events to `take` too, from now on; on the agent's thread."""
        if self.log is None:
            from rallypoint.agent.agent_event_log import AgentEventLog

            self.log = AgentEventLog(self._group, "", self.began)
        self.log.observers.append(take)

    def succeeded(self) -> Event:
        """Record that this agent's run has returned."""
        return self._torch_events().agent_event("SUCCEEDED")

    def failed(self) -> Event:
        """Record that the exception which is being handled has ended this agent's run."""
        import traceback

        error = traceback.format_exc()
        return self._torch_events().agent_event("FAILED", raw_error=error)

    def progress(self, reached: Reached, from_file: bool) -> None:
        """The workers have made progress."""
        if self.log is not None:
            self.log.progress(reached, from_file)

    def agent_ended(self, outcome: str, error: BaseException | None = None) -> None:
        """The agent is about to exit, as `AgentEnded` says. Returns when the handler has written what it was given."""
        if self.log is not None:
            from rallypoint.failures.texts import first_line
            from rallypoint.observe.telemetry.handlers import get_logging_handler

            self.log.ended(outcome, "" if error is None else first_line(str(error)))
            get_logging_handler(self._group.spec.event_log_handler).flush()

    def record(self, make: Callable[[], Event]) -> None:
        """Record an event."""
        if self._wanted:
            self._record([make()])

    def step_done(self, state: str, began: float) -> None:
        """Record that the step which `state` names is done; it began at this `time.monotonic`."""
        if self._wanted:
            self._record([self._torch_events().step_done(state, time.monotonic() - began)])

    @contextmanager
    def duration(self, state: str) -> Iterator[None]:
        """Record the event of a state with the duration of the `with` block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.step_done(state, began)

    def round_complete(self) -> None:
        """The round is complete."""
        began = self._group.join_requested_at
        _put_step("SimpleElasticAgent._rendezvous", began)
        self.step_done("RENDEZVOUS", began)

    def workers_stopping(self) -> None:
        """The workers are being stopped, though they have not all succeeded."""
        if metrics_wanted() and self._group.state != WorkerState.SUCCEEDED:
            self._stop_began = time.monotonic()

    def workers_restarting(self) -> None:
        """The workers are being stopped, in order to be restarted."""
        if metrics_wanted():
            self._restart_began = time.monotonic()

    def workers_started(self) -> None:
        """The workers have been started."""
        began, self._restart_began = self._restart_began, None
        _put_step("SimpleElasticAgent._restart_workers", began)
        self._running = True
        if self.log is not None:
            self.log.started()
        if self._wanted:
            self._record(self._torch_events().workers_started())

    def workers_ended(self, result: RunResult | None, succeeded: Collection[int] = ()) -> None:
        """The workers of a round are gone. Idempotent.

        Args:
            result: the result that was found; None if they ran until the agent stopped them.
            succeeded: global ranks that had succeeded, in a group that has not.
        """
        began, self._stop_began = self._stop_began, None
        _put_step("LocalElasticAgent._stop_workers", began)
        running, self._running = self._running, False
        if running and self._wanted:
            state, failures = ("", {}) if result is None else (result.state.value, result.failures)
            self._record(self._torch_events().workers_ended(state, failures, succeeded))

    def watched(self, name: str, timer: FileTimerRequest | None) -> None:
        """Record what the watchdog has done, as `name` says, to the worker of this timer if there is one."""
        if self._wanted:
            self._record([self._torch_events().watchdog_event(name, timer)])

    def workers_polled(self, result: RunResult, remaining_restarts: int) -> None:
        """The workers have been polled, and the job would survive this many further failures."""
        if metrics_wanted():
            from rallypoint.agent.torch_events import put_worker_state

            put_worker_state(self._group.spec.role, result.state, remaining_restarts)

    def run_ended(self, result: RunResult, remaining_restarts: int) -> None:
        """The run is over, and the job would have survived this many further failures."""
        spec = self._group.spec
        if metrics_wanted():
            from rallypoint.agent.torch_events import put_run_result

            put_run_result(spec.role, result.is_failed(), remaining_restarts, spec.max_restarts)
        self.workers_ended(result)

    @property
    def _wanted(self) -> bool:
        return self._group.spec.event_log_handler != "null"

    def _torch_events(self) -> TorchEvents:
        if self._torch is None:
            from rallypoint.agent.torch_events import TorchEvents

            self._torch = TorchEvents(self._group, self.began)
        return self._torch

    def _record(self, made: Iterable[Event]) -> None:
        """Record events. Never raises: an exception of a handler is logged."""
        from rallypoint.observe.telemetry.handlers import record

        destination = self._group.spec.event_log_handler
        for event in made:
            logging_errors("events", partial(record, event, destination))


def _put_step(name: str, began: float | None) -> None:
    """Record a step that torch takes in one method, and our loop in several events. None: it never began."""
    if began is not None:
        put_metric_if_wanted(f"{name}.success", 1)
        put_metric_if_wanted(f"{name}.duration.ms", int((time.monotonic() - began) * 1000))
