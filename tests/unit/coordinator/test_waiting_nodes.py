"""A running round hears how many nodes wait for it: at once, and then at most once a second."""

from __future__ import annotations

import math

from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Close, Drain, NodeId, NodeInfo, Settings
from rallypoint.control.protocol.messages import JoinRequest, NodesWaiting

_NODE = NodeInfo("default", 1, "host", 7000)


class Job:
    """A round of two nodes that runs, with room for many more. Sessions and nodes are counted from 1."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(Settings("job", 2, 100, last_call_timeout=0.0, lease=60.0), "0")
        self.joins(1, 0.0)
        self.joins(2, 0.0)
        self.coordinator.tick(0.0)
        assert self.coordinator.state.complete

    def joins(self, number: int, now: float) -> list[tuple[int, int]]:
        node = NodeId(f"10.0.0.{number}", 1, number, f"n{number}")
        self.coordinator.open(number, SessionRecord(node, node.addr, leased=False), now)
        return waiting(self.coordinator.receive(number, JoinRequest(_NODE, 600.0), now).messages)

    def leaves(self, number: int, now: float) -> list[tuple[int, int]]:
        return waiting(self.coordinator.close(number, now).messages)

    def ticks(self, now: float) -> list[tuple[int, int]]:
        return waiting(self.coordinator.tick(now).messages)

    def wakes(self) -> float:
        return self.coordinator.wake_at()

    @property
    def events(self) -> list[str]:
        return [text for _, _, kind, _, text, _ in self.coordinator.history.events if kind == "node waiting"]


def waiting(sends: list[OutgoingMessage]) -> list[tuple[int, int]]:
    """The sessions that were told that nodes wait, and how many."""
    return [(session, notice.waiting) for session, notice in sends if isinstance(notice, NodesWaiting)]


def both(number: int) -> list[tuple[int, int]]:
    return [(1, number), (2, number)]


def test_many_that_come_one_after_another_are_told_once_a_second() -> None:
    job = Job()
    assert job.joins(3, 5.0) == both(1)
    assert [job.joins(number, 5.0 + number / 100) for number in range(4, 10)] == [[]] * 6
    assert job.wakes() == 6.0
    assert job.ticks(5.5) == []
    assert job.ticks(6.0) == both(7)
    assert job.wakes() == 600.0 + 5.0, "the time of the first one that waits"
    assert job.joins(10, 9.0) == both(8)
    assert job.events == [
        "n3 is waiting for the next round",
        "n4, n5, n6, n7 and 2 more are waiting for the next round",
        "n10 is waiting for the next round",
    ]


def test_that_none_waits_any_more_is_told_at_once() -> None:
    job = Job()
    assert job.joins(3, 5.0) == both(1)
    assert job.leaves(3, 5.1) == both(0)
    assert job.joins(4, 5.2) == [], "it comes and goes"
    assert job.leaves(4, 5.3) == []
    assert job.wakes() == math.inf
    assert job.joins(5, 5.4) == []
    assert job.ticks(job.wakes()) == both(1)
    assert job.wakes() == 600.0 + 5.4


def test_another_round_is_told_at_once() -> None:
    job = Job()
    assert job.joins(3, 5.0) == both(1)
    job.coordinator.receive(1, Drain(0), 5.1)
    for number in (1, 2):
        job.coordinator.receive(number, JoinRequest(_NODE, 600.0), 5.2)
    assert job.coordinator.state.complete
    assert job.joins(4, 5.3) == [(1, 1), (2, 1), (3, 1)]


def test_who_waits_does_not_concern_a_job_that_has_ended() -> None:
    job = Job()
    job.joins(3, 5.0)
    job.coordinator.receive(1, Close(), 6.0)
    assert job.coordinator.state.closed
    assert job.leaves(3, 6.1) == []
