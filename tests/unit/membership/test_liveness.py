"""Silent sessions, as one observer with one clock sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.coordinator.sessions import Liveness, SilentSessions

LEASE, TIMEOUT = 3.0, 14.0


def watched(*sessions: int, local: tuple[int, ...] = ()) -> Liveness:
    liveness = Liveness(LEASE, TIMEOUT)
    for session in sessions:
        liveness.add_session(session, 0.0, leased=True, local=False)
    for session in local:
        liveness.add_session(session, 0.0, leased=False, local=True)
    return liveness


def awake(
    liveness: Liveness, start: float, until: float, heartbeats: tuple[int, ...] = ()
) -> tuple[float, SilentSessions]:
    """Check when due, while these sessions send heartbeats, until a session is silent or the time is up."""
    now, heartbeat_at = start, start
    while now < until:
        now = max(now, min(liveness.check_at(), heartbeat_at))
        if now == heartbeat_at:
            heartbeat_at += LEASE / 3
            for session in heartbeats:
                liveness.note_message(session, now)
        found = liveness.check(now)
        if found != SilentSessions():
            return now, found
    return now, SilentSessions()


@pytest.mark.parametrize(
    ("sessions", "local", "heartbeats", "found", "at"),
    [
        ((1, 2), (), (1,), SilentSessions(lost=(2,)), LEASE),
        ((1, 2), (), (1, 2), SilentSessions(), 60.0),
        ((1,), (), (), SilentSessions(lost=(1,)), LEASE),
        ((1, 2, 3), (), (), SilentSessions(out_of_reach=(1, 2, 3)), TIMEOUT),
        ((1, 2), (3,), (), SilentSessions(lost=(1, 2)), LEASE),
    ],
    ids=["one of two", "none", "one of one", "all: we are cut off", "all, beside a local node"],
)
def test_silent_nodes_are_found(
    sessions: tuple[int, ...], local: tuple[int, ...], heartbeats: tuple[int, ...], found: SilentSessions, at: float
) -> None:
    found_at, silent = awake(watched(*sessions, local=local), 0.0, 60.0, heartbeats)
    assert silent == found
    assert at <= found_at <= at + LEASE / 4


def test_a_cut_of_the_network_is_not_held_against_late_nodes() -> None:
    liveness = watched(1, 2)
    awake(liveness, 0.0, 10.0)
    liveness.note_message(1, 10.0)
    at, found = awake(liveness, 10.0, 20.0, heartbeats=(1,))
    assert found == SilentSessions(lost=(2,))
    assert at >= 10.0 + LEASE / 2, "the cut does not count"


@given(st.floats(0.0, 1_000.0), st.floats(0.0, LEASE / 3))
def test_our_own_sleep_is_not_silence(asleep: float, heard: float) -> None:
    """Messages received during the sleep are read soon after it."""
    liveness = watched(1, 2)
    liveness.check(0.0)
    liveness.note_message(1, heard)
    liveness.note_message(2, heard)
    woken = max(liveness.check_at(), heard) + asleep
    assert liveness.check(woken) == SilentSessions()
    liveness.note_message(1, woken)
    liveness.note_message(2, woken)
    assert awake(liveness, woken, woken + 10.0, heartbeats=(1, 2))[1] == SilentSessions()


def test_our_sleeps_in_a_row_are_not_silence() -> None:
    """Messages of the first sleep were not read before the second began."""
    liveness = watched(1, 2)
    awake(liveness, 0.0, 1.0, heartbeats=(1, 2))
    now = liveness.check_at() + LEASE
    assert liveness.check(now) == SilentSessions()
    now = liveness.check_at() + LEASE
    assert liveness.check(now) == SilentSessions()
    liveness.note_message(1, now)
    liveness.note_message(2, now)
    assert awake(liveness, now, now + 10.0, heartbeats=(1, 2))[1] == SilentSessions()


def test_frequent_sleeps_do_not_hide_silent_nodes() -> None:
    liveness = watched(1, 2)
    liveness.check(0.0)
    found = SilentSessions()
    for _ in range(100):
        liveness.note_message(1, liveness.check_at())
        now = liveness.check_at() + LEASE / 4
        liveness.note_message(1, now)
        found = liveness.check(now)
        if found.lost:
            break
    assert found == SilentSessions(lost=(2,))
