"""Watchers see the true state, cost the job nothing, and their commands keep the laws of the rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Close, Fail, NodeId, NodeInfo, Outcome, Settings, State, Succeed
from rallypoint.control.protocol.messages import (
    CollectedPart,
    CollectKind,
    CollectRequested,
    DrainRequested,
    JoinRequest,
    LeaveRequest,
    NodeReport,
    Notification,
    Placed,
    ReportRequested,
    Request,
    Taken,
)
from rallypoint.failures.cause import Cause
from rallypoint.observe.watching import WATCHERS
from rallypoint.observe.watching.messages import (
    CollectCommand,
    Command,
    CommandReply,
    DrainCommand,
    JobPhase,
    MemberState,
    ResizeCommand,
    RestartCommand,
    Snapshot,
    SnapshotPart,
    StopCommand,
    WatcherNotification,
    WatcherRequest,
    WatchRequest,
    decode_snapshot,
)
from rallypoint.observe.watching.watchers import WatcherSessions
from tests.unit.rendezvous.jobs import EVENTS, Life
from tests.unit.rendezvous.jobs import SETTINGS as JOBS

Told = tuple[int, Notification | WatcherNotification]
WATCHER = 99
BY = "ann@login"
CAUSE = Cause(3, 1, "b", 42, -9, "Signal 9 (SIGKILL)", "", 1e9, "")


@dataclass
class Job:
    """A coordinator with nodes a, b, ... and one watcher, on a clock that stands still unless it is moved."""

    settings: Settings = field(default_factory=lambda: Settings("job", 2, 3, last_call_timeout=0.0))
    now: float = 100.0
    reads_all: bool = True
    """Whether the watcher reads what it is sent."""

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.settings, "inc")
        self.sent: list[Told] = []
        self.watchers: WatcherSessions = self.coordinator.extensions.find(WATCHERS)
        self.watchers.open(WATCHER)

    def node(self, name: str, size: int = 2) -> int:
        """A node comes and asks for a place."""
        session = ord(name)
        address = f"10.0.0.{session}"
        self.coordinator.open(session, SessionRecord(NodeId(address, 7, 0, name), address), self.now)
        member = NodeInfo("default", size, "", 7000, None, 3)
        self.sent += self.coordinator.receive(session, JoinRequest(member, 600.0), self.now).messages
        return session

    def ask(self, request: WatcherRequest, refusal: str = "") -> list[Told]:
        """The watcher says something; returns all that is told for it."""
        self.watchers.receive(WATCHER, request, self.now, refusal)
        told = self.told(self.coordinator.take_result().messages)
        return told + self.told(self.coordinator.tick(self.now).messages)

    def told(self, messages: list[OutgoingMessage]) -> list[Told]:
        """All messages to nodes and watchers, with those that follow from what watchers read."""
        sent: list[Told] = []
        while messages:
            for session, message in messages:
                self.reads(session, sent, message)
            messages = self.coordinator.take_result().messages
        return sent

    def reads(self, session: int, sent: list[Told], message: Any) -> None:
        """A node or a watcher reads what it is sent; a watcher says so as `WatcherSession` does."""
        sent.append((session, message))
        if isinstance(message, CollectedPart) and message.is_last and self.reads_all:
            self.watchers.receive(session, Taken(message.number), self.now, "")

    def hears(self, name: str, request: Request) -> list[Told]:
        """A node says something; returns all that is told for it."""
        return self.told(self.coordinator.receive(ord(name), request, self.now).messages)

    def command(self, command: Command) -> CommandReply:
        """The reply to a command; the rest is in `sent`."""
        told = self.ask(command)
        self.sent = told
        (reply,) = [each for session, each in told if session == WATCHER and isinstance(each, CommandReply)]
        return reply

    def status(self) -> Snapshot:
        """How the job stands, once nodes had their time to report."""
        told = self.ask(WatchRequest())
        told += self.wait(0.25)
        return snapshot_in(told)

    def wait(self, seconds: float) -> list[Told]:
        """Let time pass, as a server does: with a look whenever one is due. Returns all that is told."""
        until, told = self.now + seconds, []
        while (at := self.coordinator.wake_at()) <= until:
            self.now = max(self.now, at)
            told += self.told(self.coordinator.tick(self.now).messages)
        self.now = until
        return told


def snapshot_in(told: list[Told]) -> Snapshot:
    """The last snapshot among what the watcher was told."""
    data, found = b"", []
    for session, each in told:
        if session == WATCHER and isinstance(each, SnapshotPart):
            data += each.data
            if each.is_last:
                found.append(decode_snapshot(data))
                data = b""
    return found[-1]


def running(*names: str) -> Job:
    job = Job(Settings("job", len(names), len(names), last_call_timeout=0.0))
    for name in names:
        job.node(name)
    assert job.coordinator.state.complete
    return job


def test_a_job_that_waits_says_for_how_many() -> None:
    job = Job()
    job.node("a")
    seen = job.status()
    assert (seen.phase, seen.missing, seen.round) == (JobPhase.WAITING, 1, 0)
    assert [(each.host, each.state, each.connected) for each in seen.nodes] == [("a", MemberState.PARTICIPANT, True)]
    assert seen.max_restarts == 3


def test_ranks_behind_a_node_that_has_finished_and_left_are_not_known() -> None:
    job = running("a", "b")
    job.hears("a", Succeed(0))
    job.hears("a", LeaveRequest())
    assert [(each.host, each.group_rank, each.first_rank) for each in job.status().nodes] == [("b", 1, -1)]


def test_nodes_report_when_somebody_asks_and_never_else() -> None:
    job = running("a", "b")
    assert not any(isinstance(each, ReportRequested) for _, each in job.sent)
    told = job.ask(WatchRequest())
    assert sorted(session for session, each in told if isinstance(each, ReportRequested)) == [ord("a"), ord("b")]
    assert not any(isinstance(each, SnapshotPart) for _, each in told)
    for name in "ab":
        told = job.hears(name, NodeReport(0, (1, 2)))
    seen = snapshot_in(job.told(job.coordinator.tick(job.now).messages))
    assert [each.report and each.report.pids for each in seen.nodes] == [(1, 2), (1, 2)]


def test_a_node_that_does_not_report_delays_the_answer_and_no_more() -> None:
    job = running("a", "b")
    job.ask(WatchRequest())
    job.hears("a", NodeReport(0, (1, 2)))
    assert not job.told(job.coordinator.tick(job.now + 0.2).messages)
    job.now += 0.25
    assert job.coordinator.wake_at() <= job.now
    seen = snapshot_in(job.told(job.coordinator.tick(job.now).messages))
    assert [each.report is None for each in seen.nodes] == [False, True]


def test_a_report_of_an_earlier_round_is_not_shown() -> None:
    job = running("a", "b")
    job.hears("a", NodeReport(4, (1, 2)))
    assert all(each.report is None for each in job.status().nodes)


def test_a_node_that_waits_for_others_reports_how_its_workers_have_ended() -> None:
    job = running("a", "b")
    job.hears("b", LeaveRequest())
    job.hears("b", LeaveRequest(wants_reply=True, ended_with_0=True))
    job.hears("a", JoinRequest(NodeInfo("default", 2, "", 7000, None, 3), 600.0))
    job.ask(WatchRequest())
    job.hears("a", NodeReport(0, (1, 2), ended=((0, 0, 2.0), (1, 0, 1.0))))
    seen = job.status()
    assert seen.phase is JobPhase.WAITING
    (report,) = [node.report for node in seen.nodes if node.report is not None]
    assert [code for _, code, _ in report.ended] == [0, 0]
    assert [(node.name, node.ended_with_0) for node in seen.removed] == [("b (rank 1)", True)]


def test_a_report_grows_older_until_the_next_one() -> None:
    job = running("a", "b")
    job.ask(WatchRequest())
    for name in "ab":
        report = NodeReport(0, (1, 2), progress=7, progress_age=3.0, output_ages=(1.0, -1.0))
        job.hears(name, report._replace(ended=((1, 0, 2.0),)))
    job.wait(0.5)
    shown = job.status().nodes[0].report
    assert shown is not None
    assert (shown.progress_age, *shown.output_ages) == pytest.approx((3.5, 1.5, -1.0))
    assert shown.ended[0][2] == pytest.approx(2.5)


def test_the_command_and_the_logs_of_a_job_that_has_ended_are_those_that_were_reported() -> None:
    job = running("a", "b")
    job.ask(WatchRequest())
    job.hears("a", NodeReport(0, (1, 2), command="rallyrun train.py", log_folder="/logs", age=500.0))
    job.hears("a", Fail(0, CAUSE, 0))
    seen = job.status()
    assert seen.phase is JobPhase.FAILED
    assert (seen.totals.command, seen.totals.log_folder) == ("rallyrun train.py", "/logs")
    assert seen.age < 500.0, "this coordinator has known the job from its beginning"


def test_a_new_coordinator_knows_the_age_of_the_job_from_its_nodes() -> None:
    job = running("a", "b")
    job.coordinator.history.taken_over(State(), job.coordinator.state, job.now)
    job.wait(0.5)
    job.ask(WatchRequest())
    job.hears("a", NodeReport(0, (1, 2), age=3600.0))
    job.hears("b", NodeReport(0, (1, 2), age=7.0))
    assert job.status().age == pytest.approx(3600.0)
    job.wait(1.0)
    assert job.status().age == pytest.approx(3601.0, abs=0.5)


def test_how_long_a_node_is_silent_is_shown() -> None:
    job = running("a", "b")
    job.wait(1.0)
    job.coordinator.heartbeat(ord("b"), job.now)
    silent = [each.silent_for for each in job.status().nodes]
    assert silent == pytest.approx([1.25, 0.25])


def test_a_follower_is_answered_after_a_change_and_after_a_second() -> None:
    job = running("a", "b")
    known = snapshot_in(job.ask(WatchRequest(after=0)) + job.wait(0.25)).changes
    told = job.ask(WatchRequest(after=known)) + job.wait(0.9)
    assert not [each for _, each in told if isinstance(each, SnapshotPart)]
    assert snapshot_in(job.wait(0.1)).changes == known
    job.wait(0.5)
    assert not [each for _, each in job.told([]) if isinstance(each, SnapshotPart)], "it has not asked again"
    job.ask(WatchRequest(after=known))
    told = job.hears("b", Fail(0, CAUSE, 3))
    seen = snapshot_in(told + job.wait(0.2))
    assert (seen.phase, seen.ended_rounds.failures) == (JobPhase.WAITING, 1)
    (failure,) = seen.failures
    assert (failure.rank, failure.host, failure.exitcode, failure.round) == (3, "b", -9, 0)
    assert "round 0 ended" in seen.events[-1].text


def test_a_follower_is_sent_the_end_of_the_job_between_two_requests() -> None:
    job = running("a", "b")
    other = WATCHER + 1
    job.watchers.open(other)
    job.watchers.receive(other, WatchRequest(), job.now, "")
    snapshot_in(job.ask(WatchRequest(after=0)) + job.wait(0.25))
    told = job.hears("a", Close()) + job.wait(0.0)
    assert snapshot_in(told).phase is JobPhase.STOPPED
    assert other not in [session for session, _ in told]
    assert not [each for _, each in job.wait(5.0) if isinstance(each, SnapshotPart)], "it is sent once"


def test_events_are_numbered_and_have_an_age() -> None:
    job = running("a", "b")
    job.wait(2.0)
    events = job.status().events
    assert [each.number for each in events] == list(range(1, len(events) + 1))
    assert events[-1].seconds_ago == pytest.approx(2.25)


def test_a_round_says_who_was_not_in_the_one_before() -> None:
    job = Job(Settings("job", 2, 2, last_call_timeout=0.0))
    for name in "abc":
        job.node(name)
    assert job.status().events[-1].text == "round 0 started with 2 nodes"
    job.hears("b", LeaveRequest())
    for name in "ac":
        job.hears(name, JoinRequest(NodeInfo("default", 2, "", 7000, None, 3), 600.0))
    assert job.status().events[-1].text == "round 1 started with 2 nodes, new: c (rank 1)"


@pytest.mark.parametrize("name", ["b", "10.0.0.98", "7@b", "1"])
def test_a_node_is_drained_by_any_of_its_names(name: str) -> None:
    job = running("a", "b")
    assert job.command(DrainCommand(BY, name)).done
    assert [session for session, each in job.sent if isinstance(each, DrainRequested)] == [ord("b")]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (DrainCommand(BY, "z"), "no node 'z'; it has a (rank 0) and b (rank 1)"),
        (ResizeCommand(BY, 2, 2), "already"),
        (ResizeCommand(BY, 3, 2), "not a range"),
        (ResizeCommand(BY, 1, 10**6), "not a range"),
        (
            ResizeCommand(BY, 3, 9),
            "the job has 2 nodes; with a minimum of 3, its next failure would stop it until 1 more",
        ),
        (CollectCommand(BY, CollectKind.STACKS, (7,)), "no rank 7"),
    ],
)
def test_what_cannot_be_done_says_why_and_changes_nothing(command: Command, words: str) -> None:
    job = running("a", "b")
    before = job.coordinator.state
    reply = job.command(command)
    assert not reply.done
    assert words in reply.detail
    assert job.coordinator.state is before
    assert job.sent == [(WATCHER, reply)]


def test_nothing_can_be_restarted_that_does_not_run() -> None:
    job = Job()
    job.node("a")
    assert "no round is running" in job.command(RestartCommand(BY)).detail


def test_who_may_not_give_commands_changes_nothing_and_still_sees() -> None:
    job = running("a", "b")
    told = job.ask(StopCommand(BY), "not from there")
    assert told == [(WATCHER, CommandReply(False, "not from there"))]
    assert job.status().phase is JobPhase.RUNNING


def test_what_is_collected_comes_from_each_node_and_then_the_end() -> None:
    job = running("a", "b")
    told = job.ask(CollectCommand(BY, CollectKind.STACKS))
    asked = [(session, each) for session, each in told if isinstance(each, CollectRequested)]
    assert [session for session, _ in asked] == [ord("a"), ord("b")]
    number = asked[0][1].number
    told = job.hears("a", CollectedPart(number, b"x", False))
    told += job.hears("a", CollectedPart(number, b"y", True))
    told += job.hears("a", CollectedPart(number, b"again", True))
    assert [each for _, each in told] == [
        CollectedPart(number, b"x", False, "a (rank 0)"),
        CollectedPart(number, b"y", True, "a (rank 0)"),
    ]
    job.now += 30.0
    for name in "ab":
        job.coordinator.heartbeat(ord(name), job.now)
    (end,) = [each for session, each in job.told(job.coordinator.tick(job.now).messages) if session == WATCHER]
    assert end == CommandReply(False, "no answer within 30 s from b (rank 1)")


OPERATOR = st.one_of(
    st.just(WatchRequest()),
    st.just(WatchRequest(after=0)),
    st.just(RestartCommand(BY)),
    st.builds(ResizeCommand, st.just(BY), st.integers(0, 3), st.integers(0, 4), st.booleans()),
    st.builds(DrainCommand, st.just(BY), st.sampled_from(["0", "1", "n2"])),
    st.builds(CollectCommand, st.just(BY), st.just(CollectKind.STACKS), st.lists(st.integers(0, 3)).map(tuple)),
    st.builds(
        CollectCommand,
        st.just(BY),
        st.just(CollectKind.LOGS),
        st.lists(st.integers(0, 3)).map(tuple),
        st.just(20),
        st.integers(0, 1),
    ),
)


@settings(max_examples=300)
@given(JOBS, EVENTS, st.lists(st.tuples(st.integers(0, 60), OPERATOR), max_size=8))
def test_the_laws_of_rounds_hold_whatever_operators_ask(
    job: Settings, events: list[tuple[str, int, int]], asked: list[tuple[int, WatcherRequest]]
) -> None:
    life = Life(job)
    coordinator = life.coordinator
    watchers: WatcherSessions = coordinator.extensions.find(WATCHERS)
    watchers.open(WATCHER)
    sizes = {(job.min_nodes, job.max_nodes)}
    for at, event in enumerate([*events, ("wait", 0, 30)]):
        life.happen(*event)
        for when, request in asked:
            if when == at:
                watchers.receive(WATCHER, request, life.now, "")
                life._hear(coordinator.take_result().messages)
                life.states.append(coordinator.state)
                sizes.add((coordinator.settings.min_nodes, coordinator.settings.max_nodes))
    for roll in life.rolls.values():
        places = sorted(roll.values(), key=lambda each: each.group_rank)
        size = places[0].group_world_size
        assert [each.group_rank for each in places] == list(range(size))
        assert any(least <= size <= most for least, most in sizes)
    for before, after in pairwise(life.states):
        assert after.round >= before.round
        assert after.ledger.failures - before.ledger.failures in (0, 1)
    ledger, state = coordinator.state.ledger, coordinator.state
    failed = state.verdict is not None and state.verdict.outcome is Outcome.FAILED
    assert sum(ledger) - failed == state.round
    seen = watchers.snapshot(life.now)()
    assert len([each for each in seen.nodes if each.state is MemberState.PARTICIPANT]) == len(state.participants)
    assert (seen.phase is JobPhase.RUNNING) == (state.complete and state.verdict is None)


def test_messages_of_nodes_are_the_same_with_a_watcher() -> None:
    def told_to_nodes(watched: bool) -> list[Told]:
        job = Job(Settings("job", 2, 2, last_call_timeout=0.0))
        if watched:
            job.ask(WatchRequest(after=0))
        for name in "ab":
            job.node(name)
        told = [*job.sent]
        told += job.hears("a", Fail(0, CAUSE, 3))
        told += job.hears("b", LeaveRequest())
        told += job.hears("a", Succeed(0))
        return [
            (session, each)
            for session, each in told
            if session != WATCHER and not isinstance(each, ReportRequested | Placed)
        ]

    assert told_to_nodes(watched=True) == told_to_nodes(watched=False)


def test_a_new_coordinator_is_not_resized_before_the_nodes_have_come() -> None:
    job = Job()
    assert "try again later" in job.command(ResizeCommand(BY, 1, 1)).detail
    assert job.coordinator.state.size is None
