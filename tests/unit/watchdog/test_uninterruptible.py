"""Workers in uninterruptible sleep: the rules, and a real worker."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.workers.watchdog import (
    SleepMonitor,
    SleepTracker,
    StuckProcess,
    UninterruptibleSleep,
    uninterruptible_sleep_of,
)
from tests.unit.watchdog.waiting import in_state_d

IN_NFS = UninterruptibleSleep(100, 7, "nfs_wait")


def test_a_long_sleep() -> None:
    sleepers = SleepTracker(5)
    assert sleepers.update(0, {9: IN_NFS}) == ([], [])
    assert sleepers.update(1, {9: IN_NFS}) == ([StuckProcess(9, 1, "nfs_wait")], [])
    assert sleepers.update(4.9, {9: IN_NFS}) == ([], [])
    assert sleepers.update(5, {9: IN_NFS}) == ([], [StuckProcess(9, 5, "nfs_wait")])
    assert "nfs_wait" in StuckProcess(9, 5, "nfs_wait").why


@pytest.mark.parametrize("other", [IN_NFS._replace(switches=8), IN_NFS._replace(started=101), None])
def test_another_sleep_has_its_own_time(other: UninterruptibleSleep | None) -> None:
    sleepers = SleepTracker(5)
    sleepers.update(0, {9: IN_NFS})
    sleepers.update(4, {9: other} if other else {})
    assert sleepers.update(8, {9: other or IN_NFS}) == ([StuckProcess(9, 4, "nfs_wait")] if other else [], [])


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_a_process_that_ran_between_polls_is_never_stuck(looks: list[tuple[int, bool]]) -> None:
    sleepers, now = SleepTracker(1), 0
    for number, (seconds, sleeps) in enumerate(looks):
        now += seconds
        assert sleepers.update(now, {9: UninterruptibleSleep(1, number, "")} if sleeps else {}) == ([], [])


@pytest.mark.process
def test_a_real_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert uninterruptible_sleep_of(os.getpid()) is None
    assert uninterruptible_sleep_of(1 << 22) is None
    with in_state_d(tmp_path) as pid:
        watch, now = SleepMonitor(2.0), time.monotonic()
        assert watch.step(now, [pid, os.getpid()]) == []
        assert watch.wake_at() == now + 0.5
        for seconds in (0.1, 0.5, 1.0, 1.5):
            assert watch.step(now + seconds, [pid, os.getpid()]) == []
        (stuck,) = watch.step(now + 2.0, [pid, os.getpid()])
        assert (stuck.pid, stuck.seconds) == (pid, 2.0)
    assert sum("uninterruptible" in line for line in caplog.messages) == 2
