"""Nodes fill a new coordinator with their states, in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.sessions import SessionRecord, SessionState
from rallypoint.control.membership.state import (
    Drain,
    Fail,
    NodeId,
    NodeInfo,
    NodeRange,
    Outcome,
    PreemptJob,
    ReportQuiet,
    Settings,
    State,
    Succeed,
    recovery_timeout,
)
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRequest,
    LeaveRequest,
    Notification,
    Placed,
    Preempted,
    Request,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.control.protocol.resume_state import (
    ResumeState,
    after_notification,
    after_request,
    requests_to_repeat,
    without_foreign_join,
)
from rallypoint.failures.cause import Cause, Ending

CAUSE = Cause(0, 0, "h", 42, 1, "boom", "", 0.0, "")


class Node:
    """One node's link, without a wire: what it holds, and its session with the present coordinator."""

    def __init__(self, number: int) -> None:
        self.id = NodeId(f"h{number}", 1, 0)
        self.port = 7000 + number
        self.held = ResumeState()
        self.session = 0
        self.told: list[Notification] = []


def absents(state: State) -> list[NodeId]:
    """Those who are yet to speak."""
    return [node for node in (*state.participants, *state.survivors) if node.is_placeholder]


class Job:
    """Some nodes and the coordinator that they speak to."""

    def __init__(self, count: int, least: int = 1) -> None:
        self.settings = Settings("job", least, count)
        self.coordinator = Coordinator(self.settings, "0")
        self.nodes = [Node(number) for number in range(count)]
        self.now = 0.0
        self.sessions = 0
        for node in self.nodes:
            self.open(node)
        for node in self.nodes:
            self.join(node)

    def open(self, node: Node) -> None:
        """A session, at the beginning of which the node says what it holds."""
        self.sessions += 1
        node.session = self.sessions
        self.coordinator.open(node.session, SessionRecord(node.id, node.id.addr), self.now)
        waited = node.held.join is not None
        node.held = without_foreign_join(node.held, self.coordinator.incarnation)
        again = requests_to_repeat(node.held, self.now)
        node.held = node.held._replace(opened=self.coordinator.incarnation)
        for request in again:
            self.deliver(self.coordinator.receive(node.session, request, self.now).messages)
        if waited and node.held.join is None and not any(isinstance(each, JoinRequest) for each in again):
            self.join(node)

    def say(self, node: Node, request: Request) -> None:
        node.held = after_request(node.held, request, self.now)
        self.deliver(self.coordinator.receive(node.session, request, self.now).messages)

    def join(self, node: Node) -> None:
        self.say(node, JoinRequest(NodeInfo("default", 1, "", node.port), 600.0))

    def deliver(self, sends: list[OutgoingMessage]) -> None:
        for session, notice in sends:
            for node in self.nodes:
                if node.session == session:
                    node.held = after_notification(node.held, notice, self.now)
                    node.told.append(notice)

    def replaced(self) -> None:
        """The coordinator is gone, with all sessions; another takes its place."""
        self.coordinator = Coordinator(self.settings, str(int(self.coordinator.incarnation) + 1))
        for node in self.nodes:
            node.session = 0
            node.told.clear()

    def passes(self, seconds: float, beating: list[Node]) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for node in beating:
                self.coordinator.heartbeat(node.session, self.now)
            self.deliver(self.coordinator.tick(self.now).messages)


def ranks(coordinator: Coordinator) -> dict[str, int]:
    return {node.addr: each.rank for node, each in coordinator.state.participants.items()}


@given(st.integers(1, 5).flatmap(lambda count: st.permutations(range(count))), st.integers(0, 3))
def test_a_running_round_runs_on_and_nobody_is_told(order: list[int], failures: int) -> None:
    job = Job(len(order))
    for _ in range(failures):
        job.say(job.nodes[0], Fail(job.coordinator.state.round, CAUSE, 9))
        for node in job.nodes:
            job.join(node)
    before = job.coordinator.state
    job.replaced()
    for number in order:
        job.open(job.nodes[number])
    after = job.coordinator.state
    assert not any(node.told for node in job.nodes)
    assert not absents(after)
    assert (after.round, after.complete, after.ledger.failures) == (before.round, True, failures)
    assert {node: each.rank for node, each in after.participants.items()} == {
        node: each.rank for node, each in before.participants.items()
    }


@given(st.permutations(range(4)), st.sets(st.integers(0, 3), min_size=1), st.booleans())
def test_an_end_that_some_had_heard_of_is_told_to_the_others_and_counted_once(
    order: list[int], unheard: set[int], joined: bool
) -> None:
    job = Job(4)
    deaf = [job.nodes[number] for number in unheard]
    before = {node.id: node.held for node in deaf}
    job.say(job.nodes[3], Fail(0, CAUSE, 9))
    for node in deaf:
        node.held = before[node.id]
        if node is job.nodes[3]:  # it has failed, and does not know whether anybody has heard
            node.held = after_request(node.held, Fail(0, CAUSE, 9), 0.0)
    for node in job.nodes:
        if joined and node not in deaf:
            job.join(node)
    job.replaced()
    for number in order:
        job.open(job.nodes[number])
    for node in job.nodes:
        if node.held.placement is not None and node.held.placement.round == 0 and node.held.join is None:
            assert node.held.round_over, "whoever holds a place in a round that is over has been told"
            job.join(node)
    state = job.coordinator.state
    assert (state.round, state.complete, state.ledger.failures) == (1, True, 1)
    assert sorted(ranks(job.coordinator).values()) == [0, 1, 2, 3]
    assert all(sum(isinstance(each, RoundEnded) for each in node.told) <= 1 for node in job.nodes)


@given(st.permutations(range(4)), st.integers(1, 3))
def test_who_has_succeeded_and_does_not_come_back_is_not_lost(order: list[int], gone: int) -> None:
    """Its agent was stopped with the coordinator, or meanwhile: its work is done, and that of the others goes on."""
    job = Job(4)
    done, at_work = order[:gone], order[gone:]
    for number in done:
        job.say(job.nodes[number], Succeed(0))
    job.passes(2.0, job.nodes)
    before = job.coordinator.state
    job.replaced()
    for number in at_work:
        job.open(job.nodes[number])
    present = [job.nodes[number] for number in at_work]
    job.passes(recovery_timeout(job.settings) + 1.0, present)
    assert (job.coordinator.state.round, job.coordinator.state.complete) == (0, True)
    assert not any(isinstance(notice, RoundEnded) for node in present for notice in node.told)
    kept = {job.nodes[number].id: before.participants[job.nodes[number].id].rank for number in at_work}
    assert {node: each.rank for node, each in job.coordinator.state.participants.items()} == kept
    back = job.nodes[done[0]]  # or it does come back, late: it waits for the verdict
    for node in present:
        job.say(node, Succeed(0))
    job.open(back)
    for node in (back, *present):
        (verdict,) = [notice.verdict for notice in node.told if isinstance(notice, JobEnded)]
        assert verdict.outcome is Outcome.SUCCEEDED


@given(st.permutations(range(4)), st.integers(1, 3))
def test_who_does_not_speak_in_time_is_lost(order: list[int], missing: int) -> None:
    job = Job(4)
    job.replaced()
    present = [job.nodes[number] for number in order[missing:]]
    for node in present:
        job.open(node)
    assert len(absents(job.coordinator.state)) == missing
    job.passes(30.0, present)
    assert not absents(job.coordinator.state)
    for node in present:
        assert [type(each) for each in node.told if isinstance(each, RoundEnded)] == [RoundEnded]
        job.join(node)
    assert job.coordinator.state.complete
    assert len(job.coordinator.state.participants) == 4 - missing


@given(st.permutations(range(3)), st.sets(st.integers(0, 2)))
def test_success_is_said_again(order: list[int], early: set[int]) -> None:
    job = Job(3)
    for number in early:
        if len(early) < 3:
            job.say(job.nodes[number], Succeed(0))
    job.replaced()
    for number in order:
        job.open(job.nodes[number])
    for node in job.nodes:
        if not node.held.repeated_requests:
            job.say(node, Succeed(0))
    verdict = job.coordinator.state.verdict
    assert verdict is not None
    assert verdict.outcome is Outcome.SUCCEEDED
    assert all(node.held.ended for node in job.nodes)


@given(st.permutations(range(4)), st.integers(0, 3), st.sets(st.integers(0, 3), max_size=3), st.integers(0, 3))
def test_a_preempted_job_is_known_whoever_is_left_to_tell(
    order: list[int], speaker: int, saved: set[int], lost: int
) -> None:
    job = Job(4)
    job.say(job.nodes[speaker], PreemptJob(60.0, "received SIGUSR2"))
    for number in sorted(saved):
        job.say(job.nodes[number], Drain(0, needs_consent=True))
    job.replaced()
    present = [job.nodes[number] for number in order[lost:]]
    for node in present:
        job.open(node)
        assert job.coordinator.state.is_preempted
    job.passes(30.0, present)
    waits = [node for node in present if job.nodes.index(node) not in saved]
    assert (job.coordinator.state.verdict is None) == bool(waits)
    for node in waits:
        job.say(node, Drain(0, needs_consent=True))
    verdict = job.coordinator.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.ending) == (Outcome.STOPPED, Ending.PREEMPTED)
    ends = [each for node in present for each in node.told if isinstance(each, JobEnded)]
    assert len(ends) == len(present)
    assert sum(each.is_delegate for each in ends) == 1
    assert not any(isinstance(each, RoundEnded) for node in present for each in node.told)


def test_who_was_away_is_told_of_the_preemption_when_it_is_back() -> None:
    job = Job(3)
    away = job.nodes[2]
    away.session = 0
    job.say(job.nodes[0], PreemptJob(60.0, "received SIGUSR2"))
    job.open(away)
    assert [each.whole_job for each in away.told if isinstance(each, Preempted)] == [True]
    job.say(away, Drain(0, needs_consent=True))
    job.open(away)
    assert sum(isinstance(each, Preempted) for each in away.told) == 1, "it has answered"


@given(st.integers(-2, 5), st.integers(-2, 5), st.integers(-2, 9))
def test_a_holding_that_cannot_be_changes_nothing(round_: int, rank: int, size: int) -> None:
    coordinator = Coordinator(Settings("job", 1, 3), "1")
    node = NodeId("h", 1, 0)
    coordinator.open(1, SessionRecord(node, "h"), 0.0)
    holding = ResumeRequest("0", NodeInfo("default", 1, "h", 7000), round_, rank, size, round_over=False)
    coordinator.receive(1, holding, 0.0)
    taken = node in coordinator.state.participants
    assert taken == (round_ >= 0 and 0 <= rank < size <= 3)


def test_a_node_with_a_place_knows_better_than_a_new_node_what_the_job_was_started_with() -> None:
    coordinator = Coordinator(Settings("job", 1, 2), "new", learns_settings=True)
    coordinator.open(1, SessionRecord(NodeId("late", 1, 0), "late", settings=Settings("job", 1, 2)), 0.0)
    coordinator.receive(1, JoinRequest(NodeInfo("default", 1, "", 1), 600.0), 0.0)
    for rank in range(3):
        node = NodeId(f"h{rank}", 1, 0)
        coordinator.open(rank + 2, SessionRecord(node, node.addr, settings=Settings("job", 1, 3)), 0.1)
        held = ResumeRequest(
            "old", NodeInfo("default", 1, "", 1), 4, rank, 3, failures=2, round_over=False, origin="old"
        )
        assert not [
            notice for _, notice in coordinator.receive(rank + 2, held, 0.1).messages if isinstance(notice, RoundEnded)
        ]
    assert (coordinator.state.round, coordinator.state.complete, coordinator.state.ledger.failures) == (4, True, 2)
    assert len(coordinator.state.participants) == 3
    assert len(coordinator.state.redundancy_list) == 1


def test_an_unknown_node_tells_the_coordinator_of_a_job_neither_settings_nor_rounds_that_it_cannot_have_had() -> None:
    ours = Settings("job", 1, 2)
    coordinator = Coordinator(ours, "new")
    unknown = NodeId("unknown", 1, 0)
    coordinator.open(1, SessionRecord(unknown, "unknown", settings=Settings("job", 1, 60000, lease=86400.0)), 0.0)
    held = ResumeRequest("old", NodeInfo("default", 1, "", 1), 4, 1, 60000, round_over=False, origin="old")
    coordinator.receive(1, held, 0.1)
    assert coordinator.settings == ours
    assert len(coordinator.state.participants) == 0


def test_two_rounds_that_happen_to_have_one_number_are_not_mixed() -> None:
    coordinator = Coordinator(Settings("job", 1, 2), "c")
    told = []
    for session, (host, rank, origin) in enumerate([("h0", 0, "b"), ("h1", 1, "a")]):
        node = NodeId(host, 1, 0)
        coordinator.open(session, SessionRecord(node, host), 0.0)
        told += coordinator.receive(
            session,
            ResumeRequest(origin, NodeInfo("default", 1, host, 1), 0, rank, 2, round_over=False, origin=origin),
            0.0,
        ).messages
    assert [(session, type(notice)) for session, notice in told] == [(1, RoundEnded)]
    assert [node.addr for node in coordinator.state.participants if not node.is_placeholder] == ["h0"]


def test_all_workers_of_a_round_are_told_one_restart_count_whatever_is_heard_meanwhile() -> None:
    job = Job(1)
    first = job.nodes[0]
    unknown = NodeId("old", 1, 0)
    job.coordinator.open(99, SessionRecord(unknown, "old"), 0.0)
    job.coordinator.receive(99, ResumeRequest("before", NodeInfo("default", 1, "old", 1), 3, 0, 1, failures=2), 0.0)
    unanswered = JoinRequest(NodeInfo("default", 1, "", first.port), 9.0)
    first.held = first.held._replace(placement=None, round_over=True, join=(unanswered, 9.0))
    first.told.clear()
    job.open(first)
    (placed,) = [notice for notice in first.told if isinstance(notice, Placed)]
    assert placed.placement.restarts == 0
    assert job.coordinator.state.ledger.failures == 2, "the next round's count goes on from there"


def test_a_join_that_is_said_again_means_no_round_after_the_one_that_it_was_answered_with() -> None:
    """It was on its way when the round began by the join that was said before, and the round is over when it comes."""
    settings = Settings("job", 2, 2)
    coordinator = Coordinator(settings, "0")
    names = [NodeId("a", 1, 0), NodeId("b", 1, 0)]
    member = NodeInfo("default", 1, "", 7001)
    for session, name in enumerate(names):
        coordinator.open(session, SessionRecord(name, name.addr), 0.0)
    coordinator.receive(0, JoinRequest(member, 600.0), 0.0)
    coordinator.open(2, SessionRecord(NodeId("a", 1, 0), "a"), 0.0)
    coordinator.receive(2, ResumeRequest("0", member, joining=True), 0.0)
    told = coordinator.receive(1, JoinRequest(NodeInfo("default", 1, "", 7002), 600.0), 0.0).messages
    assert {session for session, notice in told if isinstance(notice, Placed)} == {1, 2}
    coordinator.receive(1, Fail(0, CAUSE, 9), 0.0)
    coordinator.receive(2, JoinRequest(member, 600.0), 0.0)  # the one said again
    coordinator.receive(1, JoinRequest(NodeInfo("default", 1, "", 7004), 600.0), 0.0)
    told = coordinator.receive(2, JoinRequest(member._replace(store_port=7003), 600.0), 0.0).messages
    stores = {notice.placement.store_port for _, notice in told if isinstance(notice, Placed)}
    assert stores == {7003}


def test_a_node_that_has_met_another_coordinator_since_is_known_by_the_round_that_it_is_in() -> None:
    job = Job(2, 2)
    before = job.coordinator.state
    for node in job.nodes:
        node.told.clear()
        node.held = node.held._replace(met="another", opened="another")
        job.open(node)
    assert job.coordinator.state == before
    assert not any(node.told for node in job.nodes)


def ports(told: list[OutgoingMessage]) -> set[int]:
    return {notice.placement.store_port for _, notice in told if isinstance(notice, Placed)}


def test_a_node_that_loses_its_link_before_it_has_heard_anything_is_one_node() -> None:
    """It claims a name of the coordinator before, though this one has given its join a place meanwhile."""
    coordinator = Coordinator(Settings("job", 2, 2), "new")
    member = NodeInfo("default", 1, "", 7000)
    held = ResumeRequest("old", member, 0, 0, 2, -1, 1, round_over=True, last_ended_round=0, origin="old")
    coordinator.open(1, SessionRecord(NodeId("h0", 1, 0), "h0"), 0.0)
    coordinator.receive(1, held._replace(joining=True), 0.0)
    coordinator.receive(1, JoinRequest(member, 600.0), 0.0)
    coordinator.open(2, SessionRecord(NodeId("h1", 1, 0), "h1"), 0.0)
    other = held._replace(group_rank=1, joining=True)
    coordinator.receive(2, other, 0.0)
    told = coordinator.receive(2, JoinRequest(member, 600.0), 0.0).messages
    assert {session for session, notice in told if isinstance(notice, Placed)} == {1, 2}
    coordinator.open(3, SessionRecord(NodeId("h0", 1, 0), "h0"), 0.0)
    told = coordinator.receive(3, held._replace(joining=True), 0.0).messages
    assert [(session, type(notice)) for session, notice in told][-1] == (3, Placed)
    assert len(coordinator.state.participants) == 2
    assert not coordinator.state.wait_list


def test_a_place_that_waits_with_an_earlier_join_is_given_up_for_the_new_one() -> None:
    """The node has asked another coordinator meanwhile, for which it has closed the worker store of its first join."""
    coordinator = Coordinator(Settings("job", 2, 2), "0")
    first, second = (NodeInfo("default", 1, "", port) for port in (7001, 7002))
    for n in (0, 1):
        coordinator.open(n, SessionRecord(NodeId(f"h{n}", 1, 0), f"h{n}"), 0.0)
    coordinator.receive(0, JoinRequest(first, 600.0), 0.0)
    coordinator.open(2, SessionRecord(NodeId("h0", 1, 0), "h0"), 0.0)
    coordinator.receive(2, ResumeRequest("0", second, joining=True), 0.0)
    told = coordinator.receive(1, JoinRequest(NodeInfo("default", 1, "", 7003), 600.0), 0.0).messages
    told += coordinator.receive(2, JoinRequest(second, 600.0), 0.0).messages
    assert ports(told) == {7002}


def test_the_numbers_of_rounds_that_a_known_node_was_in_elsewhere_are_not_used_again() -> None:
    coordinator = Coordinator(Settings("job", 1, 1), "0")
    member = NodeInfo("default", 1, "", 7001)
    coordinator.open(0, SessionRecord(NodeId("h0", 1, 0), "h0"), 0.0)
    coordinator.receive(0, JoinRequest(member, 600.0), 0.0)
    coordinator.receive(0, Fail(0, CAUSE, 9), 0.0)
    coordinator.open(1, SessionRecord(NodeId("h0", 1, 0), "h0"), 0.0)
    coordinator.receive(1, ResumeRequest("0", member, last_ended_round=4), 0.0)
    coordinator.receive(1, JoinRequest(member, 600.0), 0.0)
    coordinator.receive(1, Fail(1, CAUSE, 9), 0.0)
    assert coordinator.state.round == 5


def test_nor_are_those_that_a_node_which_waits_for_a_place_was_in() -> None:
    coordinator = Coordinator(Settings("job", 1, 2, last_call_timeout=0.0), "0")
    member = NodeInfo("default", 1, "", 7001)
    for session, host in enumerate(("h0", "h1", "h1")):
        coordinator.open(session, SessionRecord(NodeId(host, 1, 0), host), 0.0)
        held = ResumeRequest("0", member, last_ended_round=4, joining=True)
        coordinator.receive(session, held if session == 2 else JoinRequest(member, 600.0), 0.0)
        coordinator.tick(0.0)
    assert (coordinator.state.round, coordinator.state.complete) == (0, True)
    coordinator.receive(0, Fail(0, CAUSE, 9), 0.0)
    assert coordinator.state.round == 5


def fill(coordinator: Coordinator, number: int, held: ResumeRequest) -> list[OutgoingMessage]:
    """The node of that number reports what it holds of another coordinator's job."""
    node = NodeId(f"h{number}", 1, 0)
    coordinator.open(number, SessionRecord(node, node.addr), 0.0)
    member = NodeInfo("default", 1, "", 7000)
    return coordinator.receive(number, held._replace(incarnation="old", node_info=member, origin="old"), 0.0).messages


HELD = ResumeRequest("", NodeInfo("", 1, "", 0), 0, 0, 3, round_over=False)


def ending(coordinator: Coordinator) -> Ending | None:
    verdict = coordinator.state.verdict
    return None if verdict is None else verdict.ending


def test_who_was_quiet_in_an_older_round_is_not_in_a_newer_one() -> None:
    coordinator = Coordinator(Settings("job", 2, 3), "new")
    fill(coordinator, 0, HELD)
    coordinator.receive(0, ReportQuiet(0), 0.0)
    fill(coordinator, 1, HELD._replace(round=2, group_rank=1))
    assert (coordinator.state.round, coordinator.state.quiet) == (2, frozenset())


def test_a_round_runs_on_that_is_larger_than_an_operator_has_made_the_next_one() -> None:
    """Nodes that did not hear of the change report it as they were told."""
    coordinator = Coordinator(Settings("job", 1, 3), "new")
    fill(coordinator, 0, HELD._replace(size=NodeRange(1, 2)))
    for number in (1, 2):
        assert fill(coordinator, number, HELD._replace(group_rank=number)) == []
    assert sorted(node.addr for node in coordinator.state.participants) == ["h0", "h1", "h2"]


def test_a_preempted_job_does_not_end_when_one_that_had_heard_of_the_round_s_end_is_back() -> None:
    coordinator = Coordinator(Settings("job", 2, 2), "new")
    held = HELD._replace(group_world_size=2)
    fill(coordinator, 0, held)
    coordinator.receive(0, PreemptJob(60.0, "received SIGUSR2"), 0.0)
    fill(coordinator, 1, held._replace(group_rank=1, round_over=True, last_ended_round=0))
    assert ending(coordinator) is None, "the workers of the other node are saving"
    coordinator.receive(0, Drain(0, needs_consent=True), 0.0)
    assert ending(coordinator) is Ending.PREEMPTED


def test_a_preempted_job_does_not_end_when_one_is_back_that_has_asked_another_coordinator() -> None:
    coordinator = Coordinator(Settings("job", 2, 2), "0")
    member = NodeInfo("default", 1, "", 7001)
    for n in (0, 1):
        coordinator.open(n, SessionRecord(NodeId(f"h{n}", 1, 0), f"h{n}"), 0.0)
    for number in (0, 1):
        coordinator.receive(number, JoinRequest(member, 600.0), 0.0)
    coordinator.receive(0, PreemptJob(60.0, "received SIGUSR2"), 0.0)
    coordinator.open(2, SessionRecord(NodeId("h1", 1, 0), "h1"), 0.0)
    coordinator.receive(2, ResumeRequest("0", member._replace(store_port=7002), joining=True), 0.0)
    assert ending(coordinator) is None, "the workers of the other node are saving"
    coordinator.receive(0, Drain(0, needs_consent=True), 0.0)
    assert ending(coordinator) is Ending.PREEMPTED


def test_a_node_that_has_opened_another_session_is_not_lost_with_the_old_one() -> None:
    """The end of the old connection arrives before the node's first request in the new one."""
    job = Job(2, 2)
    node = job.nodes[0]
    old, held = node.session, node.held
    node.session = 77
    job.coordinator.open(77, SessionRecord(node.id, node.id.addr, state=SessionState.RESUMING), job.now)
    assert job.coordinator.close(old, job.now).messages == []
    for request in requests_to_repeat(held, job.now):
        job.deliver(job.coordinator.receive(77, request, job.now).messages)
    assert set(job.coordinator.state.participants) == {each.id for each in job.nodes}
    assert job.coordinator.state.complete
    job.coordinator.close(77, job.now)
    assert node.id not in job.coordinator.state.survivors, "with its last session it is lost"


def test_the_number_of_a_round_that_another_coordinator_had_is_not_that_of_the_round_that_forms() -> None:
    coordinator = Coordinator(Settings("job", 1, 1), "new")
    member = NodeInfo("default", 1, "", 7001)
    coordinator.open(0, SessionRecord(NodeId("h0", 1, 0), "h0"), 0.0)
    coordinator.receive(0, JoinRequest(member, 600.0), 0.0)
    coordinator.receive(0, LeaveRequest(wants_reply=False), 0.0)
    assert (coordinator.state.round, coordinator.state.complete) == (1, False)
    fill(coordinator, 1, HELD._replace(round=1, group_world_size=1, last_ended_round=0))
    coordinator.receive(1, JoinRequest(member, 600.0), 0.0)
    assert (coordinator.state.round, coordinator.state.complete) == (2, True)


def test_a_node_is_not_told_of_the_end_of_a_round_that_it_knows_nothing_of() -> None:
    """It asks for a place with a new worker store by itself; told of an end, it would ask again with yet another."""
    coordinator = Coordinator(Settings("job", 2, 2), "0")
    members = [NodeInfo("default", 1, "", port) for port in (7001, 7002)]
    for n in (0, 1):
        coordinator.open(n, SessionRecord(NodeId(f"h{n}", 1, 0), f"h{n}"), 0.0)
    for number in (0, 1):
        coordinator.receive(number, JoinRequest(members[number], 600.0), 0.0)
    coordinator.open(2, SessionRecord(NodeId("h0", 1, 0), "h0"), 0.0)
    told = coordinator.receive(2, ResumeRequest("0", members[0], joining=False), 0.0).messages
    assert [(session, type(notice)) for session, notice in told] == [(1, RoundEnded)]
    told = coordinator.receive(2, JoinRequest(members[0]._replace(store_port=7003), 600.0), 0.0).messages
    told += coordinator.receive(1, JoinRequest(members[1]._replace(store_port=7004), 600.0), 0.0).messages
    assert ports(told) == {7003}


def test_thousands_of_places_that_nobody_fills_are_given_up_in_one_difference() -> None:
    """A node can claim a round of any size that the job's own settings allow."""

    class Counting(Coordinator):
        states = 0

        def _set(self, state: State, now: float) -> None:
            self.states += 1
            super()._set(state, now)

    settings = Settings("job", 1, 5000)
    coordinator = Counting(settings, "new")
    coordinator.open(1, SessionRecord(NodeId("h0", 1, 0), "h0"), 0.0)
    coordinator.receive(1, HELD._replace(round=3, group_world_size=5000, round_over=False), 0.0)
    assert len(absents(coordinator.state)) == 4999
    later = recovery_timeout(settings) + 1
    coordinator.heartbeat(1, later)
    coordinator.tick(later)
    assert (absents(coordinator.state), coordinator.state.round, coordinator.states) == ([], 4, 2)
