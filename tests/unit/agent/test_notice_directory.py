"""The notice directory: its files, which acknowledgements become events, and that nothing remains of it."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint import notices
from rallypoint.agent.folder import WorkerFolder
from rallypoint.agent.steps import TimerFired, WorkersReady
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.notices import PREEMPTION, SCALE
from tests.unit.clocks import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock(SYSTEM_CLOCK.monotonic())


@pytest.fixture
def directory(tmp_path: Path, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerFolder]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(notices, "_last_returned", None)
    monkeypatch.setattr(notices, "_progress_place", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    directory = WorkerFolder(lambda: (0, 1), lambda request: None, clock=clock)
    monkeypatch.setenv(notices.VARIABLE, directory.reset())
    assert list(tmp_path.iterdir()) == [], "the folder is made with the first notice"
    yield directory
    directory.clear()
    directory.clear()
    assert list(tmp_path.iterdir()) == []


def acknowledge(rank: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # the fixture restores it
    notices.acknowledge()


def events(directory: WorkerFolder, *awaited: int) -> list[type]:
    directory._awaited = lambda: awaited
    return [type(event) for event in directory.step()]


def pending() -> notices.Notice:
    notice = notices.pending()
    assert notice is not None
    return notice


def test_all_running_workers_must_acknowledge(directory: WorkerFolder) -> None:
    directory.post(SCALE, "", 3, 30, waits=True)
    notice = pending()
    assert (notice.reason, notice.node, notice.round) == (SCALE, "", 3)
    assert events(directory, 0, 1) == []
    assert select.select(directory.fds(), [], [], 0)[0] == [], "nothing to do before the first acknowledgement"
    acknowledge(0)
    assert select.select(directory.fds(), [], [], 0)[0]
    assert events(directory, 0, 1) == []
    acknowledge(1)
    assert events(directory, 0, 1) == [WorkersReady]
    assert events(directory, 0, 1) == [], "there is one event"
    directory.withdraw()
    directory.post(SCALE, "", 0, 30, waits=True)
    pending()
    acknowledge(1)
    assert events(directory, 0, 1) == []
    assert events(directory, 1) == [WorkersReady], "worker 0 has ended"


def test_progress_files_in_the_folder(directory: WorkerFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notices.progress(3)
    directory.post(SCALE, "", 0, 60, waits=True)
    pending()
    assert events(directory, 0) == [], "a progress file is no acknowledgement"
    acknowledge(0)
    assert events(directory, 0) == [WorkersReady]
    directory.clear()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(notices.VARIABLE, directory.reset())
    notices.progress(4)
    assert list(tmp_path.iterdir()) != []


def test_the_time_ends_once_also_after_acknowledgements(directory: WorkerFolder, clock: HandClock) -> None:
    directory.post(SCALE, "", 0, 30, waits=True)
    assert events(directory, 0, 1) == []
    assert directory.wake_at() == clock.now + 30
    clock.now += 30
    assert events(directory, 0, 1) == [WorkersReady, TimerFired]
    assert events(directory, 0, 1) == []
    assert directory.wake_at() == float("inf")
    directory.withdraw()
    directory.post(PREEMPTION, "", 0, 30, waits=True)
    pending()
    acknowledge(0)
    assert events(directory, 0) == [WorkersReady]
    assert directory.wake_at() == clock.now + 30
    clock.now += 31
    assert events(directory, 0) == [TimerFired]


def test_the_nearer_of_two_preemptions_counts(directory: WorkerFolder, clock: HandClock) -> None:
    directory.post(SCALE, "", 0, 5, waits=True)
    directory.post(PREEMPTION, "b", 0, 30, waits=True)
    assert events(directory, 0, 1) == []
    assert directory.wake_at() == clock.now + 30, "another reason has its own time"
    directory.post(PREEMPTION, "c", 0, 60, waits=True)
    assert (pending().node, pending().deadline) == ("c", clock.now + 30)


def test_acknowledgements_count_for_the_next_notice_until_a_withdrawal(directory: WorkerFolder) -> None:
    directory.post(SCALE, "", 0, 30, waits=True)
    acknowledge(0)
    directory.post(PREEMPTION, "", 0, 30, waits=True)
    assert events(directory, 0) == [WorkersReady]
    pending()  # the worker has seen it, and begins to save
    directory.withdraw()
    assert notices.pending() is None
    directory.post(SCALE, "", 0, 30, waits=True)
    assert events(directory, 0) == []


def test_a_late_acknowledgement_does_not_answer_the_next_notice(directory: WorkerFolder) -> None:
    directory.post(SCALE, "", 0, 30, waits=True)
    pending()  # the worker has seen it, and begins to save
    directory.withdraw()
    for _ in range(2):
        acknowledge(0)
        directory.post(SCALE, "", 0, 30, waits=True)
        assert events(directory, 0) == [], "it was for the first notice"
    pending()
    acknowledge(0)
    assert events(directory, 0) == [WorkersReady]


def test_other_files_are_no_acknowledgements(directory: WorkerFolder) -> None:
    folder = Path(directory.reset())
    directory.post(SCALE, "", 0, 30, waits=True)
    for name in ("ack.", "ack.0", "ack.0.", "ack.x.1", "ack.0.x", "ack.0.1.1", "ack.0.2", "ack.0.0"):
        (folder / name).touch()
        assert events(directory, 0) == [], name


def test_a_warning_waits_for_nobody(directory: WorkerFolder) -> None:
    directory.post(SCALE, "", 0, 30, waits=True)
    directory.post(PREEMPTION, "", 0, 30, waits=False)
    pending()
    assert (directory.fds(), directory.wake_at()) == ([], float("inf"))
    assert events(directory) == []


def test_each_start_of_workers_has_its_own_private_folder(directory: WorkerFolder, tmp_path: Path) -> None:
    first = directory.reset()
    directory.post(SCALE, "", 0, 30, waits=True)
    assert (Path(first).stat().st_mode & 0o777) == 0o700
    assert directory.reset() != first
    assert list(tmp_path.iterdir()) == []
    assert events(directory) == []


def test_workers_that_cannot_be_notified_are_not_waited_for(directory: WorkerFolder, clock: HandClock) -> None:
    folder = Path(directory.reset())
    folder.write_text("in the way")
    directory.post(PREEMPTION, "", 0, 30, waits=True)
    assert events(directory, 0, 1) == [WorkersReady]
    assert directory.wake_at() == clock.now + 30, "the others may still need the time"
    folder.unlink()
