"""The guardian: its frames, what workers get from it, and that it leaves nothing when its agent is gone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.workers.guardian.client import Guardian, GuardianLost
from rallypoint.workers.guardian.program import below, frame, parse, remove
from rallypoint.workers.process import WorkerProcess
from tests.unit.workers.test_process import PATIENCE, ends


@given(st.lists(st.tuples(st.integers(), st.binary() | st.lists(st.binary()))), st.integers(1, 50))
def test_messages_come_out_as_they_went_in(messages: list[tuple[object, ...]], size: int) -> None:
    data = b"".join(map(frame, messages))
    buffer, found = bytearray(), []
    for at in range(0, len(data), size):
        buffer += data[at : at + size]
        while (message := parse(buffer)) is not None:
            found.append(message)
    assert found == messages
    assert not buffer


def test_who_is_below() -> None:
    parents = {2: 1, 3: 1, 4: 2, 5: 4, 6: 3}
    assert below(2, parents) == {4, 5}
    assert below(1, parents) == {2, 3, 4, 5, 6}
    assert below(6, parents) == set()


def test_what_is_removed(tmp_path: Path) -> None:
    for name in ("empty", "whole"):
        (tmp_path / name / "a" / "b").mkdir(parents=True)
        (tmp_path / name / "c").mkdir()
        (tmp_path / name / "c" / "file").write_text("kept")
        (tmp_path / name / "link").symlink_to(tmp_path)
    remove(os.fsencode(tmp_path / "empty"), whole=False)
    remove(os.fsencode(tmp_path / "whole"), whole=True)
    remove(b"/no/such/folder", whole=True)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["c", "empty", "file", "link"]


def signals(guardian: Guardian, name: str) -> set[int]:
    """A set of signals of a worker, without those that the C library keeps for itself."""
    bits = int(said(guardian, name, "/proc/self/status", program="grep").split()[1], 16)
    return {number for number in range(1, 32) if bits >> (number - 1) & 1}


def said(guardian: Guardian, *arguments: str, program: str = "") -> str:
    """What a program prints; without one, what a line of shell does."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as output:
        process = WorkerProcess(
            guardian, [program, *arguments] if program else ["sh", "-c", *arguments], os.environ, write
        )
        os.close(write)
        found = output.read().decode().strip()
        assert ends(process) == 0
        process.release()
    return found


def test_a_worker_finds_what_we_have_at_that_moment(
    guardian: Guardian,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    former, umask = signal.signal(signal.SIGUSR1, signal.SIG_IGN), os.umask(0o027)
    monkeypatch.chdir(tmp_path)
    try:
        assert signals(guardian, "SigBlk") == {signal.SIGUSR2}
        assert signals(guardian, "SigIgn") == {signal.SIGUSR1}
        assert said(guardian, "umask") == "0027"
        assert said(guardian, "pwd") == str(tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, former)
        os.umask(umask)
    assert not signals(guardian, "SigIgn")
    assert not signals(guardian, "SigBlk")
    assert said(guardian, "ls /proc/self/fd").split() == ["0", "1", "2", "3"], "the last is that of ls itself"


def test_signals_do_not_end_it(guardian: Guardian) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        os.kill(guardian.pid, number)
    assert said(guardian, "echo well") == "well"
    assert os.getsid(guardian.pid) == guardian.pid


def test_it_reaps_what_it_adopts(guardian: Guardian) -> None:
    pid = int(said(guardian, "(sleep 0 & echo $!)"))
    number = guardian.begin_sweep()
    assert select.select([guardian.answers], [], [], PATIENCE)[0]
    assert guardian.swept(number)
    assert not Path(f"/proc/{pid}").exists()


def test_an_exception_in_the_midst_of_a_call_breaks_the_connection(guardian: Guardian) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    process = WorkerProcess(guardian, ["sleep", "600"], os.environ)
    former = signal.signal(signal.SIGALRM, interrupt)
    os.kill(guardian.pid, signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            WorkerProcess(guardian, ["sleep", "600"], os.environ)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        os.kill(guardian.pid, signal.SIGCONT)
    assert guardian.lost
    with pytest.raises(GuardianLost, match="the connection to it broke"):
        guardian.remove_at_the_end()
    assert select.select([process.fileno()], [], [], PATIENCE)[0], "and what runs below it ends"
    process.release()


FORKING = """
import os, signal, sys
from rallypoint.workers.guardian.client import Guardian
from rallypoint.workers.process import WorkerProcess
guardian = Guardian()
guardian.remove_at_the_end(empty=[sys.argv[1]], whole=[sys.argv[2]])
process = WorkerProcess(guardian, ["sleep", "600"], os.environ)
child = os.fork()
if child == 0:
    signal.pause()
print(guardian.pid, process.pid, child, flush=True)
signal.pause()
"""


def test_a_forked_child_that_holds_the_connection_does_not_hide_the_agents_end(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "file").write_text("")
    command = [sys.executable, "-c", FORKING, str(tmp_path / "empty"), str(tmp_path / "whole")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(word) for word in agent.stdout.readline().split()]
        fds = [os.pidfd_open(pid) for pid in pids[:2]]
        try:
            agent.kill()
            for fd in fds:
                assert select.select([fd], [], [], 1.0)[0]
            assert not list(tmp_path.iterdir())
        finally:
            os.kill(pids[2], signal.SIGKILL)
            for fd in fds:
                os.close(fd)
