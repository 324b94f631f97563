"""Decides when the workers of a round count as hung. Pure.

Each node times its own workers, on its own clock, and reports when it becomes quiet and when it is no longer.

Laws:

1. A round hangs while all its participants are quiet: one node that is not, or that reports nothing, means no hang.
2. The quiet nodes are known for the running round only, and dropped with it.
3. A node whose workers have succeeded is timed like any other, from their end: it hides no hang of the others.
4. A preempted job does not hang: the time to save ends it anyway, and meanwhile the others may wait for a lost node.
"""

from __future__ import annotations

from rallypoint.membership.operations import FINISH, Action, ActionKind, ReportQuiet
from rallypoint.membership.state import NodeId, State


def report_quiet(operation: ReportQuiet, state: State, node: NodeId) -> Action:
    """The next step of a node that reports whether it is quiet."""
    if not state.runs(node, operation.round) or (node in state.quiet) == operation.quiet:
        return FINISH
    return Action(ActionKind.MARK_QUIET)


def is_hung(state: State) -> bool:
    """Whether all ranks of all nodes of the running round are quiet."""
    if not state.complete or state.closed or state.is_preempted or not 0 < len(state.participants) <= len(state.quiet):
        return False
    return state.quiet.issuperset(state.participants)


def hang_began(before: State, after: State) -> bool:
    """Whether the round of `after` hangs, and did not before."""
    return is_hung(after) and not (after.round == before.round and is_hung(before))
