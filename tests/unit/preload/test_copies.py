"""Copies of a zygote that wait to become workers: their number, what spares them, and what ends them."""

from __future__ import annotations

import math
import os
import select
import signal
from pathlib import Path

import pytest

from rallypoint.base.kernel import readable
from rallypoint.base.open_process import open_process
from rallypoint.base.process_table import read_stat
from rallypoint.features.preload import client
from rallypoint.features.preload.client import PreloadManager
from rallypoint.workers.process import WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.stop import Sweep
from tests.unit.clocks import HandClock
from tests.unit.preload.test_manager import command, copies, preloading, start, until
from tests.unit.workers.test_process import TIMEOUT, ends, parent_of

pytestmark = pytest.mark.process


def two_wait(found: PreloadManager) -> list[int]:
    until(found, lambda: len(copies(found)) == 2)
    return copies(found)


def ended(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.ended


def test_as_many_wait_as_start_at_a_time_and_they_become_the_workers(reaper: ReaperClient, tmp_path: Path) -> None:
    clock = HandClock()
    with preloading(reaper, tmp_path, clock=clock) as found:
        waiting = two_wait(found)
        script = "import os, sys\nraise SystemExit(10 + ('decimal' in sys.modules) + (os.getppid() == os.getsid(0)))"
        for pid in waiting:
            reaper_pid = parent_of(pid)
            process = start(found, reaper, tmp_path, script)
            assert process.pid == pid
            assert ends(process) == 11
            assert reaper_pid != found.pid
            process.release()
        assert copies(found) == []
        assert found.wake_at() == client.REFILL_DELAY
        clock.now = client.REFILL_DELAY
        assert not {*two_wait(found)} & {*waiting}
        assert found.wake_at() == math.inf


def test_a_start_before_the_next_ones_wait_asks_for_them_at_once(reaper: ReaperClient, tmp_path: Path) -> None:
    with preloading(reaper, tmp_path, clock=HandClock()) as found:
        two_wait(found)
        for _ in range(2):
            found.ensure_zygote(reaper)
            for _ in range(2):
                process = start(found, reaper, tmp_path, "pass")
                assert ends(process) == 0
                process.release()


def test_sweeps_spare_them_until_they_are_workers(reaper: ReaperClient, tmp_path: Path) -> None:
    with preloading(reaper, tmp_path) as found:
        waiting = two_wait(found)
        process = start(found, reaper, tmp_path, "import signal\nsignal.pause()")
        sweep = Sweep(reaper, [process])
        sweep.begin()
        while not sweep.done():
            select.select(sweep.fds(), [], [], TIMEOUT)
        assert ends(process) == -signal.SIGKILL
        process.release()
        assert not ended(waiting[1])
        last = start(found, reaper, tmp_path, "pass")
        assert last.pid == waiting[1]
        assert ends(last) == 0
        last.release()


def test_those_that_were_killed_are_passed_over(reaper: ReaperClient, tmp_path: Path) -> None:
    with preloading(reaper, tmp_path) as found:
        first, second = two_wait(found)
        handle = open_process(first)
        os.kill(first, signal.SIGKILL)
        assert readable(handle.fileno(), TIMEOUT)
        handle.close()
        process = start(found, reaper, tmp_path, "raise SystemExit(4)")
        assert process.pid == second
        assert ends(process) == 4
        process.release()
        process = start(found, reaper, tmp_path, "raise SystemExit(5)")  # of which none was left
        assert ends(process) == 5
        process.release()


def test_what_is_sent_to_all_processes_while_they_wait_is_not_meant_for_workers(
    reaper: ReaperClient, tmp_path: Path
) -> None:
    with preloading(reaper, tmp_path) as found:
        for pid in two_wait(found):
            os.kill(pid, signal.SIGTERM)
        process = start(found, reaper, tmp_path, "raise SystemExit(6)")
        assert ends(process) == 6
        process.release()


def test_the_number_of_one_that_has_ended_tells_nothing_of_a_later_process(
    reaper: ReaperClient, tmp_path: Path
) -> None:
    """Its end is nobody's business: were it kept, a worker that gets the same number would be taken for ended."""
    with preloading(reaper, tmp_path) as found:
        first, _ = two_wait(found)
        os.kill(first, signal.SIGKILL)
        process = WorkerProcess(reaper, command(tmp_path, "pass"), os.environ)
        assert ends(process) == 0
        process.release()
        assert reaper.status(first).code is None
