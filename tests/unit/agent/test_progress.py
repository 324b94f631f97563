"""An agent's use of the workers' progress, reported by a call or in a file."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rallypoint import notices
from rallypoint.agent.folder import Reached, WorkerFolder
from rallypoint.control.membership.state import RecordProgress
from rallypoint.control.protocol.messages import Request
from tests.unit.clocks import ShiftedClock
from tests.waiting import until

Call = Callable[..., None]


class Tracker(WorkerFolder):
    """Keeps the reports to the job and to the log."""

    def __init__(self, path: str = "") -> None:
        self.hand = ShiftedClock()
        super().__init__(lambda: (), self.record, path, self.hand)
        self.on_progress = lambda reached, from_file: self.log.append((reached.step, from_file))
        self.job: list[tuple[int, int, bool]] = []
        self.log: list[tuple[int, bool]] = []

    def record(self, request: Request) -> None:
        assert isinstance(request, RecordProgress)
        self.job.append((request.round, request.step, request.made))

    def begin(self, round_: int, folder: str, ranks: int, best: int, since: float = float("-inf")) -> None:
        """Begin a round whose workers have this folder."""
        self._folder = folder
        self.begin_round(round_, ranks, best, since)

    def reached(self) -> Reached:
        latest = self.latest()
        assert latest is not None
        return latest

    def look_until(self, holds: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.look()
            return holds()

        until(looked, "the file is read")


@pytest.fixture
def tracker() -> Tracker:
    return Tracker()


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Lets the worker of a local rank report a step."""
    monkeypatch.setenv(notices.VARIABLE, str(tmp_path / "notices"))

    def progress(step: int, rank: int = 0) -> None:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr(notices, "_progress_place", None)
        notices.progress(step)

    return progress


def test_without_reports_looks_become_rare(tracker: Tracker, tmp_path: Path) -> None:
    tracker.begin(0, str(tmp_path / "none"), 2, -1)
    waits = []
    for _ in range(10):
        waits.append(tracker.wake_at() - tracker.hand.monotonic())
        tracker.hand.ahead += waits[-1]
        tracker.step()
    assert waits == pytest.approx([1, 1, 2, 4, 8, 16, 32, 60, 60, 60], abs=0.5)
    assert tracker.latest() is None


def test_the_job_gets_the_first_new_step_and_the_last_one(tracker: Tracker, call: Call, tmp_path: Path) -> None:
    tracker.begin(3, str(tmp_path / "notices"), 2, 40)
    for step, rank in ((38, 0), (40, 1)):
        call(step, rank)
        tracker.look()
        assert tracker.job == [], "the job had reached step 40 before"
    for step in (41, 45):
        call(step)
        tracker.look()
        assert tracker.job == [(3, 41, True)]
    call(47, 1)
    tracker.end_round()
    tracker.end_round()
    assert tracker.job == [(3, 41, True), (3, 47, True)]
    assert tracker.log == [(38, False), (40, False), (41, False), (45, False), (47, False)]
    latest = tracker.reached()
    assert (latest.step, latest.first) == (47, 40)
    assert 0 <= tracker.hand.monotonic() - latest.at < 5
    assert tracker.wake_at() == float("inf"), "there are no looks after the round"
    tracker.begin(4, str(tmp_path / "notices"), 1, 47)
    call(47)
    tracker.end_round()
    assert len(tracker.job) == 2, "a repeated step is no progress"


def test_earlier_steps_of_a_worker_that_continues_do_not_count(tracker: Tracker, call: Call, tmp_path: Path) -> None:
    tracker.begin(4, str(tmp_path / "notices"), 1, 40)
    call(47)
    tracker.end_round()
    tracker.begin(5, str(tmp_path / "notices"), 1, 47, since=time.monotonic())
    tracker.look()
    assert (tracker.made(), tracker.steps(), tracker.latest()) == (False, (), None)
    call(48)
    tracker.look()
    assert (tracker.made(), tracker.steps(), tracker.reached().step) == (True, (48,), 48)
    assert tracker.reached().first == -1, "the first step in its file belongs to the round before"
    assert (tracker.began(), tracker.step_before) == (None, 47)


def test_the_first_step_of_a_round_and_the_last_one_before(tracker: Tracker, call: Call, tmp_path: Path) -> None:
    tracker.begin(4, str(tmp_path / "notices"), 2, -1)
    assert (tracker.began(), tracker.step_before) == (None, -1)
    call(41, rank=1)
    after = time.monotonic()
    call(42, rank=1)
    call(42, rank=0)
    assert (tracker.steps(), tracker.began(), tracker.latest()) == ((), None, None), "before the first look"
    tracker.look()
    began = tracker.began()
    assert began is not None
    assert (began.first, began.first_at <= after) == (41, True), "of the worker that was first"
    tracker.end_round()
    call(43, rank=0)  # while it is being stopped
    tracker.clear()
    for round_ in (5, 6):  # without a step
        tracker.begin(round_, str(tmp_path / "others"), 2, 43)
        assert (tracker.began(), tracker.step_before) == (None, 43)


@pytest.mark.parametrize("content", [b"", b"x" * 15, b"\xff" * 16, bytes(5)])
def test_other_files_are_ignored(tracker: Tracker, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "progress.0").write_bytes(content)
    (tmp_path / "progress.1").mkdir()
    tracker.begin(0, str(tmp_path), 2, -1)
    tracker.end_round()
    assert (tracker.job, tracker.log, tracker.latest()) == ([], [], None)


def test_programs_in_other_languages_write_two_numbers(tracker: Tracker, tmp_path: Path) -> None:
    (tmp_path / "progress.0").write_bytes(struct.pack("=qq", 7, time.monotonic_ns()))
    tracker.begin(0, str(tmp_path), 1, -1)
    tracker.look()
    assert tracker.job == [(0, 7, True)]


# A file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "latest_checkpointed_iteration.txt"


@pytest.fixture
def reader(file: Path) -> Iterator[Tracker]:
    with closing(Tracker(str(file))) as tracker:
        yield tracker


def write(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


def test_numbers_that_grow_are_progress(reader: Tracker, file: Path) -> None:
    write(file, "100\n")
    reader.begin(1, "", 1, 90)
    reader.look_until(lambda: reader.job == [(1, 100, False)])
    assert reader.log == [], "the file had this number before"
    write(file, " 200\n")
    reader.look_until(lambda: len(reader.job) == 2)
    assert reader.job[-1] == (1, 200, True)
    assert reader.log == [(200, True)]
    reader.end_round()
    reader.begin(2, "", 1, 200)
    write(file, "150")
    reader.look_until(lambda: reader.log[-1] == (150, True))
    reader.end_round()
    assert reader.job[2:] == [(2, 200, False)]


def test_changes_of_a_file_without_a_number_are_progress(reader: Tracker, file: Path) -> None:
    write(file, "release")
    reader.begin(0, "", 1, -1)
    reader.look_until(lambda: reader.job == [(0, -1, False)])
    write(file, "release")
    reader.look_until(lambda: len(reader.job) == 2)
    assert reader.job[-1] == (0, -1, True)


def test_with_a_file_reports_of_workers_are_only_shown(reader: Tracker, file: Path, call: Call, tmp_path: Path) -> None:
    write(file, "10")
    reader.begin(0, str(tmp_path / "notices"), 1, -1)
    reader.look_until(lambda: bool(reader.job))
    call(17)
    reader.end_round()
    assert reader.job == [(0, 10, False)]
    assert reader.reached().step == 17
