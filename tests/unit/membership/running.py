"""A job at the pure core: a round that runs, and operations that are done as far as they can be now."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.control.membership.rules import ClockView, step
from rallypoint.control.membership.state import Join, NodeId, NodeInfo, Operation, Settings, State
from rallypoint.failures.cause import Cause

SEVEN = tuple(NodeId(name, 1, 0, name) for name in "abcdefg")
INFO = NodeInfo("default", 1, "host", 7000)
CAUSE = Cause(0, 0, "host", 42, 1, "no", "", 0.0, "")
_VIEW = ClockView(10.0, last_call_at=0.0)


def done(state: State, node: NodeId, operation: Operation, job: Settings) -> State:
    """The state after as much of an operation as can be done now."""
    while isinstance(after := step(operation, state, node, _VIEW, job), State):
        state = after
    return state


def joined(nodes: Sequence[NodeId], job: Settings) -> State:
    """The state when these have joined, one after another."""
    state = State()
    for node in nodes:
        state = done(state, node, Join(INFO), job)
    return state
