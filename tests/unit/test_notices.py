"""Notices, progress and saves in a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rallypoint import notices
from tests.processes import completed
from tests.waiting import in_thread


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "notices"
    monkeypatch.setenv(notices.VARIABLE, str(found))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(notices, "_last_returned", None)
    return found


def post(folder: Path, text: str) -> None:
    """Post a notice as an agent does, atomically."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "new").write_text(text)
    (folder / "new").replace(folder / notices.NOTICE_FILE)


def notice(round_: int, deadline: float) -> str:
    found = {"reason": "preemption", "node": "b", "round": round_, "deadline": deadline, "number": 10 + round_}
    return json.dumps(found)


def test_pending(folder: Path) -> None:
    assert notices.pending() is None, "no folder yet"
    post(folder, notice(3, time.monotonic() + 60))
    seen = notices.pending()
    assert seen is not None
    assert (seen.reason, seen.node, seen.round, seen.number) == (notices.PREEMPTION, "b", 3, 13)
    assert 50 < seen.remaining() <= 60
    assert notices.pending() is seen, "read once"
    post(folder, notice(4, 0.0))
    again = notices.pending()
    assert again is not None
    assert again.round == 4
    assert again.remaining() == 0.0
    (folder / notices.NOTICE_FILE).unlink()
    assert notices.pending() is None


def progress_of(folder: Path) -> list[int]:
    """The progress file of local rank 2 as numbers."""
    return list(memoryview((folder / "progress.2").read_bytes()).cast("q"))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_progress_place", None)
    monkeypatch.setattr(notices, "_progress", None)
    monkeypatch.setattr(notices, "_looks_in", None)


@pytest.mark.process
def test_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.monotonic_ns()
    notices.progress(7)
    first = progress_of(folder)
    assert first[0] == first[2] == 7
    assert before <= first[1] == first[3] <= time.monotonic_ns()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", None)  # only the first call needs system calls
        notices.progress(9)
        notices.progress(8)
    step, at, began, began_at = progress_of(folder)
    assert (step, began, began_at) == (8, 7, first[3]), "the last step counts, even if it is smaller"
    assert at >= first[1]
    assert folder.stat().st_mode & 0o777 == 0o700
    code = "from rallypoint import notices; notices.progress(9)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert progress_of(folder)[::2] == [9, 7], "another process of the rank keeps the first step"


@pytest.mark.parametrize("step", [-1, 2**63, "7", None, float("nan"), object()])
def test_invalid_steps(folder: Path, step: int) -> None:
    notices.progress(step)
    assert progress_of(folder) == [-1, 0, -1, 0]


def test_progress_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    (tmp_path / "file").touch()
    for place in (None, "", str(tmp_path / "file"), str(tmp_path / "none" / "deep"), "/proc/none"):
        monkeypatch.delenv(notices.VARIABLE, raising=False)
        if place is not None:
            monkeypatch.setenv(notices.VARIABLE, place)
        notices.progress(3)
        notices.progress(4)


def test_a_worker_announces_that_it_looks_for_notices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rallyctl drain` then gives it time by default."""
    assert notices.pending() is None
    assert os.listdir(folder) == ["looks.2"]
    monkeypatch.setattr(os, "open", None)
    assert notices.pending() is None


def test_acknowledge(folder: Path) -> None:
    notices.acknowledge()
    assert not folder.exists(), "no notice"
    folder.mkdir(0o700)
    notices.acknowledge()
    assert os.listdir(folder) == [], "still none"
    post(folder, notice(3, time.monotonic() + 60))
    notices.acknowledge()
    notices.acknowledge()
    assert sorted(os.listdir(folder)) == [notices.ACK_PREFIX + "2.13", notices.NOTICE_FILE]


def test_acknowledge_the_pending_notice(folder: Path) -> None:
    post(folder, notice(3, time.monotonic() + 60))
    assert notices.pending() is not None
    (folder / notices.NOTICE_FILE).unlink()
    notices.acknowledge()
    assert os.listdir(folder) == ["looks.2"], "withdrawn meanwhile"
    post(folder, notice(4, time.monotonic() + 60))
    notices.acknowledge()
    assert (folder / "ack.2.13").exists(), "the save was older than the new notice"
    assert not (folder / "ack.2.14").exists()
    assert notices.pending() is not None
    notices.acknowledge()
    assert (folder / "ack.2.14").exists()


def test_acknowledge_an_unseen_notice(folder: Path) -> None:
    post(folder, notice(3, time.monotonic() + 60))
    assert notices.pending() is not None
    (folder / notices.NOTICE_FILE).unlink()
    assert notices.pending() is None
    post(folder, notice(4, time.monotonic() + 60))
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
def test_damaged_notices(folder: Path, text: str) -> None:
    post(folder, text)
    assert notices.pending() is None


def test_without_an_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    return sum("rallypoint-saving" in path for path in found)
with notices.saving(), notices.saving():
    os.kill(os.getpid(), signal.SIGTERM)
    print("saved", mark(), flush=True)
print("never")
"""


@pytest.mark.process
def test_saving_delays_sigterm() -> None:
    done = completed([sys.executable, "-c", SAVING])
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "saved 2\n"), done.stderr


def test_saving_keeps_other_handlers() -> None:
    signals: list[int] = []
    own = lambda number, _frame: signals.append(number)  # noqa: E731

    def save() -> bool:
        with notices.saving():
            return True

    try:
        with notices.saving():
            signal.signal(signal.SIGTERM, own)
        assert signal.getsignal(signal.SIGTERM) is own, "installed during the save"
        with notices.saving():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals == [signal.SIGTERM]
        assert in_thread(save)()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="full"), notices.saving():
        raise ValueError("full")
    assert os.listdir("/proc/self/fd") == before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.process
def test_few_imports() -> None:
    code = "import sys, rallypoint.notices as n; n.pending(); n.acknowledge(); print(*sorted(sys.modules))"
    done = completed([sys.executable, "-c", code], check=True)
    modules = done.stdout.split()
    allowed = {"rallypoint", "rallypoint.base", "rallypoint.notices"}
    allowed |= {"rallypoint.base.light_typing", "rallypoint.base.private_files"}
    assert {name for name in modules if name.startswith("rallypoint")} == allowed
    assert not {"json", "dataclasses", "logging", "socket"} & set(modules)
