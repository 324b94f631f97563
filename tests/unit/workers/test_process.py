"""One worker process: how it ended, and that what it leaves in its group goes with it."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.base.errors import RallypointError, UserError
from rallypoint.workers.process import UNKNOWN_EXIT, WorkerProcess

PATIENCE = 30.0


@contextmanager
def running(*argv: str, stdout: int | None = None) -> Iterator[WorkerProcess]:
    process = WorkerProcess(argv, os.environ, stdout, None)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.signal(signal.SIGKILL)
            ends(process)
        process.reap()


def python(text: str) -> tuple[str, str, str]:
    return sys.executable, "-c", text


def ends(process: WorkerProcess) -> int:
    """Wait for the end by the descriptor; returns the exit code."""
    poller = select.poll()
    poller.register(process.fileno(), select.POLLIN)
    assert poller.poll(PATIENCE * 1000), f"process {process.pid} did not end"
    code = process.poll()
    assert code is not None
    return code


def gone(fd: int) -> bool:
    """Whether all who could write to the pipe have ended, within the patience of the test."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while poller.poll(PATIENCE * 1000):
        if not os.read(fd, 4096):
            return True
    return False


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(255)", 255),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
    ],
)
def test_exit_codes(text: str, code: int) -> None:
    with running(*python(text)) as process:
        assert ends(process) == code
        assert process.seen_ended


def test_looking_does_not_reap() -> None:
    with running("true") as process:
        assert ends(process) == 0
        assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "Z", "its pid stays taken until reap"
        process.reap()
        assert not Path(f"/proc/{process.pid}").exists()
        process.reap()
        process.signal(signal.SIGKILL)  # its number may be another's by now: nothing is sent
        assert process.poll() == 0


def test_what_it_leaves_in_its_group_goes_with_it() -> None:
    read, write = os.pipe()
    try:
        with running("sh", "-c", "sleep 600 & exit 0", stdout=write) as process:
            os.close(write)
            assert ends(process) == 0
            process.reap()
        assert gone(read)
    finally:
        os.close(read)


def test_a_signal_reaches_the_whole_group() -> None:
    read, write = os.pipe()
    try:
        with running("sh", "-c", "echo up; sleep 600 & wait", stdout=write) as process:
            os.close(write)
            assert os.read(read, 2) == b"up"
            process.signal(signal.SIGTERM)
            assert ends(process) == -signal.SIGTERM
            assert gone(read), "the sleep has heard it too, before anything was reaped"
    finally:
        os.close(read)


def test_a_session_of_its_own() -> None:
    with running("sleep", "600") as process:
        assert os.getsid(process.pid) == process.pid
        assert os.getpgid(process.pid) == process.pid


def test_a_program_that_is_not_there_or_cannot_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'no-such-program' is not found; .*PATH"):
        WorkerProcess(["no-such-program"], os.environ, None, None)
    plain = tmp_path / "plain"
    plain.write_text("text")
    with pytest.raises(UserError, match=r"plain' cannot be run: Permission denied"):
        WorkerProcess([str(plain)], os.environ, None, None)


def test_arguments_that_are_too_long_are_told_as_such() -> None:
    with pytest.raises(UserError, match=r"'true' cannot be run: its arguments and environment are too long"):
        WorkerProcess(["true", "x" * 200_000], os.environ, None, None)


def test_a_machine_without_room_is_not_the_programs_fault() -> None:
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, former[1]))
    try:
        with pytest.raises(RallypointError, match=r"for 'true': Too many open files; look at .*ulimit -n") as raised:
            WorkerProcess(["true"], os.environ, None, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)
    assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSYS])
def test_a_process_that_cannot_be_watched_is_not_left(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        pids.append(pid)
        raise OSError(number, os.strerror(number))

    pids: list[int] = []
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(RallypointError, match=os.strerror(number)):
        WorkerProcess(["sleep", "600"], os.environ, None, None)
    (pid,) = pids
    assert not Path(f"/proc/{pid}").exists()


def test_an_end_that_somebody_else_has_seen_is_no_success() -> None:
    read, write = os.pipe()
    try:
        with running("sh", "-c", "sleep 600 & exit 0", stdout=write) as process:
            os.close(write)
            os.waitpid(process.pid, 0)
            assert process.poll() == UNKNOWN_EXIT
            assert process.seen_ended
            process.reap()
        if kernel() >= (6, 9):
            assert gone(read), "what it left in its group goes all the same"
        else:
            os.killpg(process.pid, signal.SIGKILL)
    finally:
        os.close(read)


def kernel() -> tuple[int, ...]:
    return tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))


IGNORING = """
import os, select, signal, threading
from rallypoint.workers.process import WorkerProcess
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def start():
    process = WorkerProcess(["sh", "-c", "exit 3"], os.environ, None, None)
    select.select([process.fileno()], [], [])
    print(process.poll())
    process.reap()
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("start()", 3),  # the main thread can take the ignoring back
        ("thread = threading.Thread(target=start); thread.start(); thread.join()", UNKNOWN_EXIT),
    ],
)
def test_where_exits_are_ignored(how: str, code: int) -> None:
    command = [sys.executable, "-c", IGNORING + how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout == f"{code}\n", done.stderr


def test_who_was_sent_a_signal_is_known() -> None:
    with running("sleep", "600") as stopped, running("true") as ended:
        ends(ended)
        for process in (stopped, ended):
            assert not process.signalled
            process.signal(signal.SIGTERM)
        assert stopped.signalled
        assert not ended.signalled, "it had ended by itself"


def test_a_process_that_is_reaped_before_we_can_watch_it_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int) -> int:
        raise ProcessLookupError(errno.ESRCH, "No such process")

    monkeypatch.setattr(os, "pidfd_open", gone)
    process = WorkerProcess(["true"], {"PATH": os.environ["PATH"]}, None, None)
    assert select.select([process.fileno()], [], [], PATIENCE)[0]
    assert process.poll() == UNKNOWN_EXIT
    process.reap()
