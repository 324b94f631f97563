"""Commands find the agents of this machine by their files, and distrust all other files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.base.errors import UsageError
from rallypoint.base.secrets import SECRET, Secret, new_secret, read_job_secret, token
from rallypoint.features import job_folders
from rallypoint.features import local_jobs as module
from rallypoint.features.job_folders import FOLDER, user_folders
from rallypoint.features.local_jobs import LocalFile, ended_jobs, local_jobs, local_token
from rallypoint.rendezvous.handler import LocalJob
from tests.waiting import until

JOB = LocalJob(os.getpid(), "job", "c10d", "127.0.0.1:29400", "train.py", 1e9 + 0.25, os.geteuid())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr("rallypoint.base.secrets._taken", {})
    return tmp_path / f"rallypoint-{os.geteuid()}"


class Workers:
    """As much of an agent as its file needs."""

    began_at = JOB.began

    class group:
        class spec:
            get_program_name = staticmethod(lambda: JOB.script)

    def __init__(self, job: LocalJob | None = JOB) -> None:
        self.rendezvous = self
        self.job = job
        self.asked = 0
        self.listener: socket.socket | None = None
        self.served = threading.Event()

    def local_job(self) -> LocalJob | None:
        self.asked += 1
        return self.job

    def open_to_commands(self) -> socket.socket | None:
        return self.listener

    def serve_commands(self) -> None:
        self.served.set()


@contextmanager
def running(workers: Workers | None = None) -> Iterator[Workers]:
    """An agent's file, once it is there."""
    workers = workers or Workers()
    written = LocalFile(workers)  # type: ignore[arg-type]
    written.open()
    try:
        if workers.job is not None and workers.job.endpoint:
            until(lambda: workers.job in list(local_jobs()), "the file is there")
        yield workers
    finally:
        written.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def test_a_job_is_found_while_its_agent_runs(folder: Path) -> None:
    with running():
        assert list(local_jobs()) == list(local_jobs(own=True)) == [JOB]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [each.stat().st_mode & 0o777 for each in files(folder)] == [0o600]
    assert list(local_jobs()) == []
    assert files(folder) == []


def test_what_a_killed_agent_has_left_is_not_found_and_is_removed(folder: Path) -> None:
    with running():
        (mine,) = files(folder)
        lost = mine.read_bytes().replace(b"pid: %d\n" % os.getpid(), b"pid: 7\n")
        for name in (f"running-7-{'0' * 16}", f"running-7-{'1' * 16}", "running"):
            (folder / name).write_bytes(lost)
        assert list(local_jobs()) == [JOB]
        record, other, kept = files(folder)
        assert [other.name, kept.name] == ["running", mine.name], "what has another name stays"
        assert record.stat().st_mode & 0o777 == 0o600
    (ended,) = ended_jobs()
    assert (ended.job, ended.outcome, ended.round) == (JOB._replace(pid=7), "killed", -1), "once"
    assert ended.detail.startswith("all of its processes on this machine were killed at once")


def test_what_an_agent_has_left_that_has_a_record_is_removed_alone(folder: Path) -> None:
    with running():
        (mine,) = files(folder)
        text = mine.read_bytes()
    for _ in range(2):
        (folder / mine.name).write_bytes(text)
        assert list(local_jobs()) == []
    assert len(files(folder)) == 1


@pytest.mark.parametrize("given", ["secret", "token"])
def test_who_may_read_it_gets_the_jobs_token(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """With it, commands are taken; the secret itself, which is other jobs' too, is not told."""
    text = new_secret()
    expected = token(Secret((text,)), "job")
    monkeypatch.setattr("rallypoint.base.secrets._taken", {SECRET: text if given == "secret" else expected})
    with running():
        assert local_token(JOB) == expected
        assert local_token(JOB._replace(job="other")) == ""
        assert local_token(JOB._replace(pid=1)) == "", "another job may have the same id"
        assert text not in str(list(local_jobs()))
        assert expected not in str(list(local_jobs()))


def test_the_secret_is_read_once_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may be replaced, or mounted anew, while the job runs."""
    file, text = tmp_path / "secret", new_secret()
    file.write_text(text)
    file.chmod(0o600)
    monkeypatch.setenv(f"{SECRET}_FILE", str(file))
    read_job_secret()
    file.unlink()
    with running():
        assert local_token(JOB) == token(Secret((text,)), "job")
    with pytest.raises(UsageError, match="cannot be read"):
        read_job_secret()


def test_an_agent_whose_endpoint_is_unknown_is_not_shown_and_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SOON", 0.001)
    workers = Workers(JOB._replace(endpoint=""))
    with running(workers):
        until(lambda: workers.asked > 2, "it has looked again")
        assert list(local_jobs()) == []
        workers.job = JOB
        until(lambda: list(local_jobs()) == [JOB], "the file is there")
    assert not caplog.text, "a node check may come first: nothing is wrong"


def test_a_file_that_was_removed_is_written_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DAY", 0.01)
    with running():
        first = files(folder)[0].name
        with user_folders(os.geteuid()) as ((fd, _),):
            os.unlink(first, dir_fd=fd)
        until(lambda: list(local_jobs()) == [JOB], "the file is there again")


def test_a_file_is_not_as_old_as_its_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is old is removed from many a folder of temporary files."""
    monkeypatch.setattr(module, "_DAY", 0.01)
    with running():
        os.utime(files(folder)[0], (1.0, 1.0))
        until(lambda: files(folder)[0].stat().st_mtime > 1e9, "it has a new time")


def test_the_server_starts_when_somebody_connects() -> None:
    workers = Workers()
    with socket.create_server(("127.0.0.1", 0)) as workers.listener, running(workers):
        assert not workers.served.is_set()
        with socket.create_connection(workers.listener.getsockname()):
            assert workers.served.wait(60)


def test_a_server_that_cannot_start_is_tried_again_and_not_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    workers, tries, third = Workers(), [0], threading.Event()

    def serve() -> None:
        tries[0] += 1
        if tries[0] >= 3:
            third.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(workers, "serve_commands", serve)
    with (
        socket.create_server(("127.0.0.1", 0)) as workers.listener,
        running(workers),
        socket.create_connection(workers.listener.getsockname()),
    ):
        assert third.wait(60)
    assert caplog.text.count("Too many open files") == 1, "it is said once"
    assert tries[0] < 10, "the pauses grow"


def test_without_a_thread_the_job_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    written = LocalFile(Workers())  # type: ignore[arg-type]
    written.open()
    written.close()
    written.close()
    assert "can't start new thread" in caplog.text


def test_a_disk_that_does_not_answer_delays_the_end_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.01)
    answers, asked = threading.Event(), threading.Event()

    def hang() -> str:
        asked.set()
        answers.wait(60)
        raise OSError(errno.EIO, "it has answered")

    monkeypatch.setattr(module, "make_folder", hang)
    written = LocalFile(Workers())  # type: ignore[arg-type]
    written.open()
    assert asked.wait(60)
    written.close()
    answers.set()
    until(lambda: not written._thread.is_alive(), "the thread ends too")
    written.close()


@contextmanager
def held(path: Path, data: bytes) -> Iterator[Path]:
    """A file that a process holds, as an agent does: it has the name once it is held, or an agent that has just
    started would remove it.
    """
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(data)
    with open(draft, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        draft.rename(path)
        yield path
    path.unlink(missing_ok=True)


BAD = [
    ("job", b"\x1b[2J"),
    ("script", b"\xff"),
    ("endpoint", b"x" * 17000),
    ("pid", b"9" * 5000),
    ("pid", b"0"),
    ("pid", b"-1"),
    ("pid", b"4294967297"),
    ("began", b"nan"),
    ("began", b"inf"),
    ("began", b"-1e300"),
    ("began", b"long ago"),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_what_no_agent_writes_is_passed_over(folder: Path, field: str, value: bytes) -> None:
    with running():
        good = files(folder)[0].read_bytes()
        other = folder / f"running-7-{'0' * 16}"
        with held(other, good):
            assert list(local_jobs()) == [JOB, JOB]
        bad = re.sub(rb"(?m)^%s: .*$" % field.encode(), lambda _: b"%s: %s" % (field.encode(), value), good)
        missing = re.sub(rb"(?m)^%s: .*\n" % field.encode(), b"", good)
        for data in (bad, missing, b"", b"\n" * 10):
            with held(other, data):
                assert list(local_jobs()) == [JOB]


def test_an_agent_in_another_network_is_not_found(folder: Path) -> None:
    """Its loopback is another."""
    with running():
        good = files(folder)[0].read_bytes()
        with held(folder / f"running-7-{'0' * 16}", re.sub(rb"network: \d+", b"network: 1", good)):
            assert list(local_jobs()) == [JOB]


def test_what_is_no_file_is_passed_over(folder: Path, tmp_path: Path) -> None:
    with running(), held(tmp_path / "elsewhere", files(folder)[0].read_bytes()) as elsewhere:
        (folder / f"running-7-{'0' * 16}").symlink_to(elsewhere)
        os.mkfifo(folder / f"running-8-{'0' * 16}")
        (folder / f"running-9-{'0' * 16}").mkdir()
        assert list(local_jobs()) == [JOB]


def test_a_folder_that_others_may_enter_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with running():
        assert files(folder) == []
        (second,) = (each for each in folder.parent.iterdir() if each != folder)
        assert re.fullmatch(rf"{folder.name}-[0-9a-f]{{16}}", second.name)
        with running():
            until(lambda: list(local_jobs()) == [JOB, JOB], "both are found")
            assert len(files(second)) == 2, "the second name is used again"
        second.chmod(0o755)
        assert list(local_jobs()) == []
        second.chmod(0o700)


def test_without_the_variable_a_job_is_found_whatever_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER)
    monkeypatch.setattr(job_folders, "_SHARED", str(tmp_path / "shared"))
    for name in ("shared", "one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "one"))
    with running():
        monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
        assert list(local_jobs()) == [JOB]
    (tmp_path / "shared").rename(tmp_path / "away")  # as where there is no such folder
    with running():
        assert [each.name for each in (tmp_path / "other").iterdir()] == [f"rallypoint-{os.geteuid()}"]
