"""An agent's record of its job: how it ended, in a small file that only its user can have written."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from signal import Signals

import pytest

from rallypoint.agent.launch import elastic_launch
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


class Workers:
    """As much of an agent as is left of it at its end."""

    class rendezvous:
        @staticmethod
        def local_job() -> LocalJob:
            return LocalJob(os.getpid(), "job", "c10d", "node1:29400")

    class logs_specs:
        run_log_dir = "/logs/job_node1"

    began_at = 1e9
    when_recorded = ExitStack()

    class group:
        placement = None
        restarts = 1

        class spec:
            max_restarts = 3

            class rdzv_handler:
                get_run_id = staticmethod(lambda: "job")
                get_backend = staticmethod(lambda: "c10d")

            get_program_name = staticmethod(lambda: "train.py")


def left(error: BaseException | None) -> EndedJob:
    record_end(Workers(), error)  # type: ignore[arg-type]
    return next(ended_jobs())


@pytest.mark.parametrize(
    ("error", "outcome", "detail", "restarts", "ending"),
    [
        (None, "succeeded", "", 1, ""),
        (
            ChildFailedError("train.py", {}, CAUSE, restarts=Restarts(3, 3)),
            "failed",
            "rank 3 failed on b (exit code 1): ValueError: boom",
            3,
            "",
        ),
        (ChildFailedError("train.py", {}, CAUSE, ending=Ending.HANG), "failed", CAUSE.headline, 0, "HANG"),
        (
            RendezvousClosedError("a@b stopped the job", ending=Ending.STOPPED),
            "stopped",
            "a@b stopped the job",
            1,
            "STOPPED",
        ),
        (RendezvousClosedError("another job has this id"), "failed", "another job has this id", 1, ""),
        (RendezvousTimeoutError("too few nodes"), "failed", "too few nodes", 1, ""),
        (JobPreempted("the job was preempted"), "stopped", "the job was preempted", 1, "PREEMPTED"),
        (SignalException("got signal SIGTERM", Signals.SIGTERM), "stopped", "got signal SIGTERM", 1, "INFRASTRUCTURE"),
        (NodeLeftInOrder("this node has left", Signals.SIGTERM), "left", "this node has left", 1, "INFRASTRUCTURE"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt", 1, "STOPPED"),
        (ValueError("a\x1b[2J"), "failed", "a?[2J", 1, ""),
    ],
)
def test_how_a_job_has_ended_is_left(
    error: BaseException | None, outcome: str, detail: str, restarts: int, ending: str
) -> None:
    found = left(error)
    assert found.job == LocalJob(os.getpid(), "job", "c10d", "node1:29400", "train.py", 1e9, os.getuid())
    assert found[2:] == (outcome, detail, -1, restarts, 3, "/logs/job_node1", ending)


@pytest.mark.process
def test_a_launch_leaves_it() -> None:
    from rallypoint import LaunchConfig

    config = LaunchConfig(1, 1, 1, run_id="launched", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    elastic_launch(config, "true")()
    with pytest.raises(ChildFailedError):
        elastic_launch(config, "false")()
    failed, succeeded = ended_jobs()
    assert [each.job.job for each in (failed, succeeded)] == ["launched", "launched"]
    assert (succeeded.outcome, succeeded.round, succeeded.job.script) == ("succeeded", 0, "true")
    assert (failed.outcome, failed.job.script) == ("failed", "false")
    assert failed.detail.startswith("rank 0 failed on ")
    assert 0 <= failed.seconds < 60


def test_the_reaper_of_an_agent_that_is_killed_leaves_it() -> None:
    class Reaper:
        @staticmethod
        def set_record(folder: str, text: str) -> None:
            write_record(folder.encode(), os.getpid(), text.encode())

    workers = Workers()
    workers.ensure_reaper = Reaper  # type: ignore[attr-defined]
    record_if_killed(workers, "")  # type: ignore[arg-type]
    (found,) = ended_jobs()
    assert (found.job.job, found.outcome, found.round, found.ending) == ("job", "killed", -1, "")
    assert found.detail.startswith("its agent was killed")
    assert found.seconds > 0


def test_the_folder_is_for_its_user_and_holds_so_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ENDED", 3)
    for _ in range(5):
        left(None)
        newest = max(os.listdir(folder))
        os.rename(folder / newest, folder / f"{int(newest[:14]) - 10_000:014}-{len(os.listdir(folder))}")
    (folder / "00000000000001-7").write_text("old")
    (folder / "other").write_text("not ours")
    left(None)
    assert folder.stat().st_mode & 0o777 == 0o700
    kept = sorted(os.listdir(folder))
    assert len(kept) == 4
    assert kept[-1] == "other", "what has another name is not removed"
    assert "00000000000001-7" not in kept
    assert all((folder / each).stat().st_mode & 0o077 == 0 for each in kept[:-1])


def test_a_folder_that_others_can_enter_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    expected = left(None)
    assert os.listdir(folder) == []
    (other,) = (each for each in folder.parent.iterdir() if each != folder)
    assert other.name.startswith(folder.name), "it has a second name"
    assert other.stat().st_mode & 0o777 == 0o700
    assert left(None).job == expected.job
    assert len(os.listdir(folder.parent)) == 2, "the second name is used again"
    folder.rmdir()
    other.rename(folder)
    folder.chmod(0o777)
    assert list(ended_jobs()) == []
    folder.rename(folder.with_name("moved"))
    folder.with_name("moved").chmod(0o700)
    folder.symlink_to(folder.with_name("moved"))
    assert list(ended_jobs()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"job", b"\x1b[2J"),
        (b"detail", b"\xff"),
        (b"detail", b"x" * 17000),
        (b"outcome", b"flown"),
        (b"ending", b"flown"),
        (b"ended", b"1e300"),
        (b"ended", b"nan"),
        (b"ended", b"1.0"),
        (b"pid", b"x"),
        (b"round", b""),
    ],
)
def test_what_is_no_record_is_passed_over(folder: Path, field: bytes, value: bytes) -> None:
    expected = left(None)
    (name,) = os.listdir(folder)
    good = (folder / name).read_bytes()
    newer = folder / "99999999999999-7"
    newer.write_bytes(good)
    assert list(ended_jobs()) == [expected, expected]
    newer.write_bytes(re.sub(rb"(?m)^" + field + rb": .*$", lambda _: field + b": " + value, good))
    assert list(ended_jobs()) == [expected]
    newer.write_bytes(re.sub(rb"(?m)^" + field + rb": .*\n", b"", good))
    assert list(ended_jobs()) == [expected]


def test_a_link_is_not_followed(folder: Path) -> None:
    left(None)
    (name,) = os.listdir(folder)
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    assert list(ended_jobs()) == []
