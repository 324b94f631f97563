"""What an agent holds: both watches as one thing, from its environment."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path

import pytest

from rallypoint.watchdog.watchdog import WorkerMonitor, monitor_for, uninterruptible_timeout
from tests.unit.watchdog.waiting import HANGS, holder, in_state_d, until

pytestmark = pytest.mark.process

ON = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"TORCHELASTIC_ENABLE_FILE_TIMER": "0"},
        {"TORCHELASTIC_ENABLE_FILE_TIMER": "true"},
        {"TORCHELASTIC_TIMER_FILE": "/somewhere"},
        {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0"},
    ],
)
def test_who_asks_for_nothing_gets_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    assert monitor_for(environment, str(tmp_path)) is None
    assert os.listdir(tmp_path) == []


def test_the_pipe_has_a_name_of_its_own_or_the_one_given(tmp_path: Path) -> None:
    one, other = monitor_for(ON, str(tmp_path)), monitor_for(ON, str(tmp_path))
    named = monitor_for({**ON, "TORCHELASTIC_TIMER_FILE": str(tmp_path / "mine")}, str(tmp_path))
    assert one is not None
    assert other is not None
    assert named is not None
    assert named.environment == {"TORCHELASTIC_TIMER_FILE": str(tmp_path / "mine")}
    files = [*one.files, *other.files, *named.files]
    assert sorted(files) == sorted(str(path) for path in tmp_path.iterdir())
    assert all(os.path.basename(path).startswith("watchdog_timer_") for path in files[:2])
    for each in (one, other, named):
        assert each.fds() == []
        assert each.wake_at() == math.inf
        each.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5.0), ("0.5", 0.5), ("-1", 0), ("nan", 0), ("inf", 0), ("x", 0), ("", 0)]
)
def test_how_long_a_worker_may_be_stuck(text: str, seconds: float) -> None:
    assert uninterruptible_timeout({"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": text}) == seconds
    assert uninterruptible_timeout({}) == 0


def test_a_worker_that_is_late(tmp_path: Path) -> None:
    monitor = monitor_for(ON, str(tmp_path), run_id="job")
    assert monitor is not None
    with holder(HANGS, monitor.files[0], 0.1, 9) as late:
        monitor.watch([late.pid])

        def ended() -> bool:
            monitor.step()
            return late.ended()

        until(monitor, ended)
        assert re.fullmatch(r"its timer 'scope' of 0\.[01] s ran out", monitor.expiry_reason(late.pid))
        assert monitor.expiry_reason(1) == ""
        assert monitor.stuck == {}
    monitor.close()
    monitor.close()
    assert monitor.fds() == []
    assert os.listdir(tmp_path) == []


def test_a_worker_that_is_late_while_it_is_being_stopped(tmp_path: Path) -> None:
    monitor = WorkerMonitor(str(tmp_path / "timers"), 0)
    with holder(HANGS, monitor.files[0], -1, 9) as late:
        monitor.watch([late.pid])
        late.is_up()
        monitor.stop_enforcing()
        monitor.step()
        assert monitor.fds() != []
        assert monitor.wake_at() == math.inf
        assert monitor.expiry_reason(late.pid) == ""
        monitor.close()


def test_a_worker_that_is_stuck(tmp_path: Path) -> None:
    with in_state_d(tmp_path) as pid:
        monitor = WorkerMonitor(None, 0.2)
        assert monitor.environment == {}
        assert monitor.files == []
        began = time.monotonic()
        monitor.watch([pid])

        def found() -> bool:
            monitor.step()
            return bool(monitor.stuck)

        until(monitor, found)
        assert time.monotonic() - began >= 0.2
        assert monitor.stuck[pid].seconds >= 0.2
        monitor.close()
        assert monitor.wake_at() == math.inf
