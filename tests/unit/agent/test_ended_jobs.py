"""An agent's record of how its job ended: a small file that only its user can have written."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.base.errors import JobPreempted, NodeLeftInOrder, SignalException
from rallypoint.control.protocol.errors import RendezvousClosedError, RendezvousTimeoutError
from rallypoint.failures.cause import Cause, Ending, Restarts
from rallypoint.failures.report import ChildFailedError
from rallypoint.features import local_jobs as module
from rallypoint.features.job_folders import FOLDER
from rallypoint.features.local_jobs import EndedJob, ended_jobs, record_end, record_if_killed
from rallypoint.rendezvous.handler import LocalJob
from rallypoint.workers.reaper.program import write_record

CAUSE = Cause(3, 1, "b", 42, 1, "ValueError: boom\nmore", "", 0.0, "")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path / f"rallypoint-{os.geteuid()}"


WORKERS: Any = SimpleNamespace(
    rendezvous=SimpleNamespace(local_job=lambda: LocalJob(os.getpid(), "job", "c10d", "node1:29400")),
    logs_specs=SimpleNamespace(run_log_dir="/logs/job_node1"),
    began_at=1e9,
    when_recorded=ExitStack(),
)
WORKERS.group = SimpleNamespace(placement=None, restarts=1)
WORKERS.group.spec = SimpleNamespace(
    max_restarts=3,
    rdzv_handler=SimpleNamespace(get_run_id=lambda: "job", get_backend=lambda: "c10d"),
    get_program_name=lambda: "train.py",
)


def record(error: BaseException | None) -> EndedJob:
    record_end(WORKERS, error)
    return next(ended_jobs())


@pytest.mark.parametrize(
    ("error", "outcome", "detail", "restarts", "ending"),
    [
        (None, "succeeded", "", 1, ""),
        (ChildFailedError("train.py", {}, CAUSE, restarts=Restarts(3, 3)), "failed", CAUSE.headline, 3, ""),
        (ChildFailedError("train.py", {}, CAUSE, ending=Ending.HANG), "failed", CAUSE.headline, 0, "HANG"),
        (RendezvousClosedError("a@b stopped it", ending=Ending.STOPPED), "stopped", "a@b stopped it", 1, "STOPPED"),
        (RendezvousClosedError("another job has this id"), "failed", "another job has this id", 1, ""),
        (RendezvousTimeoutError("too few nodes"), "failed", "too few nodes", 1, ""),
        (JobPreempted("the job was preempted"), "stopped", "the job was preempted", 1, "PREEMPTED"),
        (SignalException("got signal SIGTERM", Signals.SIGTERM), "stopped", "got signal SIGTERM", 1, "INFRASTRUCTURE"),
        (NodeLeftInOrder("this node has left", Signals.SIGTERM), "left", "this node has left", 1, "INFRASTRUCTURE"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt", 1, "STOPPED"),
        (ValueError("a\x1b[2J"), "failed", "a?[2J", 1, ""),
    ],
)
def test_endings(error: BaseException | None, outcome: str, detail: str, restarts: int, ending: str) -> None:
    found = record(error)
    assert found.job == LocalJob(os.getpid(), "job", "c10d", "node1:29400", "train.py", 1e9, os.getuid())
    assert found[2:] == (outcome, detail, -1, restarts, 3, "/logs/job_node1", ending)


def test_the_reaper_records_a_killed_agent() -> None:
    def set_record(folder: str, text: str) -> None:
        write_record(folder.encode(), os.getpid(), text.encode())

    reaper = SimpleNamespace(set_record=set_record)
    record_if_killed(SimpleNamespace(**vars(WORKERS), ensure_reaper=lambda: reaper), "")  # type: ignore[arg-type]
    (found,) = ended_jobs()
    assert (found.job.job, found.outcome, found.round, found.ending) == ("job", "killed", -1, "")
    assert found.detail.startswith("its agent was killed")
    assert found.seconds > 0


def test_the_folder_is_private_and_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ENDED", 3)
    for _ in range(5):
        record(None)
        newest = max(os.listdir(folder))
        os.rename(folder / newest, folder / f"{int(newest[:14]) - 10_000:014}-{len(os.listdir(folder))}")
    (folder / "00000000000001-7").write_text("old")
    (folder / "other").write_text("not ours")
    record(None)
    assert folder.stat().st_mode & 0o777 == 0o700
    kept = sorted(os.listdir(folder))
    assert len(kept) == 4
    assert kept[-1] == "other", "files with other names are not removed"
    assert "00000000000001-7" not in kept
    assert all((folder / name).stat().st_mode & 0o077 == 0 for name in kept[:-1])


def test_folders_open_to_others_are_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    expected = record(None)
    assert os.listdir(folder) == []
    (other,) = (path for path in folder.parent.iterdir() if path != folder)
    assert other.name.startswith(folder.name), "it has a second name"
    assert other.stat().st_mode & 0o777 == 0o700
    assert record(None).job == expected.job
    assert len(os.listdir(folder.parent)) == 2, "the second name is used again"
    folder.rmdir()
    other.rename(folder)
    folder.chmod(0o777)
    assert list(ended_jobs()) == []
    folder.rename(folder.with_name("moved"))
    folder.with_name("moved").chmod(0o700)
    folder.symlink_to(folder.with_name("moved"))
    assert list(ended_jobs()) == []


INVALID = {
    b"job": [b"\x1b[2J"],
    b"detail": [b"\xff", b"x" * 17000],
    b"outcome": [b"flown"],
    b"ending": [b"flown"],
    b"ended": [b"1e300", b"nan", b"1.0"],
    b"pid": [b"x"],
    b"round": [b""],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in INVALID.items() for value in values])
def test_invalid_records_are_ignored(folder: Path, field: bytes, value: bytes) -> None:
    expected = record(None)
    (name,) = os.listdir(folder)
    good = (folder / name).read_bytes()
    newer = folder / "99999999999999-7"
    newer.write_bytes(good)
    assert list(ended_jobs()) == [expected, expected]
    newer.write_bytes(re.sub(rb"(?m)^" + field + rb": .*$", lambda _: field + b": " + value, good))
    assert list(ended_jobs()) == [expected]
    newer.write_bytes(re.sub(rb"(?m)^" + field + rb": .*\n", b"", good))
    assert list(ended_jobs()) == [expected]
    newer.unlink()
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    assert list(ended_jobs()) == [], "links are not followed"
