"""When the workers of a round are taken to hang. Pure.

Each node times its own workers, on its own clock, and says when it has become quiet and when it is not any more.

Laws:

1. A round hangs while all its participants are quiet: one node that is not, or that says nothing, means no hang.
2. Who is quiet is known of the round that runs only, and forgotten with it.
3. A node whose workers have succeeded is timed like any other, from their end: it hides no hang of the others.
"""

from __future__ import annotations

from rallypoint.membership.operations import FINISH, Action, ActionKind, ReportQuiet
from rallypoint.membership.state import NodeId, State


def report_quiet(operation: ReportQuiet, state: State, node: NodeId) -> Action:
    """The next step of a node that says whether it is quiet."""
    if not state.runs(node, operation.round) or (node in state.quiet) == operation.quiet:
        return FINISH
    return Action(ActionKind.MARK_QUIET)


def is_hung(state: State) -> bool:
    """Whether all ranks of all nodes of the round that runs are quiet."""
    if not state.complete or state.closed or not 0 < len(state.participants) <= len(state.quiet):
        return False
    return state.quiet.issuperset(state.participants)


def hang_began(before: State, after: State) -> bool:
    """Whether the round of `after` hangs, and did not before."""
    return is_hung(after) and not (after.round == before.round and is_hung(before))
