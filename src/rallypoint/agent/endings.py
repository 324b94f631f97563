"""The ends of a run other than success: imported at the end, when no worker waits for it."""

from __future__ import annotations

import os
from signal import Signals

from rallypoint.agent.controller import WorkerController
from rallypoint.agent.spec import RunResult, WorkerState
from rallypoint.agent.steps import EndBySignal, EndUnfit, EndWithError
from rallypoint.base.errors import NodeLeftInOrder, PreflightError, SignalException
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name
from rallypoint.membership.state import Outcome, Verdict
from rallypoint.protocol.errors import RendezvousClosedError, error_of

log = get_logger(__name__)


def result_of(verdict: Verdict, last: RunResult, workers: WorkerController, *, reported_elsewhere: bool) -> RunResult:
    """The result of a run whose job has failed.

    Raises:
        RendezvousClosedError: it has not failed, but was ended on request.
    """
    if verdict.outcome is not Outcome.FAILED:
        request = verdict.detail or "the job was ended on request"
        raise RendezvousClosedError(f"{request} before its workers had finished", ending=verdict.ending)
    group = workers.group
    if verdict.detail:
        log.error("[%s] The job ends with restarts left: %s", group.spec.role, verdict.detail)
    group.state = WorkerState.FAILED
    return RunResult(
        WorkerState.FAILED,
        failures=last.failures,
        cause=verdict.cause,
        stopped=workers.stopped(),
        restarts=verdict.restarts,
        reported_elsewhere=reported_elsewhere,
        ending=verdict.ending,
    )


def ending_error(step: EndWithError | EndUnfit | EndBySignal) -> BaseException:
    """The exception with which an agent ends that has no result."""
    match step:
        case EndWithError(notification):
            error = error_of(notification)
            assert error is not None
            return error
        case EndUnfit(failure):
            return PreflightError(failure)
    return _signal_error(step)


def _signal_error(step: EndBySignal) -> Exception:
    name = signal_name(step.signal)
    if step.standing:
        left = f"this node has left the job after {name}; the job {step.standing}"
        return NodeLeftInOrder(left, Signals(step.signal))
    return SignalException(f"Process {os.getpid()} got signal {name}", Signals(step.signal), saved=step.saved)
