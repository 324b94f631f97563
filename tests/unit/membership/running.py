"""Jobs in the pure core, and operations run as far as possible."""

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
    """Run an operation until it waits, ends or is refused."""
    while isinstance(after := step(operation, state, node, _VIEW, job), State):
        state = after
    return state


def joined(nodes: Sequence[NodeId], job: Settings) -> State:
    """The state after these nodes joined one after another."""
    state = State()
    for node in nodes:
        state = done(state, node, Join(INFO), job)
    return state


def running(nodes: Sequence[NodeId], job: Settings) -> State:
    """The state of a round of these nodes."""
    state = joined(nodes, job)
    assert state.complete
    return state
