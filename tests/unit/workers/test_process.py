"""One worker process: how it ends, and that its process group ends with it."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.base.errors import RallypointError, UserError
from rallypoint.base.process_table import read_stat
from rallypoint.workers.process import UNKNOWN_EXIT, ChildProcess, WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient, ReaperLost

pytestmark = pytest.mark.process

TIMEOUT = 120.0
"""Seconds."""
EXITS = 200


@contextmanager
def guarded() -> Iterator[ReaperClient]:
    """A reaper, and the check that it is gone afterwards."""
    reaper = ReaperClient()
    try:
        yield reaper
    finally:
        reaper.close()
        assert not Path(f"/proc/{reaper.pid}").exists()


@contextmanager
def running(*argv: str, stdout: int | None = None) -> Iterator[WorkerProcess]:
    with guarded() as reaper:
        process = WorkerProcess(reaper, argv, os.environ, stdout)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.signal(signal.SIGKILL)
                ends(process)
            process.release()


def ends(process: ChildProcess) -> int:
    """Wait for the end; returns the exit code."""
    poller = select.poll()
    poller.register(process.fileno(), select.POLLIN)
    assert poller.poll(TIMEOUT * 1000), f"process {process.pid} did not end"
    code = process.poll()
    assert code is not None
    return code


def parent_of(pid: int) -> int:
    """The reaper itself, of a worker; the supervisor, of a reaper."""
    stat = read_stat(pid)
    assert stat is not None
    return stat.parent


def test_signals_reach_only_running_workers() -> None:
    with running("sleep", "600") as stopped, running("true") as ended:
        assert os.getsid(stopped.pid) == os.getpgid(stopped.pid) == stopped.pid
        assert ends(ended) == 0
        for process in (stopped, ended):
            assert not process.signalled
            process.signal(signal.SIGTERM)
        assert stopped.signalled
        assert not ended.signalled, "it had ended by itself"
        ended.release()
        ended.release()
        ended.forward_signal(signal.SIGKILL)
        assert ended.poll() == 0


def test_programs_and_arguments_that_cannot_be_run(reaper: ReaperClient, tmp_path: Path) -> None:
    plain, text = tmp_path / "plain", tmp_path / "text"
    for path, mode in ((plain, 0o644), (text, 0o755)):
        path.write_text("text")
        path.chmod(mode)
    for argv, words in (
        (["no-such-program"], r"'no-such-program' was not found; .*PATH"),
        ([str(plain)], r"plain' is not executable; run 'chmod \+x"),
        ([str(text)], r"text' cannot be run: Exec format error"),
        (["true", "x" * 200_000], r"'true' cannot be run: its arguments and environment are too long"),
        (["true", "a\0b"], r"'a\\x00b' contains a null byte"),
    ):
        with pytest.raises(UserError, match=words):
            WorkerProcess(reaper, argv, os.environ)
    with pytest.raises(UserError, match=r"'a=b' contains a '=', which a variable name can"):
        WorkerProcess(reaper, ["true"], {"a=b": ""})


@pytest.mark.parametrize("spare", [0, 1])
def test_a_shortage_of_descriptors_is_no_error_of_the_program(reaper: ReaperClient, spare: int) -> None:
    """With `spare` descriptors left: none for the request, or none for the answer."""
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    reaper.signals_received()
    highest = os.dup(0)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + spare if spare else 0, former[1]))
    try:
        with pytest.raises(RallypointError, match=r"for 'sleep': Too many open files; check .*ulimit -n") as raised:
            WorkerProcess(reaper, ["sleep", "600"], os.environ)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)
    assert not isinstance(raised.value, UserError)
    fd = reaper.begin_sweep()
    assert os.read(fd, 1), "a process that was started nevertheless is ended"
    os.close(fd)


def test_exits_are_unknown_without_the_reaper(reaper: ReaperClient) -> None:
    ended = WorkerProcess(reaper, ["true"], os.environ)
    killed = WorkerProcess(reaper, ["sleep", "600"], os.environ)
    assert select.select([ended.fileno()], [], [], TIMEOUT)[0]
    os.kill(parent_of(killed.pid), signal.SIGKILL)
    assert select.select([reaper.fileno()], [], [], TIMEOUT)[0]
    assert reaper.lost
    assert "killed by SIGKILL; " in reaper.lost_reason
    assert "OOM killer" in reaper.lost_reason
    assert ended.poll() == UNKNOWN_EXIT
    assert ended.orphaned
    killed.signal(signal.SIGKILL)
    assert ends(killed) == -signal.SIGKILL
    assert not killed.orphaned
    with pytest.raises(ReaperLost, match="which starts the workers and ends what they leave behind, was lost"):
        WorkerProcess(reaper, ["true"], os.environ)
    ended.release()
    killed.release()


def test_processors_of_a_worker(reaper: ReaperClient) -> None:
    with pytest.raises(RallypointError, match="Invalid argument"):
        WorkerProcess(reaper, ["true"], os.environ, cpus={1023})
    allowed = os.sched_getaffinity(0)
    text = "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"
    for cpus, expected in (({max(allowed)}, [max(allowed)]), ((), sorted(allowed))):
        read, write = os.pipe()
        process = WorkerProcess(reaper, [sys.executable, "-c", text], os.environ, write, cpus=cpus)
        os.close(write)
        with open(read) as shown:
            assert shown.read() == f"{expected}\n"
        process.release()


def test_two_threads_get_the_same_exit() -> None:
    """The reaper reports an exit once, so both must not ask it; callers of our API may have threads."""
    with guarded() as reaper, ThreadPoolExecutor(2) as pool:
        for _ in range(EXITS):
            process = WorkerProcess(reaper, ("true",), os.environ)
            try:
                assert list(pool.map(lambda _, process=process: ends(process), range(2))) == [0, 0]
            finally:
                process.release()
