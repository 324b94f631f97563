"""Which nodes are silent in a shared state, as one observer sees it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.membership.observer import StateObserver
from rallypoint.control.membership.state import NodeId, Reason, RemovedNode, Settings, State

SETTINGS = Settings("job", 1, 2, keep_alive_interval=5.0, keep_alive_max_attempt=3, counts_heartbeats=True)
ONE, OTHER = NodeId("a", 1, 0), NodeId("b", 1, 0)


def look(observer: StateObserver, now: float, one: int, other: int) -> None:
    observer.observe(State(heartbeats={ONE: one, OTHER: other}), now)


@given(st.floats(0.0, 5.0), st.floats(0.0, 600.0), st.floats(0.0, 5.0))
def test_time_in_which_nothing_could_be_seen_is_held_against_nobody(before: float, away: float, after: float) -> None:
    """Who sends a heartbeat every five seconds while the state can be reached is not found, however long the gap."""
    observer = StateObserver(SETTINGS)
    now = 0.0
    for seconds in (0.0, before):
        now += seconds
        look(observer, now, 0, 0)
    now += away
    look(observer, now, 0, 0)
    assert observer.silent(now) == []
    until = now + after
    while now < until:
        now = min(until, now + 1.0)
        look(observer, now, 0, 0)
    assert observer.silent(now) == []
    look(observer, now, 1, 1)


def test_who_is_silent_while_others_are_seen_is_found() -> None:
    observer = StateObserver(SETTINGS)
    for second in range(15):
        look(observer, float(second), second, 0)
        assert observer.silent(float(second)) == []
    look(observer, 15.0, 15, 0)
    assert observer.silent(15.0) == [OTHER]


def test_what_is_learned_later_of_a_node_that_has_left_does_not_change_when_it_left() -> None:
    observer, gone = StateObserver(SETTINGS), RemovedNode(ONE, "a", Reason.DEPARTED)
    observer.observe(State(removed=(gone,)), 1.0)
    observer.observe(State(removed=(gone._replace(ended_with_0=True),)), 9.0)
    assert observer.clock_view(9.0).removed_at == (1.0,)
