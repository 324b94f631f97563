"""Runs an operation through the core; the same for the coordinator and for a shared-state link.

Pure: reading, timing and writing the state are passed in.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.base.light_typing import NamedTuple
from rallypoint.coordinator.notifications import abandoned_progress, progress
from rallypoint.failures.cause import Ending
from rallypoint.membership.decisions import ClockView, next_action
from rallypoint.membership.operations import FINAL_ACTIONS, ActionKind, Join, Operation
from rallypoint.membership.state import NodeId, Outcome, Settings, State, name_of
from rallypoint.membership.transitions import apply
from rallypoint.protocol.messages import JobEnded, JoinRefused, Refusal

_REFUSALS = {
    ActionKind.ERROR_CLOSED: Refusal.CLOSED,
    ActionKind.ERROR_TIMEOUT: Refusal.TIMEOUT,
    ActionKind.ERROR_RANK_TAKEN: Refusal.RANK_TAKEN,
    ActionKind.GRACEFUL_EXIT: Refusal.SPARE_NOT_NEEDED,
}
"""The refusals for operations that end in an error."""


class OperationResult(NamedTuple):
    """The result of an operation: the action that ended it, or None if it has to wait; the operation as it waits"""

    final_action: ActionKind | None
    operation: Operation


def run_operation(
    operation: Operation,
    node: NodeId,
    settings: Settings,
    read: Callable[[], State],
    view: Callable[[], ClockView],
    write: Callable[[State], None],
) -> OperationResult:
    """Step the operation until it ends or has to wait.

    Args:
        operation: the operation that `node` requests.
        node: the node that requests it.
        settings: the settings of the job.
        read: returns the known state.
        view: returns the observer's clock view at this moment.
        write: offers a new state. The next decision is based on the state known afterwards, ours or not.
    """
    while True:
        seen = view()
        action = next_action(operation, read(), node, seen, settings)
        if action.kind is ActionKind.SYNC:
            return OperationResult(None, operation)
        if action.kind in FINAL_ACTIONS:
            return OperationResult(action.kind, operation)
        if action.kind is ActionKind.REMOVE_FROM_REDUNDANCY_LIST and isinstance(operation, Join):
            # A spare that gets its chance has the whole join timeout before it again (contract 4.6).
            operation = operation._replace(deadline=seen.now + settings.join_timeout)
        write(apply(action, read(), node, settings))


def join_refusal(
    ran: OperationResult, node: NodeId, before: State, after: State, settings: Settings, view: ClockView
) -> JoinRefused | JobEnded | None:
    """The notification for a node whose join has ended; None if it has its place.

    It reports the progress in `before`, the state before the last steps, when the node still counted itself.
    """
    kind = _REFUSALS.get(ran.final_action) if ran.final_action is not None else None
    if kind is None:
        return None
    if kind is Refusal.RANK_TAKEN and isinstance(ran.operation, Join):
        return JoinRefused(kind, f"rank {ran.operation.node_info.rank_hint}")
    if after.verdict is not None and after.verdict.ending is Ending.PREEMPTED:
        return JobEnded(after.verdict)
    if after.closed or not isinstance(ran.operation, Join):
        return JoinRefused(kind, _end_of_job(after))
    own = name_of(before, node)
    if ran.operation.since != after.abandoned.number:
        how_far = abandoned_progress(after, settings, view, reports=own == after.abandoned.given_up_by)
    else:
        waited = view.now - ran.operation.asked_at
        how_far = progress(before, node, settings, view)._replace(gave_up_by=own, waited=waited)
    return JoinRefused(kind, "", how_far)


def _end_of_job(state: State) -> str:
    verdict = state.verdict
    if verdict is None:
        return "it was closed"
    if verdict.outcome is Outcome.FAILED and verdict.cause is not None:
        cause = verdict.cause
        return f"it has failed: {cause.headline}"
    return f"it has {verdict.outcome.value}"
