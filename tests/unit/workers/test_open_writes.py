"""Whether a process is writing a file: what counts, and what does not."""

from __future__ import annotations

import os
from pathlib import Path

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
from tests.unit.workers.starting import Script

pytestmark = pytest.mark.process

FILE = (5, "/data/model.pt")


MUCH = 1 << 20


@pytest.mark.parametrize(
    ("before", "after", "moved", "grown"),
    [
        ({}, {}, False, False),
        ({FILE: 0}, {FILE: 0}, False, False),
        ({FILE: 0}, {FILE: 200}, False, False),
        ({FILE: 0}, {FILE: MUCH}, True, True),
        ({FILE: MUCH}, {FILE: 0}, True, False),
        ({FILE: MUCH}, {}, True, False),
        ({}, {FILE: 0}, True, False),
        ({}, {FILE: MUCH}, True, True),
        ({FILE: 9}, {(5, "/data/optimizer.pt"): 9}, True, False),
    ],
    ids=["none", "idle", "a log", "grows", "begins again", "closed", "opened", "opened and grows", "the next"],
)
def test_write_moves(
    before: dict[tuple[int, str], int], after: dict[tuple[int, str], int], moved: bool, grown: bool
) -> None:
    then, now = WriteProgress(before, 0), WriteProgress(after, 0)
    assert now.moved_from(then) is moved
    assert now.has_grown(then) is grown
    # One long `write` moves no position.
    assert now._replace(written=MUCH).moved_from(then) is (moved or bool(after))
    assert now._replace(written=MUCH).has_grown(then) is (grown or bool(after))
    assert now._replace(announced=True).has_grown(then)
    assert now._replace(announced=True).has_grown(then._replace(announced=True)) is grown


class Detector(WriteDetector):
    """Watches a script, with a clock that a test moves."""

    def __init__(self, script: Script) -> None:
        self.hand = HandClock(SYSTEM_CLOCK.monotonic())
        super().__init__(script.pid, self.hand)

    def check_after(self, seconds: float) -> bool:
        self.hand.now += seconds
        return self.check()


@pytest.fixture
def detector(script: Script) -> Detector:
    return Detector(script)


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
def test_other_files_are_no_checkpoint(script: Script, detector: Detector, line: str) -> None:
    script.run(line)
    assert not detector.check()


def test_an_open_file_that_does_not_move_costs_a_moment(script: Script, detector: Detector) -> None:
    script.run("f = open('index', 'r+' if os.path.exists('index') else 'w'); log = open('log', 'a')")
    assert detector.check()
    script.run("log.write('x' * 1000); log.flush(); f.write('x' * 100); f.flush()")
    assert not detector.check_after(DETECTION_TIME)
    assert not detector.certain


def test_a_lock_file_costs_less(script: Script, detector: Detector) -> None:
    script.run("import fcntl; f = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)")
    assert detector.check()
    assert not detector.check_after(LOCK_DETECTION_TIME)
    script.run("data = open('data', 'wb')")
    assert detector.check(), "it continues to write"


def test_a_checkpoint_of_several_files(script: Script, detector: Detector, tmp_path: Path) -> None:
    script.run("f = open('model.pt', 'wb')")
    assert detector.check()
    for _ in range(3):
        script.run("f.write(bytes(100_000)); f.flush()")
        assert detector.check_after(DETECTION_TIME)
    assert detector.certain
    assert detector.what == str(tmp_path / "model.pt")
    script.run("f.close()")
    assert detector.check_after(QUIET_TIME / 2), "it was closed since the last look"
    assert detector.check_after(QUIET_TIME / 2), "another file may follow"
    script.run("f = open('trainer_state.json', 'w'); f.write('{}')")
    assert detector.check_after(QUIET_TIME / 4)
    script.run("f.close()")
    assert detector.check_after(QUIET_TIME / 2)
    assert not detector.check_after(QUIET_TIME)


def test_a_process_in_a_saving_block_writes_until_its_end(script: Script, detector: Detector) -> None:
    script.run("from rallypoint import notices; saving = notices.saving(); saving.__enter__()")
    assert all(detector.check_after(60) for _ in range(3))
    assert detector.certain
    script.run("saving.__exit__(None, None, None)")
    assert not detector.check()


def test_processes_that_have_ended_or_belong_to_others() -> None:
    assert write_progress(4_000_000) == WriteProgress({}, 0)
    assert not WriteDetector(4_000_000).check()
    for pid in (1, os.getppid()):  # others than root may not look at process 1
        assert isinstance(write_progress(pid), WriteProgress)
