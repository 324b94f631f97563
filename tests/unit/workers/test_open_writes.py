"""Whether a process is in the middle of writing a file: what counts, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.workers.stop import (
    DETECTION_TIME,
    LOCK_DETECTION_TIME,
    QUIET_TIME,
    WriteDetector,
    WriteProgress,
    write_progress,
)
from tests.unit.clocks import HandClock

pytestmark = pytest.mark.process

FILE = (5, "/data/model.pt")


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        ({}, {}, False),
        ({FILE: 0}, {FILE: 0}, False),
        ({FILE: 0}, {FILE: 200}, False),
        ({FILE: 0}, {FILE: 1 << 20}, True),
        ({FILE: 1 << 20}, {FILE: 0}, True),
        ({FILE: 0}, {}, True),
        ({}, {FILE: 0}, True),
        ({FILE: 9}, {(5, "/data/optimizer.pt"): 9}, True),
    ],
    ids=["none", "idle", "a log", "grows", "begins again", "closed", "opened", "the next"],
)
def test_what_a_move_is(before: dict[tuple[int, str], int], after: dict[tuple[int, str], int], moved: bool) -> None:
    assert WriteProgress(after, 0).moved_from(WriteProgress(before, 0)) is moved
    # One long `write` moves no position; what a process writes to others of its files says nothing.
    assert WriteProgress(after, 1 << 20).moved_from(WriteProgress(before, 0)) is (moved or bool(after))


@pytest.mark.parametrize(
    ("before", "after", "grown"),
    [
        ({FILE: 0}, {FILE: 0}, False),
        ({FILE: 0}, {FILE: 200}, False),
        ({FILE: 0}, {FILE: 1 << 20}, True),
        ({FILE: 1 << 20}, {FILE: 0}, False),
        ({FILE: 1 << 20}, {}, False),
        ({}, {FILE: 0}, False),
        ({}, {FILE: 1 << 20}, True),
    ],
    ids=["idle", "a log", "grows", "begins again", "closed", "opened", "the next"],
)
def test_what_growth_is(before: dict[tuple[int, str], int], after: dict[tuple[int, str], int], grown: bool) -> None:
    then = WriteProgress(before, 0)
    assert WriteProgress(after, 0).has_grown(then) is grown
    assert WriteProgress(after, 1 << 20).has_grown(then) is (grown or bool(after))
    assert WriteProgress(after, 0, announced=True).has_grown(then)
    assert WriteProgress(after, 0, announced=True).has_grown(then._replace(announced=True)) is grown


class Script:
    """A Python process that does what it is told, line by line."""

    def __init__(self, folder: Path) -> None:
        code = "import os, sys\nfor line in sys.stdin:\n    exec(line)\n    print(flush=True)\n"
        self._output = open(folder / "stdout", "wb")  # noqa: SIM115 - as a worker's may be, on descriptor 2
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid

    def does(self, line: str) -> None:
        stdin: IO[str] | None = self._process.stdin
        stdout: IO[str] | None = self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(line + "\n")
        assert stdout.readline() == "\n"

    def end(self) -> None:
        for each in (self._process.stdin, self._process.stdout, self._output):
            assert each is not None
            each.close()
        assert self._process.wait(30) == 0


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    running = Script(tmp_path)
    yield running
    running.end()


@pytest.mark.parametrize(
    "line",
    [
        "pass",
        "f = open('log', 'a')",
        "f = open('log', 'w'); os.unlink('log')",
        "f = open(sys.executable, 'rb')",
        "f = open('/dev/null', 'w')",
        "r, w = os.pipe()",
        "fd = os.dup(2)",
        "fd = os.memfd_create('tensors')",
        "f = open('/dev/shm/rallypoint-test', 'w'); os.unlink('/dev/shm/rallypoint-test')",
        "os.environ |= {'RALLYPOINT_NOTICES': 'told', 'LOCAL_RANK': '0'}; "
        "from rallypoint import notices; notices.progress(5); assert os.listdir('told') == ['progress.0']",
        "from rallypoint.inprocess.rounds import Channel; c = Channel('told', '0')",
    ],
)
def test_what_is_no_checkpoint_costs_no_time(script: Script, line: str) -> None:
    script.does(line)
    assert not WriteDetector(script.pid).check()


def test_a_file_that_is_open_and_does_not_move_costs_a_moment_only(script: Script) -> None:
    script.does("f = open('index', 'r+' if os.path.exists('index') else 'w'); log = open('log', 'a')")
    clock = HandClock(SYSTEM_CLOCK.monotonic())
    writing = WriteDetector(script.pid, clock)
    assert writing.check()
    script.does("log.write('x' * 1000); log.flush(); f.write('x' * 100); f.flush()")
    clock.now += DETECTION_TIME
    assert not writing.check()
    assert not writing.certain


def test_a_lock_file_that_is_held_costs_less(script: Script) -> None:
    script.does("import fcntl; f = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)")
    clock = HandClock(SYSTEM_CLOCK.monotonic())
    writing = WriteDetector(script.pid, clock)
    assert writing.check()
    clock.now += LOCK_DETECTION_TIME
    assert not writing.check()
    script.does("data = open('data', 'wb')")
    assert writing.check(), "it goes on to write"


def test_a_checkpoint_of_several_files_is_waited_for_until_it_is_quiet(script: Script, tmp_path: Path) -> None:
    script.does("f = open('model.pt', 'wb')")
    clock = HandClock(SYSTEM_CLOCK.monotonic())
    writing = WriteDetector(script.pid, clock)
    assert writing.check()
    for _ in range(3):
        script.does("f.write(bytes(100_000)); f.flush()")
        clock.now += DETECTION_TIME
        assert writing.check()
    assert writing.certain
    assert writing.what == str(tmp_path / "model.pt")
    script.does("f.close()")
    clock.now += QUIET_TIME / 2
    assert writing.check(), "it was closed since the last look"
    clock.now += QUIET_TIME / 2
    assert writing.check(), "another may follow"
    script.does("f = open('trainer_state.json', 'w'); f.write('{}')")
    clock.now += QUIET_TIME / 4
    assert writing.check()
    script.does("f.close()")
    clock.now += QUIET_TIME / 2
    assert writing.check()
    clock.now += QUIET_TIME
    assert not writing.check()


def test_whoever_says_that_it_saves_is_believed_for_as_long_as_it_says_so(script: Script) -> None:
    script.does("from rallypoint import notices; saving = notices.saving(); saving.__enter__()")
    clock = HandClock(SYSTEM_CLOCK.monotonic())
    writing = WriteDetector(script.pid, clock)
    for _ in range(3):
        clock.now += 60
        assert writing.check()
    assert writing.certain
    script.does("saving.__exit__(None, None, None)")
    assert not writing.check()


def test_a_process_that_is_gone_writes_nothing() -> None:
    assert write_progress(4_000_000) == WriteProgress({}, 0)
    assert not WriteDetector(4_000_000).check()


def test_what_others_hold_is_not_looked_into() -> None:
    """A process of somebody else, as far as there is one that we may not look at: it must not raise."""
    for name in ("1", str(os.getppid())):
        assert isinstance(write_progress(int(name)), WriteProgress)
