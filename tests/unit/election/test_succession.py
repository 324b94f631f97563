"""Changes are announced once they are stored, and a successor continues as the same coordinator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.leader_lease import LeaderLease
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Drain, Fail, NodeId, Outcome, Settings, Succeed, recovery_timeout
from rallypoint.control.protocol.messages import (
    Confirmed,
    ConfirmRequest,
    Heartbeat,
    JobEnded,
    Notification,
    Placed,
    Progress,
    ProgressRequest,
    Request,
    RoundEnded,
)
from tests.effort import examples
from tests.unit.clocks import HandClock
from tests.unit.coordinator.resuming import CAUSE, Job, Node


def rounds(node: Node) -> list[int]:
    return [notice.placement.round for notice in node.told if isinstance(notice, Placed)]


def test_notifications_wait_for_the_journal_and_answers_without_a_change_do_not() -> None:
    job = Job(2, 2)
    for node in job.nodes:
        node.told.clear()
    job.say(job.nodes[0], ProgressRequest())
    job.say(job.nodes[0], Fail(0, CAUSE, 3))
    job.beat(job.nodes[0])
    assert [[type(notice) for notice in node.told] for node in job.nodes] == [[Progress, Heartbeat], []]
    job.store()
    assert [type(node.told[-1]) for node in job.nodes] == [RoundEnded, RoundEnded]


def test_joins_are_stored_later_unless_a_node_waits_for_an_answer() -> None:
    """Nodes repeat a join that was not answered."""
    job = Job(2, 2)
    assert job.journal.awaited, "a round is complete"
    job.say(job.nodes[0], Fail(0, CAUSE, 3))
    job.store()
    assert job.journal.newest is not None
    awaited = job.journal.awaited
    job.join(job.nodes[0])
    assert job.journal.newest[0] > awaited
    assert job.journal.awaited == awaited
    job.say(job.nodes[0], ProgressRequest())
    assert job.journal.awaited == job.journal.newest[0]


def test_confirmations_keep_the_order_of_notifications() -> None:
    job = Job(2, 2)
    for node in job.nodes:
        node.told.clear()
    job.dispatcher.receive(job.nodes[0].session, ConfirmRequest(1))
    job.dispatcher.receive(job.nodes[1].session, Fail(0, CAUSE, 3))
    job.dispatcher.receive(job.nodes[0].session, ConfirmRequest(2))
    assert job.nodes[0].told == [Confirmed(1, job.settings.lease)]
    job.store()
    assert [type(each) for each in job.nodes[0].told] == [Confirmed, RoundEnded, Confirmed]


def test_a_coordinator_without_a_lease_confirms_nothing() -> None:
    """Another one may have been elected. After a renewal of the lease, pending requests are answered."""
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
    assert leads == [True, False], "then heartbeats do not count"
    for number in (2, 3):
        dispatcher.receive(session, ConfirmRequest(number))
    assert told == [Confirmed(1, 2.0)]
    lead.extend(clock.now - 0.5, 3.0)
    dispatcher.tick()
    assert told == [Confirmed(1, 2.0), Confirmed(3, 2.5)]
    lead.end()
    assert not dispatcher.is_leader


def test_nobody_waits_for_a_dead_node() -> None:
    job = Job(3, 2)
    job.succeeded()
    job.open(job.nodes[1])
    job.dispatcher.nodes_lost([job.nodes[0].id.number])
    job.store()
    job.open(job.nodes[2])
    for node in job.nodes[1:]:
        job.join(node)
    job.heartbeats(6.0)
    assert [rounds(node) for node in job.nodes] == [[0], [0, 1], [0, 1]]


def test_a_node_with_a_session_is_not_lost() -> None:
    job = Job(2, 2)
    job.dispatcher.nodes_lost([job.nodes[0].id.number])
    job.store()
    assert job.state.complete
    assert [rounds(node) for node in job.nodes] == [[0], [0]]


def test_no_round_completes_with_a_node_lost_at_that_moment() -> None:
    job = Job(3, 1)
    job.say(job.nodes[0], Fail(0, CAUSE, 3))
    for node in job.nodes[1:]:
        job.join(node)
    job.store()
    job.succeeded()
    job.open(job.nodes[2])
    job.heartbeats(recovery_timeout(job.settings) + 1.0)
    assert set(job.state.participants) == {job.nodes[2].id}
    assert [rounds(node) for node in job.nodes] == [[0], [0], [0, 1]]
    assert not any(isinstance(each, RoundEnded) and each.end.round for each in job.nodes[2].told)


@pytest.mark.parametrize("gone", [0, 2])
@pytest.mark.parametrize("most", [4, 5])
def test_no_round_completes_with_a_missing_node(gone: int, most: int) -> None:
    """With 4 places, a new node takes the last one, and the round would not wait for the last call."""
    job = Job(3, 2, most=most)
    job.succeeded()
    back = [node for node in job.nodes if node is not job.nodes[gone]]
    for node in back:
        job.open(node)
    job.nodes.append(Node(3))
    job.open(job.nodes[3])
    job.join(job.nodes[3])
    job.heartbeats(job.settings.last_call_timeout + 2.0)
    assert not job.state.complete, "its workers would wait for those of the missing node"
    job.heartbeats(recovery_timeout(job.settings))
    assert set(job.state.participants) == {node.id for node in (*back, job.nodes[3])}
    assert [rounds(node) for node in (*back, job.nodes[3])] == [[0]] * 3
    assert not any(isinstance(notice, RoundEnded) for node in job.nodes for notice in node.told)


def test_a_round_completes_when_its_last_node_is_back() -> None:
    job = Job(3, 2, most=5)
    job.succeeded()
    for node in job.nodes[:2]:
        job.open(node)
    job.heartbeats(job.settings.last_call_timeout + 2.0)
    assert not job.state.complete
    job.open(job.nodes[2])
    job.store()
    assert [rounds(node) for node in job.nodes] == [[0]] * 3


def test_nodes_fill_the_successor_of_a_partly_filled_coordinator() -> None:
    job = Job(2, 1)
    first, second = job.nodes
    for node in job.nodes:
        node.told.clear()
    job.forgotten()
    job.open(first)
    job.store()
    job.succeeded()
    for node in (second, first):
        job.open(node)
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert all(set(node.told) <= {Heartbeat()} for node in job.nodes)
    assert [node.held.round_over for node in job.nodes] == [False, False]


def test_reports_to_a_coordinator_that_stored_nothing_are_repeated() -> None:
    """It knows that coordinator's name from a heartbeat, which is answered before anything is stored."""
    job = Job(2, 1)
    first, second = job.nodes
    job.forgotten()
    job.open(first)
    job.beat(first)
    job.succeeded()
    job.open(first)
    job.open(second)
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert job.state.complete
    assert job.state.round == 0
    assert [node.held.round_over for node in job.nodes] == [False, False]


def stores(node: Node) -> list[int]:
    return [notice.placement.store_port for notice in node.told if isinstance(notice, Placed)]


def test_a_waiting_node_stays_one_node_across_coordinators() -> None:
    """The coordinator between them never wrote its state, since etcd was away."""
    job = Job(2, 1, most=4)
    job.passed_over()
    for node in job.nodes:
        job.open(node)
    state = job.state
    assert set(state.participants) == {node.id for node in job.nodes}
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert [rounds(node) for node in job.nodes] == [[0], [0]]
    assert [stores(node) for node in job.nodes] == [[job.nodes[0].port]] * 2


def test_an_unannounced_place_does_not_use_an_abandoned_store() -> None:
    job = Job(2, 2, most=3)
    job.dispatcher.tick()
    job.time.now += 10.0
    job.dispatcher.tick()  # the last call is over; what follows is stored and not announced
    assert job.state.complete
    assert job.journal.newest is not None
    job.journal.stored = job.journal.newest[1]
    job.passed_over()
    for node in job.nodes:
        job.open(node)
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert [stores(node)[-1] for node in job.nodes] == [job.nodes[0].port] * 2


def test_a_returning_node_brings_the_store_of_its_newest_join() -> None:
    job = Job(3, 3)
    job.say(job.nodes[0], Fail(0, CAUSE, 3))
    job.store()
    for node in job.nodes[:2]:
        job.join(node)
    job.store()
    job.passed_over()
    for node in job.nodes:
        job.open(node)
    job.join(job.nodes[2])
    job.heartbeats(2 * recovery_timeout(job.settings))
    assert [rounds(node) for node in job.nodes] == [[0, 1]] * 3
    assert [stores(node)[-1] for node in job.nodes] == [job.nodes[0].port] * 3


STEPS = st.lists(
    st.tuples(st.sampled_from(["fail", "succeed", "drain", "store", "store", "succession"]), st.integers(0, 2)),
    max_size=25,
)


@settings(max_examples=examples(300))
@given(STEPS, st.integers(2, 3))
def test_rounds_keep_one_membership_wherever_the_coordinator_dies(steps: list[tuple[str, int]], least: int) -> None:
    """No node dies here, so each round has all of them, and a failure counts at most once."""
    job = Job(3, least)
    failures = 0
    for what, number in steps:
        node = job.nodes[number]
        placement = node.held.placement
        if what == "store":
            job.store()
        elif what == "succession":
            job.succeeded()
            for other in job.nodes:
                job.open(other)
        elif placement is not None and not node.held.round_over and not node.held.ended:
            failures += what == "fail"
            requests: dict[str, Request] = {
                "fail": Fail(placement.round, CAUSE, 99),
                "succeed": Succeed(placement.round),
                "drain": Drain(placement.round),
            }
            job.say(node, requests[what])
        rejoin(job)
    settle(job)
    verdict = job.state.verdict
    assert verdict is not None
    assert verdict.outcome is Outcome.SUCCEEDED
    assert job.state.ledger.failures <= failures
    assert job.state.ledger.lost == 0
    assert all(any(isinstance(notice, JobEnded) for notice in node.told) for node in job.nodes)
    ranks = [
        (notice.placement.round, notice.placement.group_rank)
        for node in job.nodes
        for notice in node.told
        if isinstance(notice, Placed)
    ]
    assert len(ranks) == len(set(ranks)), "a round has a rank twice"


def rejoin(job: Job) -> None:
    """Join again where a round has ended, as an agent does."""
    for node in job.nodes:
        if node.held.round_over and node.held.join is None and not node.held.ended:
            job.join(node)


def settle(job: Job) -> None:
    """Without further faults, every node returns into a round and succeeds in it."""
    for _ in range(40):
        job.store()
        rejoin(job)
        for node in job.nodes:
            placement = node.held.placement
            if placement is not None and not node.held.round_over and not node.held.ended:
                job.say(node, Succeed(placement.round))
        job.heartbeats(1.0)
        if all(node.held.ended for node in job.nodes):
            return
