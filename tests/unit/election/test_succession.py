"""A stored state: no node hears of a change before it is stored, and a successor continues as the same coordinator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.control.coordinator.dispatcher import Dispatcher, RestoredState
from rallypoint.control.coordinator.leader_lease import LeaderLease
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import (
    Drain,
    Fail,
    NodeId,
    NodeInfo,
    Outcome,
    Settings,
    State,
    Succeed,
    recovery_timeout,
)
from rallypoint.control.protocol.messages import (
    Confirmed,
    ConfirmRequest,
    Heartbeat,
    JobEnded,
    JoinRequest,
    Notification,
    Placed,
    Progress,
    ProgressRequest,
    Request,
    RoundEnded,
)
from rallypoint.control.protocol.resume_state import (
    ResumeState,
    after_notification,
    after_request,
    requests_to_repeat,
    without_foreign_join,
)
from rallypoint.failures.cause import Cause
from tests.effort import examples
from tests.unit.clocks import HandClock

CAUSE = Cause(0, 0, "h", 42, 1, "boom", "", 0.0, "")


class Shelf:
    """Keeps states when the test says so."""

    def __init__(self) -> None:
        self.newest: tuple[int, State] | None = None
        self.awaited = 0
        self.kept = State()

    def append(self, number: int, state: State, awaited: int) -> None:
        self.newest = (number, state)
        self.awaited = awaited


class Node:
    """One node's link, without a wire."""

    def __init__(self, number: int) -> None:
        self.id = NodeId(f"h{number}", 1, number)
        self.port = 7000 + number
        self.held = ResumeState()
        self.session = 0
        self.told: list[Notification] = []

    def hear(self, notice: Notification) -> None:
        self.held = after_notification(self.held, notice, 0.0)
        self.told.append(notice)


class Job:
    """Some nodes, the dispatcher of the coordinator that they speak to, and where it keeps its state."""

    def __init__(self, nodes: int, least: int, most: int = 0) -> None:
        self.settings = Settings("job", least, most or nodes, last_call_timeout=5.0)
        self.time = HandClock()
        self.shelf = Shelf()
        self.dispatcher = Dispatcher(self.settings, self.time, journal=self.shelf)
        self.nodes = [Node(number) for number in range(nodes)]
        for node in self.nodes:
            self.open(node)
            self.join(node)
        self.keep()

    def open(self, node: Node) -> None:
        node.session = self.dispatcher.attach(node.hear, SessionRecord(node.id, node.id.addr))
        waited = node.held.join is not None
        node.held = without_foreign_join(node.held, self.dispatcher.incarnation)
        again = requests_to_repeat(node.held, self.time.now)
        node.held = node.held._replace(opened=self.dispatcher.incarnation)
        for request in again:
            self.dispatcher.receive(node.session, request)
        if waited and node.held.join is None and not any(isinstance(each, JoinRequest) for each in again):
            self.join(node)

    def say(self, node: Node, request: Request) -> None:
        node.held = after_request(node.held, request, self.time.now)
        if node.session:
            self.dispatcher.receive(node.session, request)

    def beat(self, node: Node) -> None:
        """The connection answers a heartbeat itself."""
        if self.dispatcher.heartbeat(node.session):
            node.hear(Heartbeat())

    def join(self, node: Node) -> None:
        self.say(node, JoinRequest(NodeInfo("default", 1, "", node.port), 600.0))

    def keep(self) -> None:
        """What the coordinator knows reaches the shelf."""
        if self.shelf.newest is not None:
            number, self.shelf.kept = self.shelf.newest
            self.dispatcher.journal_written(number)

    def succeeded(self) -> None:
        """The coordinator is gone with all sessions and all that was not kept; another takes over."""
        restored = RestoredState(self.dispatcher.incarnation, self.shelf.kept)
        self.shelf = Shelf()
        self.shelf.kept = restored.state
        self.dispatcher = Dispatcher(self.settings, self.time, restored=restored, journal=self.shelf)
        for node in self.nodes:
            node.session = 0

    def forgotten(self) -> None:
        """The coordinator is gone, and so is what was kept; one that knows nothing begins."""
        self.shelf = Shelf()
        self.dispatcher = Dispatcher(self.settings, self.time, journal=self.shelf)
        for node in self.nodes:
            node.session = 0

    def passed_over(self) -> None:
        """Another coordinator begins with nothing, keeps nothing, and is gone; what was kept before it is restored."""
        incarnation, kept = self.dispatcher.incarnation, self.shelf.kept
        self.forgotten()
        for node in self.nodes:
            node.port += 100  # a join that is said anew brings another store
            self.open(node)
            self.beat(node)
        self.shelf = Shelf()
        self.shelf.kept = kept
        self.dispatcher = Dispatcher(
            self.settings, self.time, restored=RestoredState(incarnation, kept), journal=self.shelf
        )
        for node in self.nodes:
            node.session, node.port = 0, node.port + 100

    def heartbeats(self, seconds: float) -> None:
        """Time passes; whoever has a session sends heartbeats."""
        until = self.time.now + seconds
        while self.time.now < until:
            self.time.now += 0.5
            for node in self.nodes:
                if node.session:
                    self.beat(node)
            self.dispatcher.tick()
            self.keep()


def runs(job: Job) -> bool:
    return job.dispatcher.state.complete


def rounds(node: Node) -> list[int]:
    return [each.placement.round for each in node.told if isinstance(each, Placed)]


def test_nobody_is_told_before_it_is_kept_and_heartbeats_are_answered_all_the_same() -> None:
    job = Job(2, 2)
    for node in job.nodes:
        node.told.clear()
    job.say(job.nodes[0], Fail(0, CAUSE, 3))
    job.beat(job.nodes[0])
    assert [node.told for node in job.nodes] == [[Heartbeat()], []]
    job.keep()
    assert [[type(each) for each in node.told] for node in job.nodes] == [[Heartbeat, RoundEnded], [RoundEnded]]


def test_arrivals_in_a_forming_round_can_wait_and_what_somebody_waits_for_cannot() -> None:
    """Nodes repeat a join that was not answered."""
    job = Job(2, 2)
    assert job.shelf.awaited, "a round is complete"
    job.say(job.nodes[0], Fail(0, CAUSE, 3))
    job.keep()
    assert job.shelf.newest is not None
    told = job.shelf.awaited
    job.join(job.nodes[0])
    assert job.shelf.newest[0] > told
    assert job.shelf.awaited == told
    job.say(job.nodes[0], ProgressRequest())
    assert job.shelf.awaited == job.shelf.newest[0]


def test_a_place_is_confirmed_after_all_that_was_to_be_told_before() -> None:
    job = Job(2, 2)
    for node in job.nodes:
        node.told.clear()
    job.dispatcher.receive(job.nodes[0].session, ConfirmRequest(1))
    job.dispatcher.receive(job.nodes[1].session, Fail(0, CAUSE, 3))
    job.dispatcher.receive(job.nodes[0].session, ConfirmRequest(2))
    assert job.nodes[0].told == [Confirmed(1, job.settings.lease)]
    job.keep()
    assert [type(each) for each in job.nodes[0].told] == [Confirmed, RoundEnded, Confirmed]


def test_a_coordinator_whose_lease_may_have_ended_confirms_nobody() -> None:
    """Another one may have been elected. Once its lease is renewed, it answers those that have asked meanwhile."""
    clock = HandClock(50.0)
    lead = LeaderLease(clock)
    lead.extend(clock.now, 3.0)
    told: list[Notification] = []
    dispatcher = Dispatcher(Settings("job", 1, 1, lease=3.0), lead=lead)
    session = dispatcher.attach(told.append, SessionRecord(NodeId("n", 1, 0), "n"))
    clock.now += 1.0
    dispatcher.receive(session, ConfirmRequest(1))
    assert told == [Confirmed(1, 2.0)]
    leads = [dispatcher.is_leader]
    clock.now += 2.0
    leads.append(dispatcher.is_leader)
    assert leads == [True, False], "then no heartbeat counts"
    for number in (2, 3):
        dispatcher.receive(session, ConfirmRequest(number))
    assert told == [Confirmed(1, 2.0)]
    lead.extend(clock.now - 0.5, 3.0)
    dispatcher.tick()
    assert told == [Confirmed(1, 2.0), Confirmed(3, 2.5)]
    lead.end()
    assert not dispatcher.is_leader


def test_what_changed_nothing_is_told_at_once() -> None:
    job = Job(2, 2)
    job.nodes[0].told.clear()
    job.say(job.nodes[0], ProgressRequest())
    assert [type(each) for each in job.nodes[0].told] == [Progress]


def test_a_node_that_is_known_to_be_dead_is_waited_for_by_nobody() -> None:
    job = Job(3, 2)
    job.succeeded()
    job.open(job.nodes[1])
    job.dispatcher.nodes_lost([job.nodes[0].id.number])
    job.keep()
    job.open(job.nodes[2])
    for node in job.nodes[1:]:
        job.join(node)
    job.heartbeats(6.0)
    assert [rounds(node) for node in job.nodes] == [[0], [0, 1], [0, 1]]


def test_of_a_node_with_a_session_the_session_is_the_better_evidence() -> None:
    job = Job(2, 2)
    job.dispatcher.nodes_lost([job.nodes[0].id.number])
    job.keep()
    assert runs(job)
    assert [rounds(node) for node in job.nodes] == [[0], [0]]


def test_no_round_is_completed_with_one_who_is_lost_at_the_same_moment() -> None:
    job = Job(3, 1)
    job.say(job.nodes[0], Fail(0, CAUSE, 3))
    for node in job.nodes[1:]:
        job.join(node)
    job.keep()
    job.succeeded()
    job.open(job.nodes[2])
    job.heartbeats(recovery_timeout(job.settings) + 1.0)
    assert set(job.dispatcher.state.participants) == {job.nodes[2].id}
    assert [rounds(node) for node in job.nodes] == [[0], [0], [0, 1]]
    assert not any(isinstance(each, RoundEnded) and each.end.round for each in job.nodes[2].told)


@pytest.mark.parametrize("gone", [0, 2])
@pytest.mark.parametrize("most", [4, 5])
def test_no_round_is_completed_with_a_node_that_has_not_come_back(gone: int, most: int) -> None:
    """With 4 places the last one is taken by a node that comes now: then the round would wait for no last call."""
    job = Job(3, 2, most=most)
    job.succeeded()
    back = [node for node in job.nodes if node is not job.nodes[gone]]
    for node in back:
        job.open(node)
    job.nodes.append(Node(3))
    job.open(job.nodes[3])
    job.join(job.nodes[3])
    job.heartbeats(job.settings.last_call_timeout + 2.0)
    assert not runs(job), "the workers would wait for those of the node that is gone"
    job.heartbeats(recovery_timeout(job.settings))
    assert set(job.dispatcher.state.participants) == {node.id for node in (*back, job.nodes[3])}
    assert [rounds(node) for node in (*back, job.nodes[3])] == [[0]] * 3
    assert not any(isinstance(notice, RoundEnded) for node in job.nodes for notice in node.told)


def test_a_round_that_waits_for_its_nodes_only_is_complete_when_the_last_one_is_back() -> None:
    job = Job(3, 2, most=5)
    job.succeeded()
    for node in job.nodes[:2]:
        job.open(node)
    job.heartbeats(job.settings.last_call_timeout + 2.0)
    assert not runs(job)
    job.open(job.nodes[2])
    job.keep()
    assert [rounds(node) for node in job.nodes] == [[0]] * 3


def test_who_succeeds_a_coordinator_that_was_being_filled_is_filled_on() -> None:
    job = Job(2, 1)
    first, second = job.nodes
    for node in job.nodes:
        node.told.clear()
    job.forgotten()
    job.open(first)
    job.keep()
    job.succeeded()
    for node in (second, first):
        job.open(node)
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert all(set(node.told) <= {Heartbeat()} for node in job.nodes)
    assert [node.held.round_over for node in job.nodes] == [False, False]


def test_what_a_node_had_told_a_coordinator_that_did_not_keep_it_is_heard_again() -> None:
    """It knows that coordinator's name by a heartbeat, which is answered before anything is kept."""
    job = Job(2, 1)
    first, second = job.nodes
    job.forgotten()
    job.open(first)
    job.beat(first)
    job.succeeded()
    job.open(first)
    job.open(second)
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert runs(job)
    assert job.dispatcher.state.round == 0
    assert [node.held.round_over for node in job.nodes] == [False, False]


def stores(node: Node) -> list[int]:
    return [each.placement.store_port for each in node.told if isinstance(each, Placed)]


def test_a_node_that_waited_is_one_node_after_a_coordinator_that_kept_nothing() -> None:
    """As where etcd was away: the one between had never written its state, so that of the one before is restored."""
    job = Job(2, 1, most=4)
    job.passed_over()
    for node in job.nodes:
        job.open(node)
    state = job.dispatcher.state
    assert set(state.participants) == {node.id for node in job.nodes}
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert [rounds(node) for node in job.nodes] == [[0], [0]]
    assert [stores(node) for node in job.nodes] == [[job.nodes[0].port]] * 2, "that of a join which was given up"


def test_a_place_that_nobody_was_told_of_is_not_taken_with_a_store_that_was_given_up() -> None:
    job = Job(2, 2, most=3)
    job.dispatcher.tick()
    job.time.now += 10.0
    job.dispatcher.tick()  # the last call is over; what follows is kept and not told
    assert runs(job)
    assert job.shelf.newest is not None
    job.shelf.kept = job.shelf.newest[1]
    job.passed_over()
    for node in job.nodes:
        job.open(node)
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert [stores(node)[-1] for node in job.nodes] == [job.nodes[0].port] * 2


def test_who_came_back_into_the_next_round_brings_the_store_of_its_newest_join() -> None:
    job = Job(3, 3)
    job.say(job.nodes[0], Fail(0, CAUSE, 3))
    job.keep()
    for node in job.nodes[:2]:
        job.join(node)
    job.keep()
    job.passed_over()
    for node in job.nodes:
        job.open(node)
    job.join(job.nodes[2])
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert [rounds(node) for node in job.nodes] == [[0, 1]] * 3
    assert [stores(node)[-1] for node in job.nodes] == [job.nodes[0].port] * 3


STEPS = st.lists(
    st.tuples(st.sampled_from(["fail", "succeed", "drain", "keep", "keep", "succession"]), st.integers(0, 2)),
    max_size=25,
)


@settings(max_examples=examples(300))
@given(STEPS, st.integers(2, 3))
def test_wherever_the_coordinator_dies_each_round_has_one_membership_and_the_job_ends(
    steps: list[tuple[str, int]], least: int
) -> None:
    """No node dies here, so each round has all of them, and a failure that was told of is counted once or not yet."""
    job = Job(3, least)
    failures = 0
    for what, number in steps:
        node = job.nodes[number]
        placement = node.held.placement
        if what == "keep":
            job.keep()
        elif what == "succession":
            job.succeeded()
            for each in job.nodes:
                job.open(each)
        elif placement is not None and not node.held.round_over and not node.held.ended:
            failures += what == "fail"
            act: dict[str, Request] = {
                "fail": Fail(placement.round, CAUSE, 99),
                "succeed": Succeed(placement.round),
                "drain": Drain(placement.round),
            }
            job.say(node, act[what])
        come_back(job)
    settle(job)
    verdict = job.dispatcher.state.verdict
    assert verdict is not None
    assert verdict.outcome is Outcome.SUCCEEDED
    assert job.dispatcher.state.ledger.failures <= failures
    assert job.dispatcher.state.ledger.lost == 0
    assert all(any(isinstance(each, JobEnded) for each in node.told) for node in job.nodes)
    for round_ in range(job.dispatcher.state.round + 1):
        ranks = [
            each.placement.group_rank
            for node in job.nodes
            for each in node.told
            if isinstance(each, Placed) and each.placement.round == round_
        ]
        assert sorted(ranks) == sorted(set(ranks)), f"round {round_} has a rank twice"


def come_back(job: Job) -> None:
    """Whose round is over joins again, as an agent does."""
    for node in job.nodes:
        if node.held.round_over and node.held.join is None and not node.held.ended:
            job.join(node)


def settle(job: Job) -> None:
    """Nothing goes wrong any more: every node comes back into a round and succeeds in it."""
    for _ in range(40):
        job.keep()
        come_back(job)
        for node in job.nodes:
            placement = node.held.placement
            if placement is not None and not node.held.round_over and not node.held.ended:
                job.say(node, Succeed(placement.round))
        job.heartbeats(1.0)
        if all(node.held.ended for node in job.nodes):
            return
