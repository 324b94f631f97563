"""One worker process: how it ended, and that its leftovers in its group end with it."""

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


def python(text: str) -> tuple[str, str, str]:
    return sys.executable, "-c", text


def ends(process: ChildProcess) -> int:
    """Wait for the end by the descriptor; returns the exit code."""
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


def gone(fd: int) -> bool:
    """Whether all who could write to the pipe have ended, within the timeout of the test."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while poller.poll(TIMEOUT * 1000):
        if not os.read(fd, 4096):
            return True
    return False


def test_once_it_has_ended_its_number_is_used_for_nothing() -> None:
    with running("true") as process:
        assert ends(process) == 0
        process.signal(signal.SIGKILL)
        assert not process.signalled
        process.release()
        process.release()
        process.forward_signal(signal.SIGKILL)
        assert process.poll() == 0


def test_a_session_of_its_own() -> None:
    with running("sleep", "600") as process:
        assert os.getsid(process.pid) == process.pid
        assert os.getpgid(process.pid) == process.pid


def test_a_program_that_is_not_there_or_cannot_run_is_named(reaper: ReaperClient, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'no-such-program' was not found; .*PATH"):
        WorkerProcess(reaper, ["no-such-program"], os.environ)
    plain = tmp_path / "plain"
    plain.write_text("text")
    with pytest.raises(UserError, match=r"plain' is not executable; run 'chmod \+x"):
        WorkerProcess(reaper, [str(plain)], os.environ)
    plain.chmod(0o755)
    with pytest.raises(UserError, match=r"plain' cannot be run: Exec format error"):
        WorkerProcess(reaper, [str(plain)], os.environ)


def test_arguments_that_are_too_long_are_told_as_such(reaper: ReaperClient) -> None:
    with pytest.raises(UserError, match=r"'true' cannot be run: its arguments and environment are too long"):
        WorkerProcess(reaper, ["true", "x" * 200_000], os.environ)


def test_an_argument_that_no_program_can_get(reaper: ReaperClient) -> None:
    with pytest.raises(UserError, match=r"'a\\x00b' contains a null byte"):
        WorkerProcess(reaper, ["true", "a\0b"], os.environ)
    with pytest.raises(UserError, match=r"'a=b' contains a '=', which a variable name can"):
        WorkerProcess(reaper, ["true"], {"a=b": ""})


@pytest.mark.parametrize("spare", [0, 1])
def test_a_machine_without_descriptors_is_not_the_programs_fault(reaper: ReaperClient, spare: int) -> None:
    """With `spare` descriptors left: none for the start, or none for what comes back."""
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
    assert os.read(fd, 1), "what was started all the same does not stay"
    os.close(fd)


def test_who_was_sent_a_signal_is_known() -> None:
    with running("sleep", "600") as stopped, running("true") as ended:
        ends(ended)
        for process in (stopped, ended):
            assert not process.signalled
            process.signal(signal.SIGTERM)
        assert stopped.signalled
        assert not ended.signalled, "it had ended by itself"


def test_where_the_reaper_is_lost_nobody_can_tell_how_it_ended(reaper: ReaperClient) -> None:
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


def test_a_worker_runs_on_the_processors_that_are_named(reaper: ReaperClient) -> None:
    allowed = os.sched_getaffinity(0)
    text = "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"
    for cpus, expected in (({max(allowed)}, [max(allowed)]), ((), sorted(allowed))):
        read, write = os.pipe()
        process = WorkerProcess(reaper, python(text), os.environ, write, cpus=cpus)
        os.close(write)
        with open(read) as shown:
            assert shown.read() == f"{expected}\n"
        process.release()


def test_processors_that_nobody_may_use_are_an_error_and_the_next_start_is_as_ever(reaper: ReaperClient) -> None:
    with pytest.raises(RallypointError, match="Invalid argument"):
        WorkerProcess(reaper, ["true"], os.environ, cpus={1023})
    WorkerProcess(reaper, ["true"], os.environ).release()


def test_an_exit_is_the_same_for_two_threads_that_look_at_once() -> None:
    """The reaper tells of an exit once, so both must not ask it; callers of our API may have threads of their own."""
    with guarded() as reaper, ThreadPoolExecutor(2) as pool:
        for _ in range(EXITS):
            process = WorkerProcess(reaper, ("true",), os.environ)
            try:
                ends_of = pool.map(lambda _, each=process: ends(each), range(2))
                assert list(ends_of) == [0, 0]
            finally:
                process.release()
