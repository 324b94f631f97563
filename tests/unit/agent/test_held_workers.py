"""An agent and its workers that continue in their processes, between one round and the next."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

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
    """One agent's part, with two workers."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.group = WorkerGroup(
            WorkerSpec("default", 2, ours(), entrypoint="sh", features=Features.of(inprocess_timeout=TIMEOUT))
        )
        self.group.notices = str(rounds.folder)
        self.held = HeldWorkers(self.group, GracePeriods())
        self.enters(0)
        self.context = self.rounds.begin({0: 0, 1: 1})

    def enters(self, round_: int) -> None:
        ranks = NodeRanks(0, 2, 0, 2)
        self.group.placement = Placement(round_, 0, 1, ranks, "127.0.0.1", 1, 0)
        self.held.begin(self.group)

    def ends(self) -> None:
        """The round is over, and its workers are out of it."""
        assert self.held.all_announced()
        stop = self.held.begin_release(self.context, signal.SIGTERM, TIMEOUT, 0.0, sent=False)
        if stop is not None:
            run_to_end(stop)

    def starts(self) -> tuple[int, ...]:
        """Start the workers of the round that was entered; returns who goes on."""
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


def test_a_round_that_ends_before_it_has_begun_leaves_them_waiting(node: Node) -> None:
    pids = node.context.pids()
    node.ends()
    node.enters(1)
    node.ends()
    assert waiting(node.context) == {0, 1}
    node.enters(2)
    assert node.starts() == (0, 1)
    assert node.context.pids() == pids
    until(lambda: b"leave 0\nenter 2" in node.context.last_lines(0)())


def test_the_lines_of_a_worker_have_their_label_before_it_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes then may be shown at once."""
    order: list[str] = []
    enter = WorkerChannel.enter
    monkeypatch.setattr(WorkerOutput, "relabel", lambda *_: order.append("label"))

    def told(channel: WorkerChannel, rank: int, round_: int, variables: Mapping[str, str | None]) -> bool:
        order.append("told")
        return enter(channel, rank, round_, variables)

    monkeypatch.setattr(WorkerChannel, "enter", told)
    node.ends()
    node.enters(1)
    assert node.starts() == (0, 1)
    assert order == ["label", "told"] * 2


def test_one_that_reads_no_more_is_ended_and_started_anew(node: Node) -> None:
    pids = node.context.pids()
    node.ends()
    (node.rounds.folder / "inprocess.1").unlink()
    os.mkfifo(node.rounds.folder / "inprocess.1")
    node.enters(1)
    left = [node.rounds.pid(name) for name in ("child.1", "other.1")]
    previous, context = node.context, node.rounds.make({0: 0, 1: 1})
    assert node.held.enter(context) == (0,)
    assert not any(map(runs, (pids[1], *left))), "nothing of it runs beside its successor"
    assert runs(pids[0])
    assert runs(node.rounds.pid("child.0"))
    assert not previous.held
    node.rounds.start(context, {1})
    assert context.pids()[0] == pids[0]
    until(lambda: b"enter 1" in context.last_lines(0)())


def test_nothing_of_workers_that_cannot_be_told_is_left(node: Node) -> None:
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for round_ in (1, 2):
        node.ends()
        for rank in (0, 1):
            # As on a full disk, it cannot be written.
            (node.rounds.folder / f"round.{rank}.json").mkdir(exist_ok=True)
        node.enters(round_)
        assert node.starts() == ()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)


def test_only_the_owner_of_a_stop_steps_it(node: Node) -> None:
    """Who else found it done would take its last wake-up away from the owner."""
    assert node.held.all_announced()
    for pid in node.context.pids().values():  # or they might have left before the stop is looked at first
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
        assert node.held.preparing(), "as the owner has last seen it"
    found: list[WorkersStopped] = []
    while not found:
        until_readable(owner.fds(), min(TIMEOUT, owner.wake_at() - SYSTEM_CLOCK.monotonic()))
        found += owner.step()
    assert not node.held.preparing()
    assert not owner.in_progress
    # It looks after those that wait: the end of one is swept, and is no event.
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
def test_a_survivor_that_fails_at_once_ends_this_for_the_run(
    node: Node, exitcode: int, survived: tuple[int, ...], seconds: float, progress: bool, ends: bool
) -> None:
    assert node.held.all_announced()
    node.group.survived = survived
    failure = ProcessFailure(1, 7, exitcode, "")
    for _ in range(2):  # it may be found more than once
        node.held.note_failures({1: failure}, seconds, progress=progress)
    assert node.held.all_announced() is not ends
    assert failure.context.count("still belongs to the previous round") == ends
