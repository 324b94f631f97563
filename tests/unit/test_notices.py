"""A worker's view of a notice, with any environment and any folder contents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rallypoint import notices
from tests.processes import completed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "notices"
    monkeypatch.setenv(notices.VARIABLE, str(found))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(notices, "_last_returned", None)
    return found


def hang(folder: Path, text: str) -> None:
    """Post a notice as an agent does: whole or not at all."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "new").write_text(text)
    (folder / "new").replace(folder / notices.NOTICE_FILE)


def notice(round_: int, deadline: float) -> str:
    found = {"reason": "preemption", "node": "b", "round": round_, "deadline": deadline, "number": 10 + round_}
    return json.dumps(found)


def test_a_notice_is_seen_replaced_and_taken_back(folder: Path) -> None:
    assert notices.pending() is None, "there is no folder yet"
    hang(folder, notice(3, time.monotonic() + 60))
    seen = notices.pending()
    assert seen is not None
    assert (seen.reason, seen.node, seen.round, seen.number) == (notices.PREEMPTION, "b", 3, 13)
    assert 50 < seen.remaining() <= 60
    assert notices.pending() is seen, "it is read once"
    hang(folder, notice(4, 0.0))
    again = notices.pending()
    assert again is not None
    assert again.round == 4
    assert again.remaining() == 0.0
    (folder / notices.NOTICE_FILE).unlink()
    assert notices.pending() is None


def told(folder: Path) -> list[int]:
    """The progress file of local rank 2 as numbers."""
    return list(memoryview((folder / "progress.2").read_bytes()).cast("q"))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_progress_place", None)
    monkeypatch.setattr(notices, "_progress", None)
    monkeypatch.setattr(notices, "_looks_in", None)


@pytest.mark.usefixtures("fresh")
def test_progress_is_a_step_and_when_and_where_it_began(folder: Path) -> None:
    before = time.monotonic_ns()
    notices.progress(7)
    first = told(folder)
    assert first[0] == first[2] == 7
    assert before <= first[1] == first[3] <= time.monotonic_ns()
    notices.progress(9)
    notices.progress(8)
    step, at, began, began_at = told(folder)
    assert (step, began, began_at) == (8, 7, first[3]), "what is told last counts, even if it is less"
    assert at >= first[1]
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("fresh")
@pytest.mark.process
def test_a_process_that_joins_in_does_not_begin_anew(folder: Path) -> None:
    notices.progress(7)
    code = "from rallypoint import notices; notices.progress(9)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert told(folder)[::2] == [9, 7]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("step", [-1, 2**63, "7", None, float("nan"), object()])
def test_what_is_no_step_changes_nothing(folder: Path, step: int) -> None:
    notices.progress(step)
    assert told(folder) == [-1, 0, -1, 0]


@pytest.mark.usefixtures("fresh")
def test_progress_outside_of_a_job_and_where_nothing_can_be_written_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    (tmp_path / "file").touch()
    for place in (None, "", str(tmp_path / "file"), str(tmp_path / "none" / "deep"), "/proc/none"):
        monkeypatch.delenv(notices.VARIABLE, raising=False)
        if place is not None:
            monkeypatch.setenv(notices.VARIABLE, place)
        notices.progress(3)
        notices.progress(4)


@pytest.mark.usefixtures("fresh")
def test_progress_is_cheap_enough_for_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No system call but the first: the file may be opened no more."""
    notices.progress(1)
    monkeypatch.setattr(os, "open", None)
    notices.progress(2)
    assert told(folder)[0] == 2


@pytest.mark.usefixtures("fresh")
def test_a_worker_that_looks_for_notices_says_so_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `rallyctl drain` gives it time where the job names none."""
    assert notices.pending() is None
    assert os.listdir(folder) == ["looks.2"]
    monkeypatch.setattr(os, "open", None)
    assert notices.pending() is None


def test_an_acknowledgement_is_a_file_and_idempotent(folder: Path) -> None:
    notices.acknowledge()
    assert not folder.exists(), "nobody has asked"
    folder.mkdir(0o700)
    notices.acknowledge()
    assert os.listdir(folder) == [], "nor now"
    hang(folder, notice(3, time.monotonic() + 60))
    notices.acknowledge()
    notices.acknowledge()
    assert sorted(os.listdir(folder)) == [notices.ACK_PREFIX + "2.13", notices.NOTICE_FILE]


def test_an_acknowledgement_answers_the_notice_that_was_seen(folder: Path) -> None:
    hang(folder, notice(3, time.monotonic() + 60))
    assert notices.pending() is not None
    (folder / notices.NOTICE_FILE).unlink()
    notices.acknowledge()
    assert os.listdir(folder) == ["looks.2"], "it was taken back meanwhile"
    hang(folder, notice(4, time.monotonic() + 60))
    notices.acknowledge()
    assert (folder / "ack.2.13").exists(), "what was saved was saved before this one was out"
    assert not (folder / "ack.2.14").exists()
    assert notices.pending() is not None
    notices.acknowledge()
    assert (folder / "ack.2.14").exists()


def test_who_has_not_seen_the_notice_and_saves_with_the_others_answers_it_too(folder: Path) -> None:
    hang(folder, notice(3, time.monotonic() + 60))
    assert notices.pending() is not None
    (folder / notices.NOTICE_FILE).unlink()
    assert notices.pending() is None
    hang(folder, notice(4, time.monotonic() + 60))
    notices.acknowledge()
    assert sorted(os.listdir(folder)) == ["ack.2.14", "looks.2", notices.NOTICE_FILE]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", '{"reason": 1}', '{"reason":"","node":"","round":"x","deadline":0,"number":1}'),
        '{"reason":"","node":"","round":1e999,"deadline":0,"number":1}',
        '{"reason":"","node":"","round":1,"deadline":' + 400 * "9" + ',"number":1}',
        100_000 * "[",
    ],
)
def test_what_cannot_be_read_is_no_notice(folder: Path, text: str) -> None:
    hang(folder, text)
    assert notices.pending() is None


def test_without_an_agent_there_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (None, ""):
        monkeypatch.delenv(notices.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(notices.VARIABLE, value)
        assert notices.pending() is None
        notices.acknowledge()
    monkeypatch.setenv(notices.VARIABLE, str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    notices.acknowledge()
    assert os.listdir(tmp_path) == []


SAVING = """
import os, signal, sys, threading
from rallypoint import notices
def mark():
    found = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
    return sum("rallypoint-saving" in each for each in found)
with notices.saving(), notices.saving():
    os.kill(os.getpid(), signal.SIGTERM)
    print("saved", mark(), flush=True)
print("never")
"""


@pytest.mark.process
def test_sigterm_waits_for_a_save() -> None:
    done = completed([sys.executable, "-c", SAVING])
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "saved 2\n"), done.stderr


def test_a_save_leaves_a_handler_of_the_programs_own_and_other_threads_as_they_are() -> None:
    came: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    try:
        with notices.saving():
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)
    saved: list[bool] = []

    def save() -> None:
        with notices.saving():
            saved.append(True)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert saved == [True]
    assert signal.getsignal(signal.SIGTERM) == former


def test_a_handler_that_the_program_makes_during_a_save_stays() -> None:
    def own(_number: int, _frame: object) -> None:
        """The program's."""

    try:
        with notices.saving():
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_what_a_save_raises_is_raised_and_nothing_stays_open() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="full"), notices.saving():
        raise ValueError("full")
    assert os.listdir("/proc/self/fd") == before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.process
def test_it_brings_next_to_nothing_of_rallypoint_along() -> None:
    code = "import sys, rallypoint.notices as n; n.pending(); n.acknowledge(); print(*sorted(sys.modules))"
    done = completed([sys.executable, "-c", code], check=True)
    modules = done.stdout.split()
    allowed = {"rallypoint", "rallypoint.base", "rallypoint.notices"}
    allowed |= {"rallypoint.base.light_typing", "rallypoint.base.private_files"}
    assert {name for name in modules if name.startswith("rallypoint")} == allowed
    assert not {"json", "dataclasses", "logging", "socket"} & set(modules)
