"""A hang at the coordinator: all nodes are asked, one reports, and all get the report once."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from itertools import count

import pytest

from rallypoint.base.clock import Deadline
from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, NodeInfo, ReportQuiet, Settings
from rallypoint.control.protocol.codec import check_size, encode
from rallypoint.control.protocol.messages import (
    CollectedPart,
    CollectionEnded,
    CollectKind,
    CollectRequested,
    HangFound,
    HangReport,
    JoinRequest,
    LeaveRequest,
    Notification,
    ResumeRequest,
    Taken,
)
from rallypoint.features.hangs.evidence import HangReporter
from rallypoint.observe.watching import hang
from rallypoint.observe.watching.collection import LIMITS
from rallypoint.observe.watching.hang import HangInvestigation
from rallypoint.observe.watching.messages import CollectCommand
from rallypoint.rendezvous.backends.embedded import create_handler
from rallypoint.rendezvous.elastic import ElasticHandler
from rallypoint.rendezvous.params import RendezvousParameters
from tests.unit.coordinator.test_snapshots import Large
from tests.unit.coordinator.test_watching import BY, Job, Told

A, B = ord("a"), ord("b")


def hung() -> tuple[Job, list[Told]]:
    """A job of two nodes that hangs, and the messages about it."""
    job = Job(Settings("job", 2, 2, last_call_timeout=0.0, lease=1e6))
    for name in "ab":
        job.node(name)
    assert job.hears("a", ReportQuiet(0)) == []
    return job, job.hears("b", ReportQuiet(0))


def test_all_nodes_are_asked_and_all_get_the_report() -> None:
    job, told = hung()
    asked = CollectRequested(1, CollectKind.HANG)
    assert told == [(A, HangFound(0, 2)), (B, HangFound(0, 2)), (A, asked), (B, asked)]
    assert job.hears("b", CollectedPart(1, b"half", False)) == [(A, CollectedPart(1, b"half", False, "b (rank 1)"))]
    assert job.hears("a", CollectedPart(1, b"all", True)) == [(A, CollectedPart(1, b"all", True, "a (rank 0)"))]
    last = job.hears("b", CollectedPart(1, b"half", True))
    assert last == [(A, CollectedPart(1, b"half", True, "b (rank 1)")), (A, CollectionEnded(1, 0))]
    report = HangReport(1, 0, "two lines\nof words")
    assert job.hears("b", report) == [], "another node reports"
    assert job.hears("a", report) == [(A, report), (B, report)]
    assert job.hears("a", report) == [], "it is told once"
    assert job.wait(100.0) == []
    assert [each.kind.value for each in job.status().events][-1] == "hang found"


def test_a_hang_is_reported_again_only_after_a_sign_of_life() -> None:
    job, _ = hung()
    assert job.hears("b", ReportQuiet(0)) == []
    assert job.hears("b", ReportQuiet(0, quiet=False)) == []
    again = job.hears("b", ReportQuiet(0))
    assert [each for each in again if isinstance(each[1], HangFound)] == [(A, HangFound(0, 2)), (B, HangFound(0, 2))]
    assert (B, CollectRequested(2, CollectKind.HANG)) in again
    assert job.hears("b", CollectedPart(1, b"late", True)) == [], "it answers the one before"


def test_silent_nodes_are_named_and_not_awaited() -> None:
    job, _ = hung()
    job.hears("a", CollectedPart(1, b"all", True))
    assert job.wait(14.9) == []
    assert job.wait(0.2) == [(A, CollectionEnded(1, 0, ("b (rank 1)",)))]
    assert job.hears("b", CollectedPart(1, b"late", True)) == []
    assert job.wait(14.7) == []
    told = job.wait(0.4)
    assert [session for session, _ in told] == [A, B]
    assert all(isinstance(each, HangReport) and "a (rank 0) did not send" in each.report for _, each in told)
    assert job.wait(100.0) == []


def test_a_hang_ends_with_its_round() -> None:
    job, _ = hung()
    job.hears("a", CollectedPart(1, b"all", True))
    told = job.hears("b", LeaveRequest())
    assert not any(isinstance(each, HangReport) for _, each in told)
    assert job.told(job.coordinator.close(A, job.now).messages) == []
    assert job.told(job.coordinator.close(B, job.now).messages) == []
    assert job.wait(100.0) == []


def test_collections_of_operators_and_hangs_do_not_mix() -> None:
    job, _ = hung()
    told = job.ask(CollectCommand(BY, CollectKind.STACKS))
    assert (A, CollectRequested(2, CollectKind.STACKS)) in told
    assert [session for session, _ in job.hears("b", CollectedPart(2, b"stacks", True))] == [99]
    assert [session for session, _ in job.hears("b", CollectedPart(1, b"evidence", True))] == [A]


def test_nodes_without_a_common_report_wait_for_one_another() -> None:
    job, _ = hung()
    told: list[Notification] = []
    alone = HangInvestigation(lambda _nodes, each: told.append(each), count(1), str, settles=12.0)
    after = job.coordinator.state
    first, second = after.participants
    assert alone.check_hang(after._replace(quiet=frozenset({first})), after, lambda node: node == second, 100.0)
    alone.on_answer(second, CollectedPart(1, b"own", True), 101.0)
    alone.on_answer(second, HangReport(1, 0, "own ranks"), 102.0)
    alone.tick(111.9)
    assert not any(isinstance(each, HangReport) for each in told)
    assert alone.wake_at() == 112.0
    alone.tick(112.0)
    assert told[-1] == HangReport(1, 0, "own ranks")
    assert alone.wake_at() == float("inf")


def resumes(job: Job, session: int, name: str = "b") -> list[Told]:
    """The messages after a node has resumed the round in another session."""
    coordinator, node = job.coordinator, NodeId(f"10.0.0.{ord(name)}", 7, 0, name)
    coordinator.open(session, SessionRecord(node, node.addr), job.now)
    held = ResumeRequest(
        *("inc", coordinator.state.participants[node].node_info, 0, ord(name) - A, 2), origin="inc", round_over=False
    )
    return job.told(coordinator.receive(session, held, job.now).messages)


def to(session: int, messages: list[Told]) -> list[object]:
    return [message for receiver, message in messages if receiver == session]


def test_a_returning_node_is_asked_again_until_it_has_answered() -> None:
    job, _ = hung()
    half, rest = CollectedPart(1, b"p1", False), CollectedPart(1, b"p2", True, is_first=False)
    assert job.hears("b", half) == [(A, half._replace(node="b (rank 1)"))]
    assert to(201, resumes(job, 201)) == [HangFound(0, 2), CollectRequested(1, CollectKind.HANG)]
    reporter = HangReporter(lambda _: None)
    for part in (half, half, rest):  # it begins anew
        reporter.add(part._replace(node="b"))
    assert reporter._told == {"b": [b"p1", b"p2"]}
    assert job.told(job.coordinator.receive(201, rest, job.now).messages) == [(A, rest._replace(node="b (rank 1)"))]
    assert to(202, resumes(job, 202)) == [HangFound(0, 2)], "it has answered"
    job.hears("a", HangReport(1, 0, "a report"))
    assert to(203, resumes(job, 203)) == []


def test_a_new_coordinator_reports_a_hang_once_all_nodes_are_back() -> None:
    job, _ = hung()
    successor = Coordinator(job.settings, "inc")
    successor.restore(job.coordinator.state, job.now)
    job.coordinator = successor
    told = [[type(message) for _, message in resumes(job, ord(name) + 200, name)] for name in "ab"]
    assert told == [[], [HangFound, HangFound, CollectRequested, CollectRequested]]


def test_unreachable_nodes_of_a_hang_are_not_asked() -> None:
    job, _ = hung()
    hangs, hung_state = job.coordinator.extensions.find("hangs"), job.coordinator.state
    before = hung_state._replace(quiet=frozenset())
    assert hangs._hang.check_hang(before, hung_state, lambda _: False, job.now)
    assert job.wait(100.0) == []


def test_a_hang_of_many_nodes_asks_some_at_a_time() -> None:
    nodes, told = 12_500, []
    job = Large(nodes)
    names = {node: f"node-{node.number:05}.{'x' * 200} (rank {node.number})" for node in job.nodes}

    def tell(to: Iterable[NodeId], message: Notification) -> None:
        told.append((list(to), message))

    def asked() -> list[NodeId]:
        return [node for to, message in told if isinstance(message, CollectRequested) for node in to]

    made = HangInvestigation(tell, count(1), names.__getitem__)
    state = job.coordinator.state
    assert made.check_hang(state, state._replace(quiet=frozenset(job.nodes)), lambda _: True, 0.0)
    assert asked() == job.nodes[:1024]
    for node in job.nodes[:1000]:
        made.on_answer(node, CollectedPart(1, b"evidence", True), 1.0)
    assert len(asked()) == 1024, "the reporting node has read nothing yet"
    for _ in range(1000):
        made.on_answer(job.nodes[0], Taken(1), 1.0)
    assert asked() == job.nodes[:2024]
    now = 1.0
    while not isinstance(told[-1][1], CollectionEnded):
        now = made.wake_at()
        made.tick(now)
    assert now == 60.0
    to, end = told[-1]
    assert to == job.nodes[:1]
    assert isinstance(end, CollectionEnded)
    assert len(end.silent) == 8
    assert len(end.silent) + end.more == nodes - 1000
    check_size(len(encode(end)))


def test_a_coordinator_without_a_server_ends_a_collection_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, CollectKind.HANG, LIMITS[CollectKind.HANG]._replace(seconds=0.05))
    monkeypatch.setattr(hang, "_REPORT", 0.05)
    told: queue.SimpleQueue[Notification] = queue.SimpleQueue()
    handler = create_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    assert isinstance(handler, ElasticHandler)
    link = handler._control.open(told.put, Deadline.after(10.0))
    link.send(JoinRequest(NodeInfo("default", 1, "", 7000), 60.0))
    link.send(ReportQuiet(0))
    while not isinstance(message := told.get(timeout=10.0), HangReport):
        pass
    assert "did not send the report of this hang" in message.report
    link.close()
    handler._control.close()
