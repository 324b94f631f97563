"""Workers that go on from one context to the next, on real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.base.poll import until_readable
from rallypoint.workers.process import WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.resumable import LeavingWorkers
from rallypoint.workers.stop import Stop, Sweep, run_to_end
from tests.unit.workers.rounds import Rounds, rounds_in, runs, waiting
from tests.unit.workers.test_process import TIMEOUT, ends
from tests.unit.workers.tracing import until

pytestmark = pytest.mark.process


@pytest.fixture
def rounds(tmp_path: Path, reaper: ReaperClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounds]:
    monkeypatch.chdir(tmp_path)
    with rounds_in(tmp_path, reaper) as rounds:
        yield rounds


def test_who_has_left_goes_on_with_its_pid_its_output_and_what_it_has_started(rounds: Rounds) -> None:
    first = rounds.begin({0: 0, 1: 1, 2: 2})
    pids, dead_child, child = first.pids(), rounds.pid("child.1"), rounds.pid("child.0")
    others = rounds.pid("other.1"), rounds.pid("other.2")
    os.kill(pids[1], signal.SIGKILL)
    run_to_end(rounds.end((0,)))
    assert waiting(first) == {0}
    assert (first.running, first.exit_fds()) == ((), [])
    assert not any(map(runs, (pids[2], dead_child, *others))), "the others were ended, and all that they had started"
    assert runs(child)
    second = rounds.begin({0: 1, 1: 0, 2: 2})
    assert not waiting(first)
    assert second.pids()[0] == pids[0]
    assert not set(second.pids().values()) & {pids[1], pids[2]}
    assert second.poll() is None
    assert second.running == (0, 1, 2)
    assert second.stopped == ()
    assert second.last_lines(0)() == b"up 0\nleave 0\n"
    assert second.stderrs[0] == first.stderrs[0]
    assert Path(second.dest.error_files[0]).parent.parent.name == "attempt_1"
    assert (Path(second.dest.error_files[0]).parent / "stderr.log").read_bytes() == b"up 0\nleave 0\n"


def test_it_is_answered_for_by_the_context_of_its_round_from_then_on(
    rounds: Rounds, capfd: pytest.CaptureFixture[str]
) -> None:
    rounds.begin({0: 0, 1: 1})
    for number in (1, 2, 3):  # with outputs of two starts
        run_to_end(rounds.end((0,) if number % 2 else (0, 1)))
        context = rounds.begin({0: number, 1: 9})
    pid = context.pids()[0]
    assert pid == rounds.contexts[0].pids().get(0, pid)
    Path(context.error_files[0]).write_text('{"message": "of this round"}')
    with open("inprocess.0", "w", encoding="ascii") as fifo:
        fifo.write("end 7\n")
    assert until(lambda: context.poll() is not None)
    result = context.poll()
    assert result is not None
    failure = result.failures[0]
    assert (failure.pid, failure.exitcode, failure.error_file) == (pid, 7, context.error_files[0])
    assert failure.message == "of this round"
    assert failure.last_lines.endswith(b"leave 2\nend 7\n")
    context.close()
    assert context.stopped == (1,)
    assert "[rank3]:end 7\n" in capfd.readouterr().err


def test_who_does_not_leave_in_time_is_ended_and_nobody_else(rounds: Rounds) -> None:
    context = rounds.begin({0: 0, 1: 1})
    pids = context.pids()
    os.kill(pids[1], signal.SIGSTOP)
    run_to_end(rounds.end((0, 1), timeout=2.0))
    assert waiting(context) == {0}
    assert not runs(pids[1])


def test_nobody_goes_on_once_all_are_to_be_killed(rounds: Rounds) -> None:
    context = rounds.begin({0: 0, 1: 1})
    pids, child = context.pids(), rounds.pid("child.0")
    os.kill(pids[1], signal.SIGSTOP)
    stopping = rounds.end((0, 1))
    assert until((rounds.folder / "left.0.0").exists)
    assert not stopping.step()
    stopping.kill_now()
    run_to_end(stopping)
    assert not waiting(context)
    assert not any(map(runs, (*pids.values(), child)))


def test_nobody_goes_on_once_that_is_said_and_who_is_stuck_has_the_grace_of_others(rounds: Rounds) -> None:
    context = rounds.begin({0: 0, 1: 1})
    pids, child = context.pids(), rounds.pid("child.0")
    os.kill(pids[1], signal.SIGSTOP)
    stopping = rounds.end((0, 1), timeout=1000)
    until((rounds.folder / "left.0.0").exists)
    assert not stopping.step()
    context.keep_nobody(signal.SIGTERM, 0.2)
    run_to_end(stopping)
    assert not waiting(context)
    assert not any(map(runs, (*pids.values(), child)))
    assert context.stopped == (0, 1)


def test_nobody_goes_on_if_that_is_said_when_all_have_left(rounds: Rounds) -> None:
    context = rounds.begin({0: 0, 1: 1})
    pids = context.pids()
    os.kill(pids[1], signal.SIGKILL)
    stopping = rounds.end((0,))
    until((rounds.folder / "left.0.0").exists)
    assert not stopping.step(), "what the dead one has left is being ended"
    context.keep_nobody(signal.SIGTERM, TIMEOUT)
    run_to_end(stopping)
    assert not waiting(context)
    assert not runs(pids[0])


@pytest.mark.parametrize("done", [False, True])
def test_a_stop_of_all_ends_those_who_wait_too(rounds: Rounds, done: bool) -> None:
    context = rounds.begin({0: 0, 1: 1})
    pids, child = context.pids(), rounds.pid("child.0")
    if not done:
        os.kill(pids[1], signal.SIGSTOP)
    stopping = rounds.end((0, 1))
    if done:
        run_to_end(stopping)
    else:
        assert until((rounds.folder / "left.0.0").exists)
        assert not stopping.step()
        os.kill(pids[1], signal.SIGCONT)
    context.close(signal.SIGTERM, 5)
    assert not waiting(context)
    assert not any(map(runs, (*pids.values(), child)))
    assert context.ended_in_order


def test_who_dies_while_it_waits_is_no_survivor_and_what_it_has_left_is_ended(rounds: Rounds) -> None:
    context = rounds.begin({0: 0, 1: 1})
    pids = context.pids()
    run_to_end(rounds.end((0, 1)))
    assert waiting(context) == {0, 1}
    assert context.stopping is not None
    assert context.stopping.step()
    other = rounds.pid("other.1")
    os.kill(pids[1], signal.SIGKILL)
    until_readable(context.stopping.fds(), TIMEOUT)
    assert waiting(context) == {0}
    assert not context.stopping.step()
    run_to_end(context.stopping)
    assert not any(map(runs, (other, rounds.pid("child.1"))))
    assert runs(pids[0])
    assert context.ended_in_order is False


LATE = """
import os, signal, sys, time
signal.signal(signal.SIGABRT, lambda *_: os.write(1, b"stacks\\n"))
writes = [os.memfd_create("rallypoint-saving")] if sys.argv[1:] else []
os.write(1, b"up\\n")
while True:
    if writes and os.path.exists("written"):
        os.close(writes.pop())
    time.sleep(0.01)
"""


def test_each_that_is_late_writes_its_stacks_once(rounds: Rounds) -> None:
    """The second is late only when it has written its file: the first is killed in its own time nevertheless."""
    outputs = [(rounds.folder / f"out.{rank}") for rank in range(2)]
    processes = {}
    for rank, path in enumerate(outputs):
        with open(path, "wb") as out:
            argv = [sys.executable, "-c", LATE, *["writes"][:rank]]
            processes[rank] = WorkerProcess(rounds.reaper, argv, os.environ, out.fileno())
        os.mkfifo(f"inprocess.{rank + 5}")
    assert until(lambda: all(path.read_bytes() == b"up\n" for path in outputs))
    listens = [os.open(f"inprocess.{rank}", os.O_RDWR) for rank in (5, 6)]
    release = Stop(
        {rank + 5: process for rank, process in processes.items()},
        Sweep(rounds.reaper, list(processes.values())),
        signal.SIGTERM,
        0.0,
        TIMEOUT,
        leaving=LeavingWorkers(rounds.channel, [5, 6], 0),
        leaving_time=0.05,
    )

    def step() -> bool:
        until_readable(release.fds(), min(0.1, max(0.0, release.wake_at() - time.monotonic())))
        release.step()
        return b"stacks" in outputs[0].read_bytes()

    assert until(step)
    (rounds.folder / "written").touch()
    run_to_end(release)
    assert [path.read_bytes() for path in outputs] == [b"up\nstacks\n"] * 2
    for fd in listens:
        os.close(fd)
    for process in processes.values():
        assert ends(process) == -signal.SIGKILL
        process.release()


def test_one_that_writes_a_file_is_waited_for(rounds: Rounds) -> None:
    saving = "import os, signal; os.memfd_create('rallypoint-saving'); os.write(1, b'up'); signal.pause()"
    read, write = os.pipe()
    process = WorkerProcess(rounds.reaper, [sys.executable, "-c", saving], os.environ, write)
    os.close(write)
    assert os.read(read, 2) == b"up"
    os.close(read)
    os.mkfifo("inprocess.5")
    listens = os.open("inprocess.5", os.O_RDWR)
    leaving = LeavingWorkers(rounds.channel, [5], 0)
    release = Stop(
        *({5: process}, Sweep(rounds.reaper, [process]), signal.SIGTERM, 0.0, TIMEOUT),
        leaving=leaving,
        leaving_time=0.05,
    )
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        until_readable(release.fds(), min(0.1, release.wake_at() - time.monotonic()))
        assert not release.step(), "it writes"
    (rounds.folder / "left.5.0").touch()
    run_to_end(release)
    assert release.held == (5,)
    assert process.poll() is None
    os.close(listens)
    process.signal(signal.SIGKILL)
    assert ends(process) == -signal.SIGKILL
    process.release()
