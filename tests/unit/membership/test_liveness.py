"""Silence, judged by one observer on one clock."""

from __future__ import annotations

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
    """Look whenever it is time, with these sessions beating, until something is found or the time is over."""
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


def test_one_silent_node_among_others_is_over_after_its_lease() -> None:
    at, found = awake(watched(1, 2), 0.0, 10.0, heartbeats=(1,))
    assert found == SilentSessions(lost=(2,))
    assert LEASE <= at <= LEASE + LEASE / 4


def test_who_sends_heartbeats_is_never_found() -> None:
    assert awake(watched(1, 2), 0.0, 60.0, heartbeats=(1, 2)) == (60.0, SilentSessions())


def test_one_of_one_is_over_though_it_may_be_we_who_are_cut_off() -> None:
    assert awake(watched(1), 0.0, 10.0)[1] == SilentSessions(lost=(1,))


def test_where_nobody_is_heard_it_is_we_and_all_are_released_in_the_end() -> None:
    at, found = awake(watched(1, 2, 3), 0.0, 60.0)
    assert found == SilentSessions(out_of_reach=(1, 2, 3))
    assert TIMEOUT <= at <= TIMEOUT + LEASE / 4


def test_a_node_that_lives_with_us_tells_that_we_are_not_cut_off() -> None:
    assert awake(watched(1, 2, local=(3,)), 0.0, 60.0)[1] == SilentSessions(lost=(1, 2))


def test_when_the_network_is_back_those_who_come_late_are_not_judged_by_the_cut() -> None:
    liveness = watched(1, 2)
    awake(liveness, 0.0, 10.0)
    liveness.note_message(1, 10.0)
    at, found = awake(liveness, 10.0, 20.0, heartbeats=(1,))
    assert found == SilentSessions(lost=(2,))
    assert at >= 10.0 + LEASE / 2, "the time in which nobody was heard is not its own"


@given(st.floats(0.0, 1_000.0), st.floats(0.0, LEASE / 3))
def test_a_sleep_of_ours_is_nobodys_silence(asleep: float, heard: float) -> None:
    """What came while we slept is read soon after; nobody may be found before."""
    liveness = watched(1, 2)
    liveness.check(0.0)
    liveness.note_message(1, heard)
    liveness.note_message(2, heard)
    woken = max(liveness.check_at(), heard) + asleep
    assert liveness.check(woken) == SilentSessions()
    liveness.note_message(1, woken)
    liveness.note_message(2, woken)
    assert awake(liveness, woken, woken + 10.0, heartbeats=(1, 2))[1] == SilentSessions()


def test_one_sleep_after_the_other_is_nobodys_silence_either() -> None:
    """What came in the first sleep was not read before the second began."""
    liveness = watched(1, 2)
    awake(liveness, 0.0, 1.0, heartbeats=(1, 2))
    now = liveness.check_at() + LEASE
    assert liveness.check(now) == SilentSessions()
    now = liveness.check_at() + LEASE
    assert liveness.check(now) == SilentSessions()
    liveness.note_message(1, now)
    liveness.note_message(2, now)
    assert awake(liveness, now, now + 10.0, heartbeats=(1, 2))[1] == SilentSessions()


def test_who_always_sleeps_finds_the_silent_all_the_same() -> None:
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
