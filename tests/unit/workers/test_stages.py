"""The stages of a stop, with a clock that a test moves: each worker has its own stage."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from signal import SIGABRT, SIGKILL, SIGTERM

import pytest

from rallypoint.workers import stop as module
from rallypoint.workers.stop import KILL_TIMEOUT, STACKS_TIMEOUT, SWEEP_GRACE_PERIOD, NoSweep, Stop
from tests.unit.clocks import HandClock

CATCHES = 4_000_100
"""Processes from this pid write their stacks on SIGABRT."""


class Process:
    """A process that ends when a test says so."""

    held_by_debugger = signalled = False

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = self.program_pid = pid
        self.got: list[int] = []
        self.exitcode: int | None = None
        self.fd = fd

    def fileno(self) -> int:
        return self.fd

    def poll(self) -> int | None:
        return self.exitcode

    def signal(self, number: int) -> None:
        self.got.append(number)


class Swept(NoSweep):
    """Keeps the arguments of each sweep."""

    def __init__(self) -> None:
        self.begun: list[tuple[float, set[int]]] = []

    def begin(self, seconds: float = 0.0, spared: Collection[int] = ()) -> None:
        self.begun.append((seconds, set(spared)))


class Leaving:
    """Workers that were asked to leave, and leave when a test says so."""

    must_be_polled = False

    def __init__(self, told: Collection[int]) -> None:
        self.told = frozenset(told)
        self.gone: set[int] = set()
        self.closed = False

    def fds(self) -> list[int]:
        return []

    def left(self) -> set[int]:
        return self.gone

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Process]]:
    """Three of them; the second and third write their stacks."""
    monkeypatch.setattr(module, "has_signal_handler", lambda pid, number: number == SIGABRT and pid >= CATCHES)
    fd = os.open(os.devnull, os.O_RDONLY)
    yield {rank: Process(pid, fd) for rank, pid in enumerate((1, CATCHES, CATCHES + 1), 7)}
    os.close(fd)


def got(processes: dict[int, Process]) -> list[list[int]]:
    return [process.got for process in processes.values()]


def test_workers_that_do_not_end_go_through_all_stages(processes: dict[int, Process]) -> None:
    clock, sweep = HandClock(), Swept()
    stop = Stop(processes, sweep, SIGTERM, 5.0, clock=clock)
    processes[8].exitcode = 0
    clock.now = 4.9
    assert not stop.step()
    assert got(processes) == [[SIGTERM]] * 3
    clock.now = 5.0
    assert not stop.step()
    assert got(processes) == [[SIGTERM, SIGKILL], [SIGTERM], [SIGTERM, SIGABRT]]
    processes[7].exitcode = -SIGKILL
    assert stop.wake_at() == 5.0 + STACKS_TIMEOUT
    clock.now = 5.0 + STACKS_TIMEOUT
    assert not stop.step()
    assert processes[9].got == [SIGTERM, SIGABRT, SIGKILL]
    assert sweep.begun == []
    clock.now += KILL_TIMEOUT
    assert not stop.step()
    assert sweep.begun == [(0.0, set())], "it does not wait for a process that SIGKILL does not end"
    processes[9].exitcode = -SIGKILL
    assert stop.step()


class Leftovers:
    """Processes left by workers, which are busy until a test says otherwise or the time is over."""

    def __init__(self, clock: HandClock, until: float) -> None:
        self.clock, self.until, self.busy = clock, until, True

    def are_busy(self) -> bool:
        return self.busy and self.clock.now < self.until

    def wake_at(self) -> float:
        return self.until

    def shorten(self, until: float) -> None:
        self.until = min(self.until, until)


@pytest.mark.parametrize("killed", [False, True])
def test_the_sweep_waits_for_busy_leftovers(processes: dict[int, Process], killed: bool) -> None:
    clock, sweep = HandClock(), Swept()
    left = Leftovers(clock, clock.now + 30.0)
    for process in processes.values():
        process.exitcode = 0
    stop = Stop(processes, sweep, SIGTERM, 5.0, clock=clock, leftovers=left)
    if killed:
        stop.kill_now()
    else:
        assert (stop.step(), sweep.begun, stop.wake_at()) == (False, [], left.until)
        stop.shorten(clock.now + 4.0)
        clock.now += 3.9
        assert (stop.step(), sweep.begun) == (False, [])
        left.busy = False
    assert stop.step()
    assert sweep.begun == [(0.0 if killed else SWEEP_GRACE_PERIOD, set())]


def test_descriptors_that_wake_a_stop(processes: dict[int, Process]) -> None:
    leaving = Leaving({7, 8})
    clock, fds = HandClock(), {rank: os.dup(0) for rank in processes}
    for rank, process in processes.items():
        process.fd = fds[rank]
    try:
        stop = Stop(*(processes, NoSweep(), SIGTERM, 30.0, 0.0, clock), leaving=leaving, leaving_time=1000.0)
        assert stop.fds() == [fds[9]], "nothing is due before all workers have ended or left"
        leaving.gone = {7}
        assert not stop.step()
        assert stop.fds() == [fds[7], fds[9]]
        processes[9].exitcode = 0
        assert not stop.step()
        assert stop.fds() == [fds[7], fds[8]]
        processes[7].held_by_debugger = True
        assert stop.fds() == [fds[8]], "its readable descriptor would keep the processor busy"
    finally:
        for fd in fds.values():
            os.close(fd)


def test_leaving_workers_are_held_and_late_ones_are_stopped(processes: dict[int, Process]) -> None:
    clock, sweep, leaving, done = HandClock(), Swept(), Leaving({8, 9}), list[tuple[int, ...]]()
    stop = Stop(
        *(processes, sweep, SIGTERM, 30.0, 0.0, clock),
        leaving=leaving,
        leaving_time=2.0,
        finish=lambda: done.append(()),
    )
    assert got(processes) == [[SIGTERM], [], []]
    leaving.gone = {8}
    clock.now = 2.0
    assert not stop.step()
    assert got(processes) == [[SIGTERM], [], [SIGABRT]]
    processes[9].exitcode = -SIGABRT
    assert not stop.step()
    assert leaving.closed
    assert not stop.held, "another is still in the round"
    processes[7].exitcode = 0
    assert stop.step()
    assert sweep.begun == [(SWEEP_GRACE_PERIOD, {CATCHES})]
    assert list(stop.held) == [8]
    assert stop.over
    assert len(done) == 1
    processes[8].exitcode = -SIGKILL
    assert list(stop.held) == [8], "as of the last step: the owner must not drop the stop yet"
    assert stop.step(), "its leftovers are swept"
    assert sweep.begun[1:] == [(SWEEP_GRACE_PERIOD, set())]
    assert len(done) == 2


@pytest.mark.parametrize("number", [SIGTERM, SIGKILL])
def test_stop_held(processes: dict[int, Process], number: int) -> None:
    clock, sweep, leaving = HandClock(), Swept(), Leaving({7, 8, 9})
    stop = Stop(*(processes, sweep, SIGTERM, 30.0, 0.0, clock), leaving=leaving, leaving_time=1000.0)
    leaving.gone = {8}
    assert not stop.step()
    clock.now = 10.0
    stop.stop_held(number, 5.0)
    assert got(processes) == [[number]] * 3
    stop.shorten(12.0)
    for process in processes.values():
        process.exitcode = -number
    assert stop.step()
    assert not stop.held
    assert leaving.closed
    assert sweep.begun[-1][1] == set()
