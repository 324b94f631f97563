"""Copies of a zygote that wait to become workers: their number, which sweeps spare them, and what ends them."""

from __future__ import annotations

import math
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from rallypoint.base.kernel import readable
from rallypoint.base.open_process import open_process
from rallypoint.features.preload import client
from rallypoint.features.preload.client import PreloadManager
from rallypoint.workers.process import WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from tests.unit.clocks import HandClock
from tests.unit.preload.test_manager import command, copies, preloading, start, sweep, until
from tests.unit.workers.test_process import TIMEOUT, ends, parent_of

pytestmark = pytest.mark.process


def two_copies(found: PreloadManager) -> list[int]:
    """The pids of two waiting copies."""
    until(found, lambda: len(copies(found)) == 2)
    return copies(found)


def exit_code(found: PreloadManager, reaper: ReaperClient, folder: Path, text: str, pid: int | None = None) -> int:
    """The exit code of a worker that runs a script, by default in any process."""
    process = start(found, reaper, folder, text)
    assert pid in (None, process.pid)
    code = ends(process)
    process.release()
    return code


def test_waiting_copies_become_the_workers(reaper: ReaperClient, tmp_path: Path) -> None:
    clock = HandClock()
    with preloading(reaper, tmp_path, clock=clock) as found:
        waiting = two_copies(found)
        script = "import os, sys\nraise SystemExit(10 + ('decimal' in sys.modules) + (os.getppid() == os.getsid(0)))"
        for pid in waiting:
            assert parent_of(pid) != found.pid
            assert exit_code(found, reaper, tmp_path, script, pid) == 11
        assert copies(found) == []
        assert found.wake_at() == client.REFILL_DELAY
        clock.now = client.REFILL_DELAY
        assert not {*two_copies(found)} & {*waiting}
        assert found.wake_at() == math.inf


def test_a_restart_before_copies_wait_asks_for_them(reaper: ReaperClient, tmp_path: Path) -> None:
    with preloading(reaper, tmp_path, clock=HandClock()) as found:
        two_copies(found)
        for _ in range(2):
            found.ensure_zygote(reaper)
            for _ in range(2):
                assert exit_code(found, reaper, tmp_path, "pass") == 0


def test_sweeps_spare_copies_until_they_are_workers(reaper: ReaperClient, tmp_path: Path) -> None:
    with preloading(reaper, tmp_path) as found:
        _, spared = two_copies(found)
        process = start(found, reaper, tmp_path, "import signal\nsignal.pause()")
        sweep(reaper, process)
        assert ends(process) == -signal.SIGKILL
        process.release()
        assert exit_code(found, reaper, tmp_path, "pass", spared) == 0


def test_killed_copies_are_not_used(reaper: ReaperClient, tmp_path: Path) -> None:
    with preloading(reaper, tmp_path) as found:
        first, second = two_copies(found)
        with closing(open_process(first)) as handle:
            os.kill(first, signal.SIGKILL)
            assert readable(handle.fileno(), TIMEOUT)
        assert exit_code(found, reaper, tmp_path, "raise SystemExit(4)", second) == 4
        assert exit_code(found, reaper, tmp_path, "raise SystemExit(5)") == 5, "no copy was left"


def test_signals_to_waiting_copies_do_not_reach_workers(reaper: ReaperClient, tmp_path: Path) -> None:
    with preloading(reaper, tmp_path) as found:
        for pid in two_copies(found):
            os.kill(pid, signal.SIGTERM)
        assert exit_code(found, reaper, tmp_path, "raise SystemExit(6)") == 6


def test_the_exit_of_a_copy_is_not_kept(reaper: ReaperClient, tmp_path: Path) -> None:
    """A later worker with the same pid would be taken for ended."""
    with preloading(reaper, tmp_path) as found:
        first, _ = two_copies(found)
        os.kill(first, signal.SIGKILL)
        process = WorkerProcess(reaper, command(tmp_path, "pass"), os.environ)
        assert ends(process) == 0
        process.release()
        assert reaper.status(first).code is None
