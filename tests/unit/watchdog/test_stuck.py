"""Workers in uninterruptible sleep: the judgement, and a real one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.watchdog.stuck import Sleep, Sleepers, Stuck, StuckWatch, sleep_of
from tests.unit.watchdog.waiting import in_state_d

IN_NFS = Sleep(100, 7, "nfs_wait")


def test_one_sleep_that_lasts() -> None:
    sleepers = Sleepers(5)
    assert sleepers.look(0, {9: IN_NFS}) == ([], [])
    assert sleepers.look(1, {9: IN_NFS}) == ([Stuck(9, 1, "nfs_wait")], [])
    assert sleepers.look(4.9, {9: IN_NFS}) == ([], [])
    assert sleepers.look(5, {9: IN_NFS}) == ([], [Stuck(9, 5, "nfs_wait")])
    assert "nfs_wait" in Stuck(9, 5, "nfs_wait").why


@pytest.mark.parametrize("other", [IN_NFS._replace(switches=8), IN_NFS._replace(started=101), None])
def test_another_sleep_begins_again(other: Sleep | None) -> None:
    sleepers = Sleepers(5)
    sleepers.look(0, {9: IN_NFS})
    sleepers.look(4, {} if other is None else {9: other})
    assert sleepers.look(8, {9: other or IN_NFS}) == (([], []) if other is None else ([Stuck(9, 4, "nfs_wait")], []))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_who_is_switched_to_between_looks_is_never_stuck(looks: list[tuple[int, bool]]) -> None:
    """However often it is seen asleep."""
    sleepers, now = Sleepers(1), 0
    for number, (seconds, sleeps) in enumerate(looks):
        now += seconds
        assert sleepers.look(now, {9: Sleep(1, number, "")} if sleeps else {}) == ([], [])


@pytest.mark.process
def test_a_process_that_does_not_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with in_state_d(tmp_path) as pid:
        watch, now = StuckWatch(2.0), time.monotonic()
        assert watch.step(now, [pid, os.getpid()]) == []
        assert watch.wake_at() == now + 0.5
        assert watch.step(now + 0.1, [pid, os.getpid()]) == []
        for seconds in (0.5, 1.0, 1.5):
            assert watch.step(now + seconds, [pid, os.getpid()]) == []
        (stuck,) = watch.step(now + 2.0, [pid, os.getpid()])
        assert (stuck.pid, stuck.seconds) == (pid, 2.0)
    assert sum("uninterruptible" in line for line in caplog.messages) == 2


def test_who_is_well_sleeps_no_such_sleep() -> None:
    assert sleep_of(os.getpid()) is None
    assert sleep_of(1 << 22) is None
