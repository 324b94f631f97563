"""Decides what an agent does about events once its end is decided. Pure; see `policy`."""

from __future__ import annotations

from collections.abc import Callable
from signal import SIGTERM

from rallypoint.agent import steps
from rallypoint.agent.policy_state import INTERRUPTS, Decision, Phase, PolicyState, take_final_step
from rallypoint.agent.signal_set import FORWARDED_SIGNALS
from rallypoint.membership.state import Outcome
from rallypoint.protocol.messages import LeaveReply, LinkDown, LinkLost


def _on_final_stop(status: PolicyState, event: steps.WorkersStopped) -> Decision:
    assert status.final_step is not None, "an agent that ends knows how"
    if event.waiting:  # the stop was done when the end was decided
        number = status.final_step.signal if isinstance(status.final_step, steps.EndBySignal) else SIGTERM
        return status._replace(stopping=number), (steps.StopWorkers(number, failed=True),)
    return take_final_step(status, status.final_step, in_order=event.ended_in_order)


def _on_left(status: PolicyState, event: LeaveReply) -> Decision:
    assert isinstance(status.final_step, steps.EndBySignal), "only who leaves queries that"
    if event.goes_on:
        more = f"goes on on {event.others} other node{'s' if event.others > 1 else ''}"
        return status._replace(final_step=status.final_step._replace(standing=more)), ()
    succeeded = "has succeeded" if event.outcome is Outcome.SUCCEEDED else ""
    return status._replace(phase=Phase.ENDED), (status.final_step._replace(standing=succeeded),)


def _on_leave_timed_out(status: PolicyState, _event: steps.LeaveTimedOut) -> Decision:
    assert status.final_step is not None, "an agent that leaves knows how"
    return status._replace(phase=Phase.ENDED), (status.final_step,)


def _leave_without_answer(status: PolicyState, _event: steps.Event) -> Decision:
    """Leave without knowing the state of the job: it cannot be known any more, or is not waited for."""
    assert isinstance(status.final_step, steps.EndBySignal), "only who leaves queries that"
    return status._replace(phase=Phase.ENDED), (status.final_step._replace(standing=""),)


def _on_signal_when_ending(status: PolicyState, event: steps.SignalArrived) -> Decision:
    if event.number in FORWARDED_SIGNALS:
        return status, (steps.ForwardSignal(event.number),)
    if event.number not in INTERRUPTS:
        return status, ()
    if status.interrupted:
        return status, (steps.KillWorkers(),)
    return status._replace(interrupted=True), (
        steps.LogLine("the workers are being stopped; once more kills them", warning=True),
    )


def _on_signal_when_leaving(status: PolicyState, event: steps.SignalArrived) -> Decision:
    return (status, ()) if event.number in FORWARDED_SIGNALS | {SIGTERM} else _leave_without_answer(status, event)


_RULES_WHEN_ENDING: dict[type, Callable[..., Decision]] = {
    steps.WorkersStopped: _on_final_stop,
    steps.SignalArrived: _on_signal_when_ending,
}
"""While the workers are stopped."""

_RULES_WHEN_LEAVING: dict[type, Callable[..., Decision]] = {
    LeaveReply: _on_left,
    steps.LeaveTimedOut: _on_leave_timed_out,
    steps.SignalArrived: _on_signal_when_leaving,
    LinkDown: _leave_without_answer,
    LinkLost: _leave_without_answer,
}
"""When only the query for the state of the job is left."""

RULES_BY_PHASE = {Phase.ENDING: _RULES_WHEN_ENDING, Phase.LEAVING: _RULES_WHEN_LEAVING}
