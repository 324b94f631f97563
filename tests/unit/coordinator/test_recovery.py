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
    Request,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.control.protocol.resume_state import after_request, requests_to_repeat
from rallypoint.failures.cause import Ending
from tests.unit.coordinator.resuming import CAUSE, Job, Node


def placeholders(state: State) -> list[NodeId]:
    return [node for node in (*state.participants, *state.survivors) if node.is_placeholder]


def replace_coordinator(job: Job) -> None:
    job.forgotten()
    for node in job.nodes:
        node.told.clear()


def endings(nodes: list[Node]) -> list[Notification]:
    return [notice for node in nodes for notice in node.told if isinstance(notice, RoundEnded)]


@given(st.integers(1, 5).flatmap(lambda count: st.permutations(range(count))), st.integers(0, 3))
def test_a_running_round_continues_unnoticed(order: list[int], failures: int) -> None:
    job = Job(len(order), has_journal=False)
    for _ in range(failures):
        job.say(job.nodes[0], Fail(job.state.round, CAUSE, 9))
        for node in job.nodes:
            job.join(node)
    before = job.state
    replace_coordinator(job)
    for number in order:
        job.open(job.nodes[number])
    after = job.state
    assert not any(node.told for node in job.nodes)
    assert not placeholders(after)
    assert (after.round, after.complete, after.ledger.failures) == (before.round, True, failures)
    assert ranks(after) == ranks(before)


def ranks(state: State) -> dict[str, int]:
    return {node.addr: place.rank for node, place in state.participants.items()}


@given(st.permutations(range(4)), st.sets(st.integers(0, 3), min_size=1), st.booleans())
def test_a_known_end_is_announced_to_the_others_and_counted_once(
    order: list[int], unaware: set[int], joined: bool
) -> None:
    job = Job(4, has_journal=False)
    before = {number: job.nodes[number].held for number in unaware}
    job.say(job.nodes[3], Fail(0, CAUSE, 9))
    for number, held in before.items():
        # Node 3 failed, and does not know whether its report has arrived.
        job.nodes[number].held = after_request(held, Fail(0, CAUSE, 9), 0.0) if number == 3 else held
    for number, node in enumerate(job.nodes):
        if joined and number not in unaware:
            job.join(node)
    replace_coordinator(job)
    for number in order:
        job.open(job.nodes[number])
    for node in job.nodes:
        if node.held.placement is not None and node.held.placement.round == 0 and node.held.join is None:
            assert node.held.round_over, "a node with a place in the ended round was not notified"
            job.join(node)
    assert (job.state.round, job.state.complete, job.state.ledger.failures) == (1, True, 1)
    assert sorted(ranks(job.state).values()) == [0, 1, 2, 3]
    assert all(len(endings([node])) <= 1 for node in job.nodes)


@given(st.permutations(range(4)), st.integers(1, 3))
def test_a_finished_node_that_stays_away_is_not_lost(order: list[int], gone: int) -> None:
    job = Job(4, has_journal=False)
    done, at_work = order[:gone], order[gone:]
    for number in done:
        job.say(job.nodes[number], Succeed(0))
    job.heartbeats(2.0)
    before = ranks(job.state)
    replace_coordinator(job)
    present = [job.nodes[number] for number in at_work]
    for node in present:
        job.open(node)
    job.heartbeats(recovery_timeout(job.settings) + 1.0)
    assert (job.state.round, job.state.complete) == (0, True)
    assert not endings(present)
    assert ranks(job.state) == {node.id.addr: before[node.id.addr] for node in present}
    back = job.nodes[done[0]]  # or it does come back, late: it waits for the verdict
    for node in present:
        job.say(node, Succeed(0))
    job.open(back)
    for node in (back, *present):
        (verdict,) = [notice.verdict for notice in node.told if isinstance(notice, JobEnded)]
        assert verdict.outcome is Outcome.SUCCEEDED


@given(st.permutations(range(4)), st.integers(0, 3), st.sets(st.integers(0, 3), max_size=3), st.integers(0, 3))
def test_any_remaining_node_reports_that_the_job_is_preempted(
    order: list[int], speaker: int, saved: set[int], lost: int
) -> None:
    job = Job(4, has_journal=False)
    job.say(job.nodes[speaker], PreemptJob(60.0, "received SIGUSR2"))
    for number in sorted(saved):
        job.say(job.nodes[number], Drain(0, needs_consent=True))
    replace_coordinator(job)
    present = [job.nodes[number] for number in order[lost:]]
    for node in present:
        job.open(node)
        assert job.state.is_preempted
    job.heartbeats(30.0)
    waits = [node for node in present if job.nodes.index(node) not in saved]
    assert (job.state.verdict is None) == bool(waits)
    for node in waits:
        job.say(node, Drain(0, needs_consent=True))
    verdict = job.state.verdict
    assert verdict is not None
    assert (verdict.outcome, verdict.ending) == (Outcome.STOPPED, Ending.PREEMPTED)
    ends = [notice for node in present for notice in node.told if isinstance(notice, JobEnded)]
    assert len(ends) == len(present)
    assert sum(end.is_delegate for end in ends) == 1
    assert not endings(present)


def test_another_session_of_a_node_keeps_its_place() -> None:
    """Its old connection ends before the first request in the new session."""
    job = Job(2, 2, has_journal=False)
    node = job.nodes[0]
    record = SessionRecord(node.id, node.id.addr, state=SessionState.RESUMING)
    session = job.dispatcher.attach(node.hear, record)
    for other in job.nodes:
        other.told.clear()
    job.dispatcher.detach(node.session)
    assert not any(other.told for other in job.nodes)
    for request in requests_to_repeat(node.held, job.time.now):
        job.dispatcher.receive(session, request)
    assert set(job.state.participants) == {other.id for other in job.nodes}
    assert job.state.complete
    job.dispatcher.detach(session)
    assert node.id not in job.state.survivors, "with its last session it is lost"


def test_a_node_that_met_another_coordinator_is_known_by_its_round() -> None:
    job = Job(2, 2, has_journal=False)
    before = job.state
    for node in job.nodes:
        node.told.clear()
        node.held = node.held._replace(met="another", opened="another")
        job.open(node)
    assert job.state == before
    assert not any(node.told for node in job.nodes)


# Single reports


def member(port: int = 7000) -> NodeInfo:
    return NodeInfo("default", 1, "", port)


class Sessions:
    """Sessions of a coordinator at time 0. Session 12 is a later one of node `h2`, whose first session is 2."""

    def __init__(self, least: int, most: int, incarnation: str = "new", *, last_call_timeout: float = 30.0) -> None:
        settings = Settings("job", least, most, last_call_timeout=last_call_timeout)
        self.coordinator = Coordinator(settings, incarnation)

    @property
    def state(self) -> State:
        return self.coordinator.state

    def open(self, *sessions: int) -> None:
        for session in sessions:
            node = NodeId(f"h{session % 10}", 1, 0)
            self.coordinator.open(session, SessionRecord(node, node.addr, settings=self.coordinator.settings), 0.0)

    def says(self, session: int, request: Request) -> list[OutgoingMessage]:
        return self.coordinator.receive(session, request, 0.0).messages

    def join(self, session: int, port: int = 7000) -> list[OutgoingMessage]:
        return self.says(session, JoinRequest(member(port), 600.0))

    def fill(self, session: int, held: ResumeRequest) -> list[OutgoingMessage]:
        """Report what a node holds of another coordinator's job."""
        self.open(session)
        return self.says(session, held._replace(incarnation="old", node_info=member(), origin="old"))

    @property
    def ending(self) -> Ending | None:
        return None if self.state.verdict is None else self.state.verdict.ending


HELD = ResumeRequest("", member(), 0, 0, 3, round_over=False)


def ports(messages: list[OutgoingMessage]) -> set[int]:
    return {notice.placement.store_port for _, notice in messages if isinstance(notice, Placed)}


def kinds(messages: list[OutgoingMessage]) -> list[tuple[int, type]]:
    return [(session, type(notice)) for session, notice in messages]


@given(st.integers(-2, 5), st.integers(-2, 5), st.integers(-2, 9))
def test_an_impossible_report_changes_nothing(round_: int, rank: int, size: int) -> None:
    job = Sessions(1, 3)
    job.fill(0, HELD._replace(round=round_, group_rank=rank, group_world_size=size))
    reported = NodeId("h0", 1, 0) in job.state.participants
    assert reported == (round_ >= 0 and 0 <= rank < size <= 3)


def test_a_node_with_a_place_knows_the_settings_better_than_a_new_node() -> None:
    job = Sessions(1, 2)
    job.coordinator = Coordinator(Settings("job", 1, 2), "new", learns_settings=True)
    job.open(9)
    job.join(9)
    for rank in range(3):
        node = NodeId(f"h{rank}", 1, 0)
        job.coordinator.open(rank, SessionRecord(node, node.addr, settings=Settings("job", 1, 3)), 0.1)
        held = HELD._replace(incarnation="old", origin="old", round=4, group_rank=rank, failures=2)
        assert RoundEnded not in [kind for _, kind in kinds(job.says(rank, held))]
    assert (job.state.round, job.state.complete, job.state.ledger.failures) == (4, True, 2)
    assert (len(job.state.participants), len(job.state.redundancy_list)) == (3, 1)


def test_an_unknown_node_reports_neither_settings_nor_impossible_rounds() -> None:
    job = Sessions(1, 2)
    ours, unknown = job.coordinator.settings, NodeId("unknown", 1, 0)
    theirs = Settings("job", 1, 60000, lease=86400.0)
    job.coordinator.open(1, SessionRecord(unknown, "unknown", settings=theirs), 0.0)
    job.says(1, HELD._replace(incarnation="old", origin="old", round=4, group_rank=1, group_world_size=60000))
    assert job.coordinator.settings == ours
    assert len(job.state.participants) == 0


def test_rounds_of_one_number_and_two_origins_are_not_mixed() -> None:
    job, messages = Sessions(1, 2), []
    for session, origin in enumerate("ba"):
        job.open(session)
        held = HELD._replace(incarnation=origin, origin=origin, group_rank=session, group_world_size=2)
        messages += job.says(session, held)
    assert kinds(messages) == [(1, RoundEnded)]
    assert [node.addr for node in job.state.participants if not node.is_placeholder] == ["h0"]


def test_all_workers_of_a_round_see_one_restart_count() -> None:
    """Another node reports two failures between the completion of the round and the repeated join."""
    job = Sessions(1, 1, "0")
    job.open(0)
    job.join(0)
    job.open(9)
    job.says(9, ResumeRequest("before", member(), 3, 0, 1, failures=2))
    job.open(10)
    messages = job.says(10, ResumeRequest("0", member(), joining=True)) + job.join(10)
    (placed,) = [notice for _, notice in messages if isinstance(notice, Placed)]
    assert placed.placement.restarts == 0
    assert job.state.ledger.failures == 2, "the next round's count continues from there"


def test_a_repeated_join_is_not_meant_for_the_next_round() -> None:
    """It was on its way when the round began by the join sent before, and the round has ended when it arrives."""
    job = Sessions(2, 2, "0")
    job.open(0, 1)
    job.join(0, 7001)
    job.open(10)
    job.says(10, ResumeRequest("0", member(7001), joining=True))
    assert {session for session, kind in kinds(job.join(1, 7002)) if kind is Placed} == {1, 10}
    job.says(1, Fail(0, CAUSE, 9))
    job.join(10, 7001)  # the repeated one
    job.join(1, 7004)
    assert ports(job.join(10, 7003)) == {7003}


def test_a_node_without_news_from_its_coordinator_stays_one_node() -> None:
    """It names the coordinator before, though this one has placed its join."""
    job = Sessions(2, 2)
    held = ResumeRequest("old", member(), 0, 0, 2, -1, 1, round_over=True, last_ended_round=0, origin="old")
    job.open(0, 1)
    job.says(0, held._replace(joining=True))
    job.join(0)
    job.says(1, held._replace(group_rank=1, joining=True))
    assert {session for session, kind in kinds(job.join(1)) if kind is Placed} == {0, 1}
    job.open(10)
    assert kinds(job.says(10, held._replace(joining=True)))[-1] == (10, Placed)
    assert (len(job.state.participants), len(job.state.wait_list)) == (2, 0)


def test_a_new_join_replaces_a_waiting_one() -> None:
    """The node asked another coordinator meanwhile, and closed the worker store of its first join."""
    job = Sessions(2, 2, "0")
    job.open(0, 1)
    job.join(0, 7001)
    job.open(10)
    job.says(10, ResumeRequest("0", member(7002), joining=True))
    assert ports(job.join(1, 7003) + job.join(10, 7002)) == {7002}


def test_round_numbers_from_elsewhere_are_not_used_again() -> None:
    job = Sessions(1, 1, "0")
    job.open(0)
    job.join(0)
    job.says(0, Fail(0, CAUSE, 9))
    job.open(10)
    job.says(10, ResumeRequest("0", member(), last_ended_round=4))
    job.join(10)
    job.says(10, Fail(1, CAUSE, 9))
    assert job.state.round == 5
    job = Sessions(1, 2, "0", last_call_timeout=0.0)  # also where the reporting node waits for a place
    for session in (0, 1):
        job.open(session)
        job.join(session)
        job.coordinator.tick(0.0)
    job.open(11)
    job.says(11, ResumeRequest("0", member(), last_ended_round=4, joining=True))
    assert (job.state.round, job.state.complete) == (0, True)
    job.says(0, Fail(0, CAUSE, 9))
    assert job.state.round == 5


def test_a_forming_round_does_not_take_a_number_used_elsewhere() -> None:
    job = Sessions(1, 1)
    job.open(0)
    job.join(0)
    job.says(0, LeaveRequest(wants_reply=False))
    assert (job.state.round, job.state.complete) == (1, False)
    job.fill(1, HELD._replace(round=1, group_world_size=1, last_ended_round=0))
    job.join(1)
    assert (job.state.round, job.state.complete) == (2, True)


def test_quiet_nodes_are_forgotten_with_their_round() -> None:
    job = Sessions(2, 3)
    job.fill(0, HELD)
    job.says(0, ReportQuiet(0))
    job.fill(1, HELD._replace(round=2, group_rank=1))
    assert (job.state.round, job.state.quiet) == (2, frozenset())


def test_a_round_larger_than_the_new_size_continues() -> None:
    """Nodes that do not know of the new size report the one they know."""
    job = Sessions(1, 3)
    job.fill(0, HELD._replace(size=NodeRange(1, 2)))
    for number in (1, 2):
        assert job.fill(number, HELD._replace(group_rank=number)) == []
    assert sorted(node.addr for node in job.state.participants) == ["h0", "h1", "h2"]


def test_a_preempted_job_waits_for_the_workers_that_save() -> None:
    held = HELD._replace(group_world_size=2)
    job = Sessions(2, 2)
    job.fill(0, held)
    job.says(0, PreemptJob(60.0, "received SIGUSR2"))
    # h1 is back, and knows the round as ended.
    job.fill(1, held._replace(group_rank=1, round_over=True, last_ended_round=0))
    other = Sessions(2, 2, "0")
    other.open(0, 1)
    other.join(0)
    other.join(1)
    other.says(0, PreemptJob(60.0, "received SIGUSR2"))
    # h1 is back, and asked another coordinator for a place.
    other.open(11)
    other.says(11, ResumeRequest("0", member(7002), joining=True))
    for preempted in (job, other):
        assert preempted.ending is None
        preempted.says(0, Drain(0, needs_consent=True))
        assert preempted.ending is Ending.PREEMPTED


def test_a_node_does_not_hear_of_a_round_that_it_does_not_know() -> None:
    """It joins with a new worker store by itself. After the end of a round it would join with yet another one."""
    job = Sessions(2, 2, "0")
    job.open(0, 1)
    job.join(0, 7001)
    job.join(1, 7002)
    job.open(10)
    assert kinds(job.says(10, ResumeRequest("0", member(7001), joining=False))) == [(1, RoundEnded)]
    assert ports(job.join(10, 7003) + job.join(1, 7004)) == {7003}


def test_thousands_of_unfilled_places_are_given_up_at_once() -> None:
    """A node can report a round of any size that the job's settings allow."""

    class Counting(Coordinator):
        states = 0

        def _set(self, state: State, now: float) -> None:
            self.states += 1
            super()._set(state, now)

    job = Sessions(1, 5000)
    coordinator = job.coordinator = Counting(job.coordinator.settings, "new")
    job.open(1)
    job.says(1, HELD._replace(round=3, group_world_size=5000))
    assert len(placeholders(job.state)) == 4999
    later = recovery_timeout(coordinator.settings) + 1
    coordinator.heartbeat(1, later)
    coordinator.tick(later)
    assert (placeholders(job.state), job.state.round, coordinator.states) == ([], 4, 2)
