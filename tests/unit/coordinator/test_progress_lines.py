"""Of many waiting nodes, one informs people, and all know the deadline that counts."""

from __future__ import annotations

import pytest

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, NodeInfo, Settings
from rallypoint.control.protocol.messages import JoinRequest, Progress, ProgressRequest

MEMBER = NodeInfo("default", 1, "", 7000)


def waiting(settings: Settings, nodes: int, *, near: int = 0, timeout: float = 600.0) -> Coordinator:
    """So many nodes have joined, one after another, each a second later; sessions count from 1."""
    coordinator = Coordinator(settings)
    for session in range(1, nodes + 1):
        node = NodeId("10.0.0.1", session, 0, f"n{session}")
        coordinator.open(session, SessionRecord(node, node.addr, leased=False, in_this_process=session == near), 0.0)
        coordinator.receive(session, JoinRequest(MEMBER, timeout), float(session))
    return coordinator


def told(coordinator: Coordinator, session: int, now: float) -> Progress:
    (progress,) = [
        each for _, each in coordinator.receive(session, ProgressRequest(), now).messages if isinstance(each, Progress)
    ]
    return progress


@pytest.mark.parametrize(("near", "teller"), [(0, 1), (3, 3)])
def test_the_node_that_lives_with_the_coordinator_tells_or_the_first(near: int, teller: int) -> None:
    coordinator = waiting(Settings("job", 5, 5), 4, near=near)
    assert [session for session in range(1, 5) if told(coordinator, session, 10.0).reports] == [teller]


def test_those_who_wait_for_something_else_have_a_teller_of_their_own() -> None:
    coordinator = waiting(Settings("job", 1, 2, last_call_timeout=0.0), 6, near=1)
    assert (
        coordinator.state.complete
    )  # with the first alone; the second waits for the next round, the others are spares
    found = {session: told(coordinator, session, 8.0) for session in range(2, 7)}
    assert [session for session, each in found.items() if each.spare] == [3, 4, 5, 6]
    assert [session for session, each in found.items() if each.reports] == [2, 3]
