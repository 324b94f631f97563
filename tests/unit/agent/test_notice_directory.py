"""The notice directory: its files, when acknowledgements become events, and that nothing is left of it."""

from __future__ import annotations

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
    directory = WorkerFolder(lambda: (0, 1), lambda request: None, clock=clock)
    monkeypatch.setenv(notices.VARIABLE, directory.reset())
    assert list(tmp_path.iterdir()) == [], "nothing is made before there is something to post"
    yield directory
    directory.clear()
    directory.clear()
    assert list(tmp_path.iterdir()) == []


def told(directory: WorkerFolder, awaited: tuple[int, ...] = (0, 1)) -> list[type]:
    directory._awaited = lambda: awaited
    return [type(event) for event in directory.step()]


def acknowledge(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    notices.acknowledge()


def readable(directory: WorkerFolder) -> bool:
    return bool(select.select(directory.fds(), [], [], 0)[0])


def test_all_who_are_awaited_must_acknowledge_and_each_wakes_us(
    directory: WorkerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.post(SCALE, "", 3, 30, waits=True)
    seen = notices.pending()
    assert seen is not None
    assert (seen.reason, seen.node, seen.round) == (SCALE, "", 3)
    assert told(directory) == []
    assert not readable(directory), "nothing to do before somebody acknowledges"
    acknowledge(0, monkeypatch)
    assert readable(directory)
    assert told(directory) == []
    acknowledge(1, monkeypatch)
    assert told(directory) == [WorkersReady]
    assert told(directory) == [], "once is enough"


def test_who_has_ended_need_not(directory: WorkerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.post(SCALE, "", 0, 30, waits=True)
    acknowledge(1, monkeypatch)
    assert told(directory, awaited=(0, 1)) == []
    assert told(directory, awaited=(1,)) == [WorkersReady]


def test_a_folder_that_a_worker_has_made_to_tell_of_its_progress_is_used_and_removed(
    directory: WorkerFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(notices, "_progress_place", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    notices.progress(3)
    directory.post(SCALE, "", 0, 60, waits=True)
    assert notices.pending() is not None
    acknowledge(0, monkeypatch)
    assert told(directory, (0,)) == [WorkersReady], "a progress file is no acknowledgement"
    directory.clear()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(notices.VARIABLE, directory.reset())
    notices.progress(4)
    assert list(tmp_path.iterdir()) != []


def test_the_time_is_over_once(directory: WorkerFolder, clock: HandClock) -> None:
    directory.post(SCALE, "", 0, 30, waits=True)
    assert told(directory) == []
    assert directory.wake_at() == clock.now + 30
    clock.now += 30
    assert told(directory) == [WorkersReady, TimerFired]
    assert told(directory) == []
    assert directory.wake_at() == float("inf")


def test_after_the_acknowledgements_the_time_still_ends(
    directory: WorkerFolder, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.post(PREEMPTION, "", 0, 30, waits=True)
    acknowledge(0, monkeypatch)
    assert told(directory, awaited=(0,)) == [WorkersReady]
    assert directory.wake_at() == clock.now + 30
    clock.now += 31
    assert told(directory, awaited=(0,)) == [TimerFired]


def test_of_two_preemptions_the_nearer_holds(directory: WorkerFolder, clock: HandClock) -> None:
    directory.post(SCALE, "", 0, 5, waits=True)
    directory.post(PREEMPTION, "b", 0, 30, waits=True)
    assert told(directory) == []
    assert directory.wake_at() == clock.now + 30, "another reason has its own time"
    directory.post(PREEMPTION, "c", 0, 60, waits=True)
    seen = notices.pending()
    assert seen is not None
    assert (seen.node, seen.deadline) == ("c", clock.now + 30)


def test_acknowledgements_count_for_the_next_notice_but_not_after_it_was_taken_back(
    directory: WorkerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.post(SCALE, "", 0, 30, waits=True)
    acknowledge(0, monkeypatch)
    directory.post(PREEMPTION, "", 0, 30, waits=True)
    assert told(directory, awaited=(0,)) == [WorkersReady]
    directory.withdraw()
    assert notices.pending() is None
    directory.post(SCALE, "", 0, 30, waits=True)
    assert told(directory, awaited=(0,)) == []


def test_an_acknowledgement_that_comes_late_does_not_answer_the_next_notice(
    directory: WorkerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.post(SCALE, "", 0, 30, waits=True)
    assert notices.pending() is not None, "a worker has seen it, and begins to save"
    directory.withdraw()
    acknowledge(0, monkeypatch)
    directory.post(SCALE, "", 0, 30, waits=True)
    assert told(directory, awaited=(0,)) == []
    acknowledge(0, monkeypatch)
    assert told(directory, awaited=(0,)) == [], "it was still for the first"
    assert notices.pending() is not None
    acknowledge(0, monkeypatch)
    assert told(directory, awaited=(0,)) == [WorkersReady]


@pytest.mark.parametrize("name", ["ack.", "ack.0", "ack.0.", "ack.x.1", "ack.0.x", "ack.0.1.1", "ack.0.2", "ack.0.0"])
def test_other_files_are_no_acknowledgements(directory: WorkerFolder, name: str) -> None:
    folder = Path(directory.reset())
    directory.post(SCALE, "", 0, 30, waits=True)
    (folder / name).touch()
    assert told(directory, awaited=(0,)) == []


def test_a_warning_waits_for_nobody(directory: WorkerFolder) -> None:
    directory.post(SCALE, "", 0, 30, waits=True)
    directory.post(PREEMPTION, "", 0, 30, waits=False)
    assert notices.pending() is not None
    assert (directory.fds(), directory.wake_at()) == ([], float("inf"))
    assert told(directory, awaited=()) == []


def test_each_start_of_workers_has_a_folder_of_its_own(directory: WorkerFolder, tmp_path: Path) -> None:
    first = directory.reset()
    directory.post(SCALE, "", 0, 30, waits=True)
    assert (Path(first).stat().st_mode & 0o777) == 0o700
    assert directory.reset() != first
    assert list(tmp_path.iterdir()) == []
    assert told(directory, awaited=()) == []


def test_workers_that_cannot_be_told_are_not_waited_for(directory: WorkerFolder, clock: HandClock) -> None:
    folder = Path(directory.reset())
    folder.write_text("in the way")
    directory.post(PREEMPTION, "", 0, 30, waits=True)
    assert told(directory) == [WorkersReady]
    assert directory.wake_at() == clock.now + 30, "the others may still need the time"
    folder.unlink()
