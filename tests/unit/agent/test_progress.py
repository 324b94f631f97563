"""An agent's use of the workers' progress, reported by call or by a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint import notices
from rallypoint.agent.folder import Reached, WorkerFolder
from rallypoint.control.membership.state import RecordProgress
from rallypoint.control.protocol.messages import Request
from tests.unit.clocks import ShiftedClock

Call = Callable[..., None]


class Told:
    """What the job and the log were told."""

    def __init__(self) -> None:
        self.job: list[tuple[int, int, bool]] = []
        self.log: list[tuple[int, bool]] = []

    def send(self, request: Request) -> None:
        assert isinstance(request, RecordProgress)
        self.job.append((request.round, request.step, request.made))

    def seen(self, reached: Reached, from_file: bool) -> None:
        self.log.append((reached.step, from_file))


def folder_of(clock: ShiftedClock, told: Told, path: str = "") -> WorkerFolder:
    made = WorkerFolder(lambda: (), told.send, path, clock)
    made.on_progress = told.seen
    return made


def begin(tracker: WorkerFolder, round_: int, folder: str, ranks: int, best: int, since: float = float("-inf")) -> None:
    """A round begins, whose workers have this folder."""
    tracker._folder = folder
    tracker.begin_round(round_, ranks, best, since)


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def tracker(clock: ShiftedClock, told: Told) -> WorkerFolder:
    return folder_of(clock, told)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Has the worker of a local rank tell of a step."""
    monkeypatch.setenv(notices.VARIABLE, str(tmp_path / "notices"))

    def progress(step: int, rank: int = 0) -> None:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr(notices, "_progress_place", None)
        notices.progress(step)

    return progress


def test_where_nobody_tells_looks_become_rare(tracker: WorkerFolder, clock: ShiftedClock, tmp_path: Path) -> None:
    begin(tracker, 0, str(tmp_path / "none"), 2, -1)
    waits = []
    for _ in range(10):
        waits.append(tracker.wake_at() - clock.monotonic())
        clock.ahead += waits[-1]
        tracker.step()
    assert waits == pytest.approx([1, 1, 2, 4, 8, 16, 32, 60, 60, 60], abs=0.5)
    assert tracker.latest() is None


def test_the_job_is_told_once_when_a_round_goes_beyond_what_was_and_again_at_its_end(
    tracker: WorkerFolder, clock: ShiftedClock, told: Told, call: Call, tmp_path: Path
) -> None:
    begin(tracker, 3, str(tmp_path / "notices"), 2, 40)
    call(38)
    tracker.look()
    assert told.job == [], "the job had come further before"
    call(40, 1)
    tracker.look()
    assert told.job == []
    call(41)
    tracker.look()
    call(45)
    tracker.look()
    assert told.job == [(3, 41, True)]
    call(47, 1)
    tracker.end_round()
    tracker.end_round()
    assert told.job == [(3, 41, True), (3, 47, True)]
    assert told.log == [(38, False), (40, False), (41, False), (45, False), (47, False)]
    latest = tracker.latest()
    assert latest is not None
    assert (latest.step, latest.first) == (47, 40)
    assert 0 <= clock.monotonic() - latest.at < 5
    assert tracker.wake_at() == float("inf"), "nothing is looked for once the round is over"


def test_a_round_that_repeats_what_was_done_before_has_made_no_progress(
    tracker: WorkerFolder, told: Told, call: Call, tmp_path: Path
) -> None:
    begin(tracker, 4, str(tmp_path / "notices"), 1, 47)
    call(47)
    tracker.end_round()
    assert told.job == []


def test_what_a_worker_that_goes_on_has_told_in_the_round_before_is_of_that_round(
    tracker: WorkerFolder, call: Call, tmp_path: Path
) -> None:
    begin(tracker, 4, str(tmp_path / "notices"), 1, 40)
    call(47)
    tracker.end_round()
    begin(tracker, 5, str(tmp_path / "notices"), 1, 47, since=time.monotonic())
    tracker.look()
    assert (tracker.made(), tracker.steps(), tracker.latest()) == (False, (), None)
    call(48)
    tracker.look()
    latest = tracker.latest()
    assert latest is not None
    assert (tracker.made(), tracker.steps(), latest.step) == (True, (48,), 48)
    assert latest.first == -1, "the first that its file has is of the round before"
    assert (tracker.began(), tracker.step_before) == (None, 47)


def test_the_first_step_of_a_round_and_the_last_one_before_are_known(
    tracker: WorkerFolder, call: Call, tmp_path: Path
) -> None:
    begin(tracker, 4, str(tmp_path / "notices"), 2, -1)
    assert (tracker.began(), tracker.step_before) == (None, -1)
    call(41, rank=1)
    after = time.monotonic()
    call(42, rank=1)
    call(42, rank=0)
    found = tracker.steps(), tracker.began(), tracker.latest()
    assert found == ((), None, None), "a report has no first step without the step that was reached"
    tracker.look()
    began = tracker.began()
    assert began is not None
    assert (began.first, began.first_at <= after) == (41, True), "that of the worker that came first"
    tracker.end_round()
    call(43, rank=0)  # while it is being stopped
    tracker.clear()
    begin(tracker, 5, str(tmp_path / "others"), 2, 43)
    assert (tracker.began(), tracker.step_before) == (None, 43)
    begin(tracker, 6, str(tmp_path / "others"), 2, 43)
    assert tracker.step_before == 43, "a round without a step takes nothing away"


@pytest.mark.parametrize("content", [b"", b"x" * 15, b"\xff" * 16, bytes(5)])
def test_what_is_no_progress_file_is_passed_over(
    tracker: WorkerFolder, told: Told, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "progress.0").write_bytes(content)
    (tmp_path / "progress.1").mkdir()
    begin(tracker, 0, str(tmp_path), 2, -1)
    tracker.end_round()
    assert (told.job, told.log, tracker.latest()) == ([], [], None)


def test_a_program_in_another_language_writes_two_numbers(tracker: WorkerFolder, told: Told, tmp_path: Path) -> None:
    import struct

    (tmp_path / "progress.0").write_bytes(struct.pack("=qq", 7, time.monotonic_ns()))
    begin(tracker, 0, str(tmp_path), 1, -1)
    tracker.look()
    assert told.job == [(0, 7, True)]


# A file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "latest_checkpointed_iteration.txt"


def until(tracker: WorkerFolder, holds: Callable[[], bool]) -> None:
    by = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < by, "the file was not read"
        tracker.look()
        time.sleep(0.01)


def write(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


def test_what_was_in_the_file_before_is_no_progress(clock: ShiftedClock, told: Told, file: Path) -> None:
    write(file, "5000\n")
    tracker = folder_of(clock, told, str(file))
    try:
        begin(tracker, 0, "", 1, -1)
        until(tracker, lambda: bool(told.job))
        tracker.end_round()
        assert told.job == [(0, 5000, False)], "it says that there is such a file, and how far the job had come"
        assert told.log == []
    finally:
        tracker.close()


def test_a_number_that_grows_is_progress_and_one_that_does_not_is_none(
    clock: ShiftedClock, told: Told, file: Path
) -> None:
    write(file, "100")
    tracker = folder_of(clock, told, str(file))
    try:
        begin(tracker, 1, "", 1, 90)
        until(tracker, lambda: told.job == [(1, 100, False)])
        write(file, " 200\n")
        until(tracker, lambda: len(told.job) == 2)
        assert told.job[-1] == (1, 200, True)
        assert told.log == [(200, True)]
        tracker.end_round()
        begin(tracker, 2, "", 1, 200)
        write(file, "150")
        until(tracker, lambda: told.log[-1] == (150, True))
        tracker.end_round()
        assert told.job[2:] == [(2, 200, False)]
    finally:
        tracker.close()


def test_of_a_file_without_a_number_the_time_of_its_change_counts(clock: ShiftedClock, told: Told, file: Path) -> None:
    write(file, "release")
    tracker = folder_of(clock, told, str(file))
    try:
        begin(tracker, 0, "", 1, -1)
        until(tracker, lambda: told.job == [(0, -1, False)])
        write(file, "release")
        until(tracker, lambda: len(told.job) == 2)
        assert told.job[-1] == (0, -1, True)
    finally:
        tracker.close()


def test_where_there_is_a_file_it_alone_counts_and_what_workers_say_is_shown(
    clock: ShiftedClock, told: Told, file: Path, call: Call, tmp_path: Path
) -> None:
    write(file, "10")
    tracker = folder_of(clock, told, str(file))
    try:
        begin(tracker, 0, str(tmp_path / "notices"), 1, -1)
        until(tracker, lambda: bool(told.job))
        call(17)
        tracker.end_round()
        assert told.job == [(0, 10, False)]
        latest = tracker.latest()
        assert latest is not None
        assert latest.step == 17
    finally:
        tracker.close()
