"""Workers that continue in their processes from one round to the next, on the agent's side."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.options import Features
from rallypoint.agent.signals import GracePeriods
from rallypoint.agent.spec import WorkerGroup, WorkerSpec
from rallypoint.agent.steps import WorkersStopped
from rallypoint.agent.stopping import WorkersStop
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.kernel import until_readable
from rallypoint.control.membership.state import NodeRanks
from rallypoint.control.protocol.messages import Placement
from rallypoint.failures.failure import ProcessFailure
from rallypoint.features.inprocess.agent import HeldWorkers
from rallypoint.features.inprocess.channel import WorkerChannel
from rallypoint.workers.logs.outputs import WorkerOutput
from rallypoint.workers.stop import run_to_end
from tests.unit.compat.test_subclass import ours
from tests.unit.workers.rounds import Rounds, rounds_in, runs, waiting
from tests.unit.workers.test_process import TIMEOUT, guarded
from tests.waiting import until

pytestmark = pytest.mark.process


class Node:
    """An agent with two workers."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.group = WorkerGroup(
            WorkerSpec("default", 2, ours(), entrypoint="sh", features=Features.of(inprocess_timeout=TIMEOUT))
        )
        self.group.notices = str(rounds.folder)
        self.held = HeldWorkers(self.group, GracePeriods())
        self.enter_round(0)
        self.context = self.rounds.begin({0: 0, 1: 1})

    def enter_round(self, round_: int) -> None:
        ranks = NodeRanks(0, 2, 0, 2)
        self.group.placement = Placement(round_, 0, 1, ranks, "127.0.0.1", 1, 0)
        self.held.begin(self.group)

    def end_round(self) -> None:
        """End the round, and wait until its workers are out of it."""
        assert self.held.all_announced()
        stop = self.held.begin_release(self.context, signal.SIGTERM, TIMEOUT, 0.0, sent=False)
        if stop is not None:
            run_to_end(stop)

    def start_workers(self) -> tuple[int, ...]:
        """Start the workers of the entered round; returns the local ranks of those that continue."""
        context = self.rounds.make({0: 0, 1: 1})
        entered = self.held.enter(context)
        self.rounds.start(context, {0, 1}.difference(entered))
        self.context = context
        return entered


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.chdir(tmp_path)
    with guarded() as reaper, rounds_in(tmp_path, reaper) as rounds:
        yield Node(rounds)


def test_a_round_that_ends_early_leaves_workers_waiting(node: Node) -> None:
    pids = node.context.pids()
    node.end_round()
    node.enter_round(1)
    node.end_round()
    assert waiting(node.context) == {0, 1}
    node.enter_round(2)
    assert node.start_workers() == (0, 1)
    assert node.context.pids() == pids
    until(lambda: b"leave 0\nenter 2" in node.context.last_lines(0)())


def test_output_is_labelled_before_the_worker_enters(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    enter = WorkerChannel.enter

    def enter_noted(*arguments: Any) -> bool:
        order.append("enter")
        return enter(*arguments)

    monkeypatch.setattr(WorkerOutput, "relabel", lambda *_: order.append("label"))
    monkeypatch.setattr(WorkerChannel, "enter", enter_noted)
    node.end_round()
    node.enter_round(1)
    assert node.start_workers() == (0, 1)
    assert order == ["label", "enter"] * 2


def test_a_worker_that_no_longer_reads_is_replaced(node: Node) -> None:
    pids = node.context.pids()
    node.end_round()
    (node.rounds.folder / "inprocess.1").unlink()
    os.mkfifo(node.rounds.folder / "inprocess.1")
    node.enter_round(1)
    left = [node.rounds.pid(name) for name in ("child.1", "other.1")]
    previous, context = node.context, node.rounds.make({0: 0, 1: 1})
    assert node.held.enter(context) == (0,)
    assert not any(map(runs, (pids[1], *left))), "none of its processes runs beside its successor"
    assert runs(pids[0])
    assert runs(node.rounds.pid("child.0"))
    assert not previous.held
    node.rounds.start(context, {1})
    assert context.pids()[0] == pids[0]
    until(lambda: b"enter 1" in context.last_lines(0)())


def test_workers_that_cannot_be_notified_leave_nothing(node: Node) -> None:
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for round_ in (1, 2):
        node.end_round()
        for rank in (0, 1):
            # As on a full disk, it cannot be written.
            (node.rounds.folder / f"round.{rank}.json").mkdir(exist_ok=True)
        node.enter_round(round_)
        assert node.start_workers() == ()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)


def test_only_the_owner_of_a_stop_steps_it(node: Node) -> None:
    """Another one that steps it when it is done takes the last wake-up away from the owner."""
    assert node.held.all_announced()
    for pid in node.context.pids().values():  # or they might leave before the first look at the stop
        os.kill(pid, signal.SIGSTOP)
    stop = node.held.begin_release(node.context, signal.SIGTERM, TIMEOUT, 0.0, sent=False)
    owner = WorkersStop(lambda: WorkersStopped(True, waiting=True))
    assert owner.begin(stop) is None
    for pid in node.context.pids().values():
        os.kill(pid, signal.SIGCONT)
    for rank in (0, 1):
        until(lambda rank=rank: (node.rounds.folder / f"left.{rank}.0").exists())  # type: ignore[misc]
    for _ in range(3):
        node.held.step()
        assert node.held.preparing(), "as of the owner's last step"
    found: list[WorkersStopped] = []
    while not found:
        until_readable(owner.fds(), min(TIMEOUT, owner.wake_at() - SYSTEM_CLOCK.monotonic()))
        found += owner.step()
    assert not node.held.preparing()
    assert not owner.in_progress
    # The owner watches waiting workers: it sweeps what one leaves, without an event.
    os.kill(node.context.pids()[1], signal.SIGKILL)
    until(lambda: not runs(node.context.pids()[1]))
    child = node.rounds.pid("child.1")
    while runs(child):
        until_readable(owner.fds(), min(TIMEOUT, owner.wake_at() - SYSTEM_CLOCK.monotonic()))
        assert not list(owner.step())
    assert waiting(node.context) == {0}


@pytest.mark.parametrize(
    ("exitcode", "survived", "seconds", "progress", "ends"),
    [
        (1, (1,), 3.0, False, True),
        (-signal.SIGSEGV, (0, 1), 3.0, False, True),
        (-signal.SIGKILL, (1,), 3.0, False, False),
        (1, (0,), 3.0, False, False),
        (1, (1,), 60.0, False, False),
        (1, (1,), 3.0, True, False),
    ],
    ids=["error", "crash", "killed", "new", "later", "after_a_step"],
)
def test_a_survivor_that_fails_at_once_ends_continuation(
    node: Node, exitcode: int, survived: tuple[int, ...], seconds: float, progress: bool, ends: bool
) -> None:
    assert node.held.all_announced()
    node.group.survived = survived
    failure = ProcessFailure(1, 7, exitcode, "")
    for _ in range(2):  # it may be noted more than once
        node.held.note_failures({1: failure}, seconds, progress=progress)
    assert node.held.all_announced() is not ends
    assert failure.context.count("still belongs to the previous round") == ends
