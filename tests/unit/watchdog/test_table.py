"""The table of timers, beside a dumb twin, with a wall clock that jumps."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rallypoint.watchdog.requests import FileTimerRequest, TimerRequest
from rallypoint.watchdog.table import TimerTable

PIDS = st.integers(1, 3)
SCOPES = st.sampled_from("ab")
LIMIT = 4


class TwinsAgree(RuleBasedStateMachine):
    """What the table says is what a plain dictionary of moments says."""

    def __init__(self) -> None:
        super().__init__()
        self.table: TimerTable[FileTimerRequest] = TimerTable(LIMIT)
        self.twin: dict[tuple[int, str], int] = {}
        self.now, self.wall = 1000, 1_700_000_000

    @rule(seconds=st.integers(0, 50))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.wall += seconds

    @rule(jump=st.integers(-(10**9), 10**9))
    def the_wall_clock_jumps(self, jump: int) -> None:
        self.wall = max(10**6, self.wall + jump)

    @rule(pid=PIDS, scope=SCOPES, seconds=st.integers(-10, 100))
    def acquire(self, pid: int, scope: str, seconds: int) -> None:
        had_room = self.table.register(FileTimerRequest(pid, scope, self.wall + seconds, 9), self.now, self.wall)
        assert had_room == ((pid, scope) in self.twin or len(self.twin) < LIMIT)
        if had_room:
            self.twin[pid, scope] = self.now + seconds

    @rule(pid=PIDS, scope=SCOPES)
    def release(self, pid: int, scope: str) -> None:
        assert self.table.register(FileTimerRequest(pid, scope, -1), self.now, self.wall)
        self.twin.pop((pid, scope), None)

    @rule(pid=PIDS)
    def forget(self, pid: int) -> None:
        self.table.drop_worker(pid)
        self.twin = {key: due for key, due in self.twin.items() if key[0] != pid}

    @rule()
    def ask_and_drop(self) -> None:
        before = self.table.due
        found = self.table.expired(self.now)
        late = {key: due for key, due in self.twin.items() if due <= self.now}
        assert {(pid, each.request.scope_id): each.due for pid, own in found.items() for each in own} == late
        assert not late or before <= self.now
        for own in found.values():
            assert own == sorted(own, key=lambda each: each.due)
            self.table.drop(own)
        self.twin = {key: due for key, due in self.twin.items() if key not in late}
        assert self.table.due == min(self.twin.values(), default=math.inf)

    @invariant()
    def nobody_is_missed(self) -> None:
        assert len(self.table) == len(self.twin)
        assert self.table.due <= min(self.twin.values(), default=math.inf)
        assert [self.table.has_timer(pid) for pid in (1, 2, 3)] == [
            any(key[0] == pid for key in self.twin) for pid in (1, 2, 3)
        ]


TestTwinsAgree = TwinsAgree.TestCase


@given(st.floats(1e6, 1e10), st.floats(1e6, 1e10), st.floats(0, 1e5))
def test_a_jump_of_the_wall_clock_moves_no_timer(wall: float, jumped: float, seconds: float) -> None:
    table: TimerTable[TimerRequest] = TimerTable()
    table.register(TimerRequest("worker", "scope", wall + seconds), 50.0, wall)
    table.register(TimerRequest("other", "scope", jumped + 1e6), 51.0, jumped)
    assert math.isclose(table.due, 50.0 + seconds, abs_tol=1e-4)
    assert table.expired(50.0 + seconds - 1e-3) == {}
    assert set(table.expired(50.0 + seconds + 1e-3)) == {"worker"}


def test_those_that_are_not_dropped_expire_again_but_wake_nobody() -> None:
    table: TimerTable[TimerRequest] = TimerTable()
    table.register(TimerRequest(1, "scope", 10.0), 0.0, 0.0)
    assert list(table.expired(11.0)) == [1]
    assert table.due == math.inf
    assert list(table.expired(11.0)) == [1]
