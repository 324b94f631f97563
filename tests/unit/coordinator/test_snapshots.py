"""Snapshots of large jobs: totals of all nodes, a few rows, all rows in parts, and a limited rate."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, NodeInfo, Participant, Settings, State
from rallypoint.control.protocol.messages import NodeReport, ReportRequested
from rallypoint.observe.status import node_state, status_lines
from rallypoint.observe.watching import WATCHERS
from rallypoint.observe.watching.messages import (
    PAGE_NODES,
    SHOWN_NODES,
    CommandReply,
    MemberState,
    Snapshot,
    SnapshotPart,
    WatcherNotification,
    WatchRequest,
    decode_snapshot,
)
from rallypoint.observe.watching.watchers import WatcherSessions
from tests.unit.observe.snapshots import totals_of

WATCHER = 10**6
INFO = NodeInfo("default", 8, "", 7000, None, 3)


def node_id(number: int) -> NodeId:
    return NodeId(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1000 + number, number, f"n{number}")


class Large:
    """The coordinator of a running round, whose nodes have all just sent a message."""

    def __init__(self, nodes: int) -> None:
        self.now = 100.0
        self._asked = 0
        self.coordinator = Coordinator(Settings("job", nodes, nodes), "inc")
        self.nodes = [node_id(number) for number in range(nodes)]
        for number, node in enumerate(self.nodes):
            self.coordinator.open(number, SessionRecord(node, node.addr), self.now)
        members = {node: Participant(INFO, number) for number, node in enumerate(self.nodes)}
        self.coordinator.state = State(complete=True, participants=members)
        self.watchers: WatcherSessions = self.coordinator.extensions.find(WATCHERS)
        self.watchers.open(WATCHER)

    def ask(self, request: WatchRequest) -> list[WatcherNotification]:
        self.watchers.receive(WATCHER, request, self.now, "")
        return self.told()

    def told(self) -> list[WatcherNotification]:
        """The messages to the watcher now."""
        while self.watchers.wake_at() <= self.now:
            self.watchers.tick(self.now)
        return [message for _, message in self.sent() if not isinstance(message, ReportRequested)]

    def reports(self, node: NodeId, report: NodeReport) -> None:
        speaker = self.coordinator.sessions.find(node)
        assert speaker is not None
        self.watchers.handlers[NodeReport](speaker, report, self.now)

    def asked(self) -> int:
        """The number of requests for reports since the last call."""
        self.sent()
        asked, self._asked = self._asked, 0
        return asked

    def sent(self) -> list[OutgoingMessage]:
        """The messages since the last call."""
        messages = self.coordinator.take_result().messages
        self._asked += sum(isinstance(message, ReportRequested) for _, message in messages)
        return messages

    def snapshot(self) -> Snapshot:
        return self.watchers.snapshot(self.now)()

    def page(self, first: int) -> Snapshot:
        return snapshot_in(self.ask(WatchRequest(first=first)))

    def all_rows(self) -> Snapshot:
        part = self.page(0)
        rows = [*part.nodes]
        while part.not_shown:
            part = self.page(len(rows))
            rows += part.nodes
        return part._replace(nodes=tuple(rows))


def snapshot_in(told: list[WatcherNotification]) -> Snapshot:
    return decode_snapshot(b"".join(each.data for each in told if isinstance(each, SnapshotPart)))


def test_small_jobs_show_all_nodes_and_large_ones_as_many() -> None:
    seen = Large(SHOWN_NODES).snapshot()
    assert [node.group_rank for node in seen.nodes] == list(range(SHOWN_NODES))
    assert seen.not_shown == 0
    job = Large(3000)
    job.coordinator.state = job.coordinator.state._replace(quiet=frozenset(job.nodes))
    seen = job.snapshot()
    assert (len(seen.nodes), seen.not_shown, seen.totals.quiet) == (SHOWN_NODES, 3000 - SHOWN_NODES, 3000)


def test_large_jobs_show_nodes_with_problems() -> None:
    job = Large(5000)
    state = job.coordinator.state
    job.coordinator.sessions.close(4000)
    waiting, spare = node_id(7000), node_id(7001)
    job.coordinator.state = state._replace(
        quiet=frozenset({job.nodes[4001]}), wait_list={waiting: INFO}, redundancy_list={spare: INFO}
    )
    for _ in range(2):
        job.now += 0.45 * job.coordinator.settings.lease
        for number in range(5000):
            if number != 4002:
                job.coordinator.sessions.liveness.note_message(number, job.now)
    job.ask(WatchRequest())
    for number, node in enumerate(job.nodes[:1024]):
        job.reports(node, NodeReport(0, progress=50, steps=(50,) * 7 + (50 - (number == 700) * 9,)))
    seen = job.snapshot()
    assert [node.host for node in seen.nodes] == ["n4000", "n4001", "n4002", "n700", "n7000", "n7001", "n0", "n1"]
    assert [node_state(node) for node in seen.nodes[:1]] == ["unreachable"]
    assert seen.not_shown == 5002 - 8
    assert seen.totals == totals_of(job.all_rows().nodes)
    lines = status_lines(seen)
    assert "nodes     5000 (min 5000, max 5000), 1 unreachable, 1 waiting, 1 spare, 1 quiet" in lines
    assert "progress  step 50, on 1024 nodes that reported" in lines
    assert "and 4994 more nodes" in lines


def test_all_rows_are_of_one_moment() -> None:
    job = Large(2 * PAGE_NODES + 5)
    first = job.page(0)
    job.coordinator.sessions.close(1500)
    job.coordinator.state = State(round=1, survivors={job.nodes[0]: 0})
    rest = [job.page(PAGE_NODES), job.page(2 * PAGE_NODES)]
    assert [(len(each.nodes), each.not_shown) for each in (first, *rest)] == [(1000, 1005), (1000, 5), (5, 0)]
    rows = [row for each in (first, *rest) for row in each.nodes]
    assert [each.group_rank for each in rows] == list(range(len(job.nodes)))
    assert all(each.connected for each in rows)
    assert job.page(10**6).nodes == ()


@pytest.mark.parametrize("name", ["n1234", "10.0.4.210", "2234@n1234", "1234", "n99999"])
def test_a_node_is_found_by_any_of_its_names(name: str) -> None:
    told = Large(2000).ask(WatchRequest(node=name))
    if name == "n99999":
        (reply,) = told
        assert isinstance(reply, CommandReply)
        assert "no node 'n99999'" in reply.detail
    else:
        assert [node.group_rank for node in snapshot_in(told).nodes] == [1234]


def test_reports_are_requested_in_waves() -> None:
    job = Large(2500)
    job.ask(WatchRequest())
    waves = [job.asked()]
    while (at := job.watchers.wake_at()) < job.now + 2.0:
        job.now = max(job.now, at)
        job.watchers.tick(job.now)
        waves.append(job.asked())
    assert [each for each in waves if each] == [1024, 1024, 452]
    job.ask(WatchRequest())
    assert job.asked() == 0, "they were asked a moment ago"


def test_followers_share_one_snapshot() -> None:
    job = Large(2)
    sessions = [WATCHER + 1, WATCHER + 2]
    known = job.snapshot().changes
    job.ask(WatchRequest())
    job.now += 0.25
    assert job.told()
    for session in sessions:
        job.watchers.open(session)
        job.watchers.receive(session, WatchRequest(after=known), job.now, "")
        job.now += 0.1
    job.now = job.watchers.wake_at()
    first, second = job.told()
    assert first is second


def test_followers_of_a_large_job_get_fewer_snapshots() -> None:
    job = Large(12_500)
    job.ask(WatchRequest(after=0))
    job.now += 0.25
    answered_at, known = job.now, snapshot_in(job.told()).changes
    job.now += 0.1
    job.ask(WatchRequest(after=known))
    job.watchers.on_change(job.coordinator.state, job.coordinator.state, job.now)
    assert job.told() == []
    job.now = answered_at + 1.0
    assert snapshot_in(job.told()).changes > known


@pytest.mark.parametrize("request_", [WatchRequest(), WatchRequest(first=0), WatchRequest(node="0")])
def test_a_new_request_replaces_an_unanswered_one(request_: WatchRequest) -> None:
    job = Large(2)
    for _ in range(100):
        job.watchers.receive(WATCHER, request_, job.now, "")
    job.now += 0.25
    assert len(job.told()) == 1


@given(st.lists(st.tuples(st.integers(-1, 50), st.integers(-1, 50)), max_size=8))
def test_the_median_is_one_of_the_steps(steps: list[tuple[int, int]]) -> None:
    job = Large(len(steps))
    job.ask(WatchRequest())
    for node, each in zip(job.nodes, steps, strict=True):
        job.reports(node, NodeReport(0, steps=each))
    told = [each for pair in steps for each in pair if each >= 0]
    found = job.snapshot().totals.steps
    if len(told) < 2:
        assert found is None
        return
    assert found is not None
    assert found.median == statistics.median_high(told)
    assert [each.behind for each in found.behind] == sorted(found.median - s for s in told if s < found.median)[::-1]
    assert found == totals_of(job.snapshot().nodes).steps


@given(st.lists(st.sampled_from(["there", "gone", "done", "waits", "spare", "awaited"]), max_size=30), st.booleans())
def test_totals_count_all_rows(kinds: list[str], complete: bool) -> None:
    job = Large(len(kinds))
    state = job.coordinator.state
    chosen = {kind: [node for node, each in zip(job.nodes, kinds, strict=True) if each == kind] for kind in set(kinds)}
    members = [node for kind in ("there", "gone", "done") for node in chosen.get(kind, [])]
    job.coordinator.state = state._replace(
        complete=complete,
        participants={node: Participant(INFO, rank) for rank, node in enumerate(members)},
        succeeded=frozenset(chosen.get("done", []) if complete else []),
        wait_list=dict.fromkeys(chosen.get("waits", []), INFO),
        redundancy_list=dict.fromkeys(chosen.get("spare", []), INFO),
        survivors={node: rank for rank, node in enumerate(chosen.get("awaited", []))},
    )
    for node in chosen.get("gone", []):
        job.coordinator.sessions.close(job.nodes.index(node))
    seen = job.snapshot()
    assert seen.totals == totals_of(seen.nodes)
    assert seen.totals.in_round == sum(node.state is MemberState.PARTICIPANT for node in seen.nodes)


@pytest.mark.parametrize(("request_", "least"), [(WatchRequest(first=0), 16), (WatchRequest(node="3999"), 4)])
def test_large_snapshots_are_made_in_slices(request_: WatchRequest, least: int) -> None:
    """The loop serves nodes between two slices."""
    job = Large(4000)
    job.watchers.receive(WATCHER, request_, job.now, "")
    ticks = 0
    while not (sent := job.coordinator.take_result().messages):
        assert job.watchers.wake_at() <= job.now
        job.watchers.tick(job.now)
        ticks += 1
    assert ticks >= least
    assert snapshot_in([message for _, message in sent]).nodes
