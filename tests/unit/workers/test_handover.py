"""Workers that move from one context to the next, with real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.agent.steps import WorkersStopped
from rallypoint.agent.stopping import WorkersStop
from rallypoint.base.kernel import until_readable
from rallypoint.features.inprocess.channel import ReleasedWorkers
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.stop import Stop, Sweep, run_to_end
from tests.unit.workers.rounds import Rounds, rounds_in, runs, waiting
from tests.unit.workers.starting import Up
from tests.unit.workers.test_process import TIMEOUT, ends
from tests.waiting import until

pytestmark = pytest.mark.process


@pytest.fixture
def rounds(tmp_path: Path, reaper: ReaperClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounds]:
    monkeypatch.chdir(tmp_path)
    with rounds_in(tmp_path, reaper) as rounds:
        yield rounds


def test_waiting_workers_can_be_stopped_during_a_stop(rounds: Rounds) -> None:
    context = rounds.begin({0: 0, 1: 1})
    pids = context.pids()
    os.kill(pids[1], signal.SIGKILL)
    stopping = rounds.end((0,))
    until((rounds.folder / "left.0.0").exists)
    assert not stopping.step(), "what the dead worker left is being ended"
    context.stop_held(signal.SIGTERM, TIMEOUT)
    run_to_end(stopping)
    assert not waiting(context)
    assert not runs(pids[0])


@pytest.mark.parametrize("done", [False, True])
def test_a_close_ends_waiting_workers_too(rounds: Rounds, done: bool) -> None:
    context = rounds.begin({0: 0, 1: 1})
    pids, child = context.pids(), rounds.pid("child.0")
    if not done:
        os.kill(pids[1], signal.SIGSTOP)
    stopping = rounds.end((0, 1))
    if done:
        run_to_end(stopping)
    else:
        until((rounds.folder / "left.0.0").exists)
        assert not stopping.step()
        os.kill(pids[1], signal.SIGCONT)
    context.close(signal.SIGTERM, 5)
    assert not waiting(context)
    assert not any(map(runs, (*pids.values(), child)))
    assert context.ended_in_order


def test_a_waiting_worker_that_ends_between_two_looks_is_swept(rounds: Rounds) -> None:
    """It ends after `step` has found it waiting, before the owner asks which workers wait."""
    context = rounds.begin({0: 0})
    pid, child = context.pids()[0], rounds.pid("child.0")
    stopping = rounds.end((0,))

    class LookedAtLate(Stop):
        """Its worker ends after a step that has found it waiting."""

        def step(self) -> bool:
            done = super().step()
            if done and runs(pid):
                os.kill(pid, signal.SIGKILL)
                until(lambda: 0 in context.exit_codes)
            return done

    stopping.__class__ = LookedAtLate
    events: list[WorkersStopped] = []
    owner = WorkersStop(lambda: WorkersStopped(waiting=bool(context.held)))
    if (event := owner.begin(stopping)) is not None:
        events.append(event)
    deadline = time.monotonic() + 30.0
    while runs(child) and time.monotonic() < deadline:
        until_readable(owner.fds(), min(owner.wake_at(), deadline) - time.monotonic())
        events += owner.step()
    assert not runs(child), "its child is ended"
    assert len(events) == 1


def test_a_stop_waits_for_a_worker_that_saves(rounds: Rounds, up: Up) -> None:
    process = up("import os, signal; os.memfd_create('rallypoint-saving'); os.write(1, b'up'); signal.pause()")
    os.mkfifo("inprocess.5")
    listens = os.open("inprocess.5", os.O_RDWR)
    leaving = ReleasedWorkers(rounds.channel, [5], 0)
    release = Stop(
        *({5: process}, Sweep(rounds.reaper, [process]), signal.SIGTERM, 0.0, TIMEOUT),
        leaving=leaving,
        leaving_time=0.05,
    )
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        until_readable(release.fds(), min(0.1, release.wake_at() - time.monotonic()))
        assert not release.step(), "it saves"
    (rounds.folder / "left.5.0").touch()
    run_to_end(release)
    assert release.held == (5,)
    assert process.poll() is None
    os.close(listens)
    process.signal(signal.SIGKILL)
    assert ends(process) == -signal.SIGKILL
