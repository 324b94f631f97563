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
    """The parts of an agent that its file needs."""

    began_at = JOB.began

    class group:
        class spec:
            get_program_name = staticmethod(lambda: JOB.script)

    def __init__(self, job: LocalJob = JOB) -> None:
        self.rendezvous = self
        self.job = job
        self.asked = 0
        self.listener: socket.socket | None = None
        self.served = threading.Event()

        self.open_to_commands = lambda: self.listener
        self.serve_commands = self.served.set

    def local_job(self) -> LocalJob:
        self.asked += 1
        return self.job


@contextmanager
def running(workers: Workers | None = None) -> Iterator[Workers]:
    """Keep an agent's file; waits until it exists."""
    workers = workers or Workers()
    written = LocalFile(workers)  # type: ignore[arg-type]
    written.open()
    try:
        if workers.job.endpoint:
            until(lambda: workers.job in list(local_jobs()), "the file exists")
        yield workers
    finally:
        written.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def test_jobs_are_found_while_their_agents_run(folder: Path) -> None:
    with running():
        assert list(local_jobs()) == list(local_jobs(own=True)) == [JOB]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [path.stat().st_mode & 0o777 for path in files(folder)] == [0o600]
    assert list(local_jobs()) == []
    assert files(folder) == []


def test_files_of_killed_agents_become_records(folder: Path) -> None:
    with running():
        (mine,) = files(folder)
        data = mine.read_bytes()
        lost = data.replace(b"pid: %d\n" % os.getpid(), b"pid: 7\n")
        for name in (f"running-7-{'0' * 16}", f"running-7-{'1' * 16}", "running"):
            (folder / name).write_bytes(lost)
        assert list(local_jobs()) == [JOB]
        record, other, kept = files(folder)
        assert [other.name, kept.name] == ["running", mine.name], "files with other names stay"
        assert record.stat().st_mode & 0o777 == 0o600
    (ended,) = ended_jobs()
    assert (ended.job, ended.outcome, ended.round) == (JOB._replace(pid=7), "killed", -1), "there is one record"
    assert ended.detail.startswith("all of its processes on this machine were killed at once")
    for _ in range(2):
        mine.write_bytes(data)
        assert list(local_jobs()) == []
    assert len(files(folder)) == 3, "and one record of this agent"


@pytest.mark.parametrize("given", ["secret", "token"])
def test_the_file_has_the_token_of_the_job(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """It admits commands; the secret, which other jobs share, is not in the file."""
    text = new_secret()
    expected = token(Secret((text,)), "job")
    monkeypatch.setattr("rallypoint.base.secrets._taken", {SECRET: text if given == "secret" else expected})
    with running():
        assert local_token(JOB) == expected
        assert local_token(JOB._replace(job="other")) == ""
        assert local_token(JOB._replace(pid=1)) == "", "another job may have the same id"
        assert text not in str(list(local_jobs()))
        assert expected not in str(list(local_jobs()))


def test_the_secret_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may be replaced while the job runs."""
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


def test_agents_without_an_endpoint_are_not_shown_and_try_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SOON", 0.001)
    workers = Workers(JOB._replace(endpoint=""))
    with running(workers):
        until(lambda: workers.asked > 2, "it has looked again")
        assert list(local_jobs()) == []
        workers.job = JOB
        until(lambda: list(local_jobs()) == [JOB], "the file exists")
    assert not caplog.text, "a node check may come first"


def test_files_are_renewed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines remove old files from folders of temporary files."""
    monkeypatch.setattr(module, "_DAY", 0.01)
    with running():
        os.utime(files(folder)[0], (1.0, 1.0))
        until(lambda: files(folder)[0].stat().st_mtime > 1e9, "it has a new time")
        with user_folders(os.geteuid()) as ((fd, _),):
            os.unlink(files(folder)[0].name, dir_fd=fd)
        until(lambda: list(local_jobs()) == [JOB], "it was written again")


def test_the_server_starts_at_the_first_connection() -> None:
    workers = Workers()
    with socket.create_server(("127.0.0.1", 0)) as workers.listener, running(workers):
        assert not workers.served.is_set()
        with socket.create_connection(workers.listener.getsockname()):
            assert workers.served.wait(60)


def test_server_starts_are_retried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)
    workers, tries = Workers(), list[int]()

    def serve() -> None:
        tries.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    workers.serve_commands = serve
    with (
        socket.create_server(("127.0.0.1", 0)) as workers.listener,
        running(workers),
        socket.create_connection(workers.listener.getsockname()),
    ):
        until(lambda: len(tries) >= 3, "it was tried three times")
    assert caplog.text.count("Too many open files") == 1
    assert len(tries) < 10, "the pauses grow"


def test_the_job_continues_without_a_thread(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with running(Workers(JOB._replace(endpoint=""))):
        pass
    assert "can't start new thread" in caplog.text


def test_a_disk_that_hangs_delays_the_end_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A file that a process holds, as an agent does. It gets its name when it is held: agents remove others."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(data)
    with open(draft, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        draft.rename(path)
        yield path
    path.unlink(missing_ok=True)


BAD: dict[str, list[bytes]] = {
    "job": [b"\x1b[2J"],
    "script": [b"\xff"],
    "endpoint": [b"x" * 17000],
    "pid": [b"9" * 5000, b"0", b"-1", b"4294967297"],
    "began": [b"nan", b"inf", b"-1e300", b"long ago"],
    "network": [b"1"],  # another loopback
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_invalid_files_are_ignored(folder: Path, field: str, value: bytes) -> None:
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


def test_links_pipes_and_folders_are_ignored(folder: Path, tmp_path: Path) -> None:
    with running(), held(tmp_path / "elsewhere", files(folder)[0].read_bytes()) as elsewhere:
        (folder / f"running-7-{'0' * 16}").symlink_to(elsewhere)
        os.mkfifo(folder / f"running-8-{'0' * 16}")
        (folder / f"running-9-{'0' * 16}").mkdir()
        assert list(local_jobs()) == [JOB]


def test_folders_open_to_others_are_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with running():
        assert files(folder) == []
        (second,) = (path for path in folder.parent.iterdir() if path != folder)
        assert re.fullmatch(rf"{folder.name}-[0-9a-f]{{16}}", second.name)
        with running():
            until(lambda: list(local_jobs()) == [JOB, JOB], "both are found")
            assert len(files(second)) == 2, "the second name is used again"
        second.chmod(0o755)
        assert list(local_jobs()) == []
        second.chmod(0o700)


def test_jobs_are_found_whatever_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER)
    monkeypatch.setattr(job_folders, "_SHARED", str(tmp_path / "shared"))
    for name in ("shared", "one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "one"))
    with running():
        monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
        assert list(local_jobs()) == [JOB]
    (tmp_path / "shared").rename(tmp_path / "away")
    with running():
        assert [path.name for path in (tmp_path / "other").iterdir()] == [f"rallypoint-{os.geteuid()}"]
