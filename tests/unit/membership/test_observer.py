"""Silent nodes of a shared state, as one observer sees them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.membership.observer import StateObserver
from rallypoint.control.membership.state import NodeId, Settings, State

SETTINGS = Settings("job", 1, 2, keep_alive_interval=5.0, keep_alive_max_attempt=3, counts_heartbeats=True)
ONE, OTHER = NodeId("a", 1, 0), NodeId("b", 1, 0)


def look(observer: StateObserver, now: float, one: int, other: int) -> None:
    observer.observe(State(heartbeats={ONE: one, OTHER: other}), now)


@given(st.floats(0.0, 5.0), st.floats(0.0, 600.0), st.floats(0.0, 5.0))
def test_time_without_access_is_not_silence(before: float, away: float, after: float) -> None:
    """A node with a heartbeat every five seconds is not silent, however long the state was out of reach."""
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


def test_a_silent_node_is_found() -> None:
    observer = StateObserver(SETTINGS)
    for second in range(15):
        look(observer, float(second), second, 0)
        assert observer.silent(float(second)) == []
    look(observer, 15.0, 15, 0)
    assert observer.silent(15.0) == [OTHER]
