"""How an executor takes an operation through the core, the same for both executors.

Pure: reading, timing and writing the state are handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rallypoint.rendezvous.core import Sight, next_action
from rallypoint.rendezvous.effects import apply
from rallypoint.rendezvous.messages import JoinRefused, Refusal
from rallypoint.rendezvous.operations import ENDINGS, Act, Join, Operation
from rallypoint.rendezvous.placement import given_up, progress
from rallypoint.rendezvous.state import NodeId, Outcome, Settings, State, name_of

_REFUSALS = {
    Act.ERROR_CLOSED: Refusal.CLOSED,
    Act.ERROR_TIMEOUT: Refusal.TIMEOUT,
    Act.ERROR_RANK_TAKEN: Refusal.RANK_TAKEN,
    Act.GRACEFUL_EXIT: Refusal.SPARE_NOT_NEEDED,
}
"""How an operation that ends in an error is refused."""


class Ran(NamedTuple):
    """How far an operation came: the act that ended it, or None if it has to wait; and the operation as it waits on."""

    ended: Act | None
    operation: Operation


def run(
    operation: Operation,
    node: NodeId,
    settings: Settings,
    read: Callable[[], State],
    sight: Callable[[], Sight],
    write: Callable[[State], None],
) -> Ran:
    """Step the operation until it ends or has to wait.

    Args:
        operation: what `node` wants.
        node: who wants it.
        settings: of the job.
        read: the state as known.
        sight: the observer's sight at this moment.
        write: offers a new state. Whatever is known afterwards is decided on next, be it ours or not.
    """
    while True:
        seen = sight()
        action = next_action(operation, read(), node, seen, settings)
        if action.act is Act.SYNC:
            return Ran(None, operation)
        if action.act in ENDINGS:
            return Ran(action.act, operation)
        if action.act is Act.REMOVE_FROM_REDUNDANCY_LIST and isinstance(operation, Join):
            # A spare that gets its chance has the whole join timeout before it again (contract 4.6).
            operation = operation._replace(deadline=seen.now + settings.join_timeout)
        write(apply(action, read(), node, settings))


def refusal(
    ran: Ran, node: NodeId, before: State, after: State, settings: Settings, sight: Sight
) -> JoinRefused | None:
    """What to tell a node whose join has ended; None if it has its place.

    How far things were is told as of `before` the last steps, when the node still counted itself.
    """
    kind = _REFUSALS.get(ran.ended) if ran.ended is not None else None
    if kind is None:
        return None
    if kind is Refusal.RANK_TAKEN and isinstance(ran.operation, Join):
        return JoinRefused(kind, f"rank {ran.operation.member.rank_hint}")
    if after.closed or not isinstance(ran.operation, Join):
        return JoinRefused(kind, _end_of_job(after))
    own = name_of(before, node)
    if ran.operation.since != after.abandoned.number:
        how_far = given_up(after, settings, sight, tells=own == after.abandoned.by)
    else:
        waited = sight.now - ran.operation.asked_at
        how_far = progress(before, node, settings, sight)._replace(gave_up=own, waited=waited)
    return JoinRefused(kind, "", how_far)


def _end_of_job(state: State) -> str:
    verdict = state.verdict
    if verdict is None:
        return "it was closed"
    if verdict.outcome is Outcome.FAILED and verdict.cause is not None:
        cause = verdict.cause
        return f"it has failed: {cause.headline}"
    return f"it has {verdict.outcome.value}"
