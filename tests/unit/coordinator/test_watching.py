"""Watchers see the true state and cost the job nothing. Their commands keep the laws of the rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import (
    Close,
    Fail,
    NodeId,
    NodeInfo,
    NodeRange,
    Outcome,
    Settings,
    State,
    Succeed,
)
from rallypoint.control.protocol.messages import (
    CollectedPart,
    CollectKind,
    CollectRequested,
    DrainRequested,
    Fault,
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
    EventKind,
    FaultCommand,
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
from tests.unit.coordinator.test_coordinator_laws import check_change, check_round
from tests.unit.rendezvous.jobs import EVENTS, Life
from tests.unit.rendezvous.jobs import SETTINGS as JOBS

Told = tuple[int, Notification | WatcherNotification]
WATCHER = 99
BY = "ann@login"
CAUSE = Cause(3, 1, "b", 42, -9, "Signal 9 (SIGKILL)", "", 1e9, "")
JOINED = JoinRequest(NodeInfo("default", 2, "", 7000, None, 3), 600.0)


@dataclass
class Job:
    """A coordinator with nodes a, b, ... and one watcher, on a clock that a test moves."""

    settings: Settings = field(default_factory=lambda: Settings("job", 2, 3, last_call_timeout=0.0))
    now: float = 100.0
    reads_all: bool = True
    """Whether the watcher reads what it is sent."""

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.settings, "inc")
        self.sent: list[Told] = []
        self.watchers: WatcherSessions = self.coordinator.extensions.find(WATCHERS)
        self.watchers.open(WATCHER)

    def node(self, name: str) -> int:
        """Add a node and let it join."""
        session = ord(name)
        address = f"10.0.0.{session}"
        self.coordinator.open(session, SessionRecord(NodeId(address, 7, 0, name), address), self.now)
        self.sent += self.coordinator.receive(session, JOINED, self.now).messages
        return session

    def ask(self, request: WatcherRequest, refusal: str = "") -> list[Told]:
        """Send a watcher's request. Returns all messages that follow."""
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
        """Deliver a message. A watcher acknowledges it, as `WatcherSession` does."""
        sent.append((session, message))
        if isinstance(message, CollectedPart) and message.is_last and self.reads_all:
            self.watchers.receive(session, Taken(message.number), self.now, "")

    def hears(self, name: str, request: Request) -> list[Told]:
        """Send a node's request. Returns all messages that follow."""
        return self.told(self.coordinator.receive(ord(name), request, self.now).messages)

    def command(self, command: Command) -> CommandReply:
        """Send a command. Returns the reply; the other messages are in `sent`."""
        told = self.ask(command)
        self.sent = told
        (reply,) = [message for session, message in told if session == WATCHER and isinstance(message, CommandReply)]
        return reply

    def status(self) -> Snapshot:
        """The status of the job, once nodes had time to report."""
        told = self.ask(WatchRequest())
        told += self.wait(0.25)
        return snapshot_in(told)

    def wait(self, seconds: float) -> list[Told]:
        """Let time pass, with a tick whenever one is due, as a server does. Returns all messages."""
        until, told = self.now + seconds, []
        while (at := self.coordinator.wake_at()) <= until:
            self.now = max(self.now, at)
            told += self.told(self.coordinator.tick(self.now).messages)
        self.now = until
        return told


def snapshot_in(told: list[Told]) -> Snapshot:
    """The last snapshot among the messages to the watcher."""
    data, found = b"", []
    for session, each in told:
        if session == WATCHER and isinstance(each, SnapshotPart):
            data += each.data
            if each.is_last:
                found.append(decode_snapshot(data))
                data = b""
    return found[-1]


def running(*names: str, most: int = 0, **settings: Any) -> Job:
    job = Job(Settings("job", len(names), most or len(names), last_call_timeout=0.0, **settings))
    for name in names:
        job.node(name)
    assert job.coordinator.state.complete
    return job


def of(kind: type, told: list[Told]) -> list[Told]:
    return [(session, message) for session, message in told if isinstance(message, kind)]


def test_a_waiting_job_shows_its_missing_nodes_and_has_nothing_to_restart() -> None:
    job = Job(now=90_000.0)
    assert job.status().phase_for == 0.0
    job.node("a")
    job.wait(2.0)
    seen = job.status()
    assert (seen.phase, seen.phase_for, seen.missing, seen.round) == (JobPhase.WAITING, 2.0, 1, 0)
    assert [(node.host, node.state, node.connected) for node in seen.nodes] == [("a", MemberState.PARTICIPANT, True)]
    assert seen.max_restarts == 3
    assert "no round is running" in job.command(RestartCommand(BY)).detail


def test_first_ranks_are_unknown_after_a_node_finished_and_left() -> None:
    job = running("a", "b")
    job.hears("a", Succeed(0))
    job.hears("a", LeaveRequest())
    assert [(each.host, each.group_rank, each.first_rank) for each in job.status().nodes] == [("b", 1, -1)]


def test_nodes_report_on_request_and_a_silent_one_delays_the_answer() -> None:
    job = running("a", "b")
    assert not of(ReportRequested, job.sent)
    told = job.ask(WatchRequest())
    assert sorted(session for session, _ in of(ReportRequested, told)) == [ord("a"), ord("b")]
    assert not of(SnapshotPart, told)
    for name in "ab":
        told = job.hears(name, NodeReport(0, (1, 2)))
    seen = snapshot_in(job.told(job.coordinator.tick(job.now).messages))
    assert [node.report and node.report.pids for node in seen.nodes] == [(1, 2), (1, 2)]
    job = running("a", "b")
    job.ask(WatchRequest())
    job.hears("a", NodeReport(0, (1, 2)))
    assert not job.told(job.coordinator.tick(job.now + 0.2).messages)
    job.now += 0.25
    assert job.coordinator.wake_at() <= job.now
    seen = snapshot_in(job.told(job.coordinator.tick(job.now).messages))
    assert [node.report is None for node in seen.nodes] == [False, True]
    job.hears("b", NodeReport(4, (1, 2)))
    assert [node.report is None for node in job.status().nodes] == [False, True], "a report of another round"


def test_a_waiting_node_reports_how_its_workers_ended() -> None:
    job = running("a", "b")
    job.hears("b", LeaveRequest())
    job.hears("b", LeaveRequest(wants_reply=True, ended_with_0=True))
    job.hears("a", JOINED)
    job.ask(WatchRequest())
    job.hears("a", NodeReport(0, (1, 2), ended=((0, 0, 2.0), (1, 0, 1.0))))
    seen = job.status()
    assert seen.phase is JobPhase.WAITING
    (report,) = [node.report for node in seen.nodes if node.report is not None]
    assert [code for _, code, _ in report.ended] == [0, 0]
    assert [(node.name, node.ended_with_0) for node in seen.removed] == [("b (rank 1)", True)]


def test_reports_age() -> None:
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


def test_an_ended_job_shows_its_command_and_logs() -> None:
    job = running("a", "b")
    job.ask(WatchRequest())
    job.hears("a", NodeReport(0, (1, 2), command="rallyrun train.py", log_folder="/logs", age=500.0))
    job.hears("a", Fail(0, CAUSE, 0))
    seen = job.status()
    assert seen.phase is JobPhase.FAILED
    assert (seen.totals.command, seen.totals.log_folder) == ("rallyrun train.py", "/logs")
    assert seen.age < 500.0, "this coordinator has known the job from its beginning"


def test_nodes_report_the_age_of_the_job() -> None:
    job = running("a", "b")
    job.coordinator.history.taken_over(State(), job.coordinator.state, job.now)
    job.wait(0.5)
    job.ask(WatchRequest())
    job.hears("a", NodeReport(0, (1, 2), age=3600.0))
    job.hears("b", NodeReport(0, (1, 2), age=7.0))
    assert job.status().age == pytest.approx(3600.0)
    job.wait(1.0)
    assert job.status().age == pytest.approx(3601.0, abs=0.5)


def test_silence_and_the_age_of_events_are_shown() -> None:
    job = running("a", "b")
    job.wait(1.0)
    job.coordinator.heartbeat(ord("b"), job.now)
    seen = job.status()
    assert [node.silent_for for node in seen.nodes] == pytest.approx([1.25, 0.25])
    assert [event.number for event in seen.events] == list(range(1, len(seen.events) + 1))
    assert seen.events[-1].seconds_ago == pytest.approx(1.25)


def test_a_follower_is_answered_after_a_change_or_a_second() -> None:
    job = running("a", "b")
    known = snapshot_in(job.ask(WatchRequest(after=0)) + job.wait(0.25)).changes
    told = job.ask(WatchRequest(after=known)) + job.wait(0.9)
    assert not of(SnapshotPart, told)
    assert snapshot_in(job.wait(0.1)).changes == known
    assert not of(SnapshotPart, job.wait(0.5)), "it has not asked again"
    job.ask(WatchRequest(after=known))
    told = job.hears("b", Fail(0, CAUSE, 3))
    seen = snapshot_in(told + job.wait(0.2))
    assert (seen.phase, seen.ended_rounds.failures) == (JobPhase.WAITING, 1)
    (failure,) = seen.failures
    assert (failure.rank, failure.host, failure.exitcode, failure.round) == (3, "b", -9, 0)
    assert "round 0 ended" in seen.events[-1].text


def test_a_follower_gets_the_end_of_the_job_without_asking() -> None:
    job = running("a", "b")
    other = WATCHER + 1
    job.watchers.open(other)
    job.watchers.receive(other, WatchRequest(), job.now, "")
    snapshot_in(job.ask(WatchRequest(after=0)) + job.wait(0.25))
    told = job.hears("a", Close()) + job.wait(0.0)
    assert snapshot_in(told).phase is JobPhase.STOPPED
    assert other not in [session for session, _ in told]
    assert not of(SnapshotPart, job.wait(5.0)), "it is sent once"


def test_events_name_waiting_and_new_nodes() -> None:
    job = Job(Settings("job", 2, 2, last_call_timeout=0.0))
    for name in "abc":
        job.node(name)
    assert job.status().events[-1].text == "round 0 started with 2 nodes"
    job.hears("b", LeaveRequest())
    for name in "ac":
        job.hears(name, JOINED)
    assert job.status().events[-1].text == "round 1 started with 2 nodes, new: c (rank 1)"
    job = Job(Settings("job", 2, 100, last_call_timeout=0.0, lease=60.0))
    for name in "abcdefghi":
        job.node(name)
        job.told(job.coordinator.tick(job.now).messages)
    job.wait(1.0)
    assert [event.text for event in job.status().events if event.kind is EventKind.NODE_WAITING] == [
        "c is waiting for the next round",
        "d, e, f, g and 2 more are waiting for the next round",
    ]


@pytest.mark.parametrize("name", ["b", "10.0.0.98", "7@b", "1"])
def test_a_node_is_drained_by_any_of_its_names(name: str) -> None:
    job = running("a", "b")
    job.node("s")
    assert job.command(DrainCommand(BY, name)).done
    assert [session for session, _ in of(DrainRequested, job.sent)] == [ord("b")]
    assert {node.host: node.drained_by for node in job.status().nodes} == {"a": "", "b": BY, "s": ""}
    job.hears("b", LeaveRequest(why=f"drained by {BY}"))
    assert job.status().events[-1].text == f"round 0 ended: b (rank 1): a node left (drained by {BY})"
    assert job.command(DrainCommand(BY, "s")).done, "also a spare"


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
        (FaultCommand(BY, Fault.KILL_WORKER), ""),
        (FaultCommand(BY, Fault.HANG, rank=4), ""),
        (FaultCommand(BY, Fault.CUT), ""),
        (FaultCommand(BY, Fault.KILL_AGENT, node="c"), ""),
    ],
)
def test_impossible_commands_change_nothing(command: Command, words: str) -> None:
    job = running("a", "b")
    before = job.coordinator.state
    reply = job.command(command)
    assert not reply.done
    assert words in reply.detail
    assert job.coordinator.state is before
    assert job.sent == [(WATCHER, reply)]


@pytest.mark.parametrize("command", [StopCommand(BY), FaultCommand(BY, Fault.KILL_WORKER, rank=0)])
def test_a_watcher_without_permission_can_only_watch(command: Command) -> None:
    job = running("a", "b")
    assert job.ask(command, "not from there") == [(WATCHER, CommandReply(False, "not from there"))]
    assert job.status().phase is JobPhase.RUNNING


def test_a_collection_passes_on_parts_and_ends_without_silent_or_lost_nodes() -> None:
    job = running("a", "b")
    asked = of(CollectRequested, job.ask(CollectCommand(BY, CollectKind.STACKS)))
    assert [session for session, _ in asked] == [ord("a"), ord("b")]
    told = job.hears("a", CollectedPart(1, b"x", False))
    told += job.hears("a", CollectedPart(1, b"y", True))
    told += job.hears("a", CollectedPart(1, b"again", True))
    assert [message for _, message in told] == [
        CollectedPart(1, b"x", False, "a (rank 0)"),
        CollectedPart(1, b"y", True, "a (rank 0)"),
    ]
    job.now += 30.0
    for name in "ab":
        job.coordinator.heartbeat(ord(name), job.now)
    (end,) = [message for session, message in job.told(job.coordinator.tick(job.now).messages) if session == WATCHER]
    assert end == CommandReply(False, "no answer within 30 s from b (rank 1)")
    job.ask(CollectCommand(BY, CollectKind.STACKS))
    job.hears("a", CollectedPart(2, b"x", True))
    told = job.told(job.coordinator.close(ord("b"), job.now).messages)
    assert of(CommandReply, told) == [(WATCHER, CommandReply(False, "lost in the meantime: b (rank 1)"))]


RANKS = st.lists(st.integers(0, 3)).map(tuple)
OPERATOR = st.one_of(
    st.sampled_from([WatchRequest(), WatchRequest(after=0), RestartCommand(BY)]),
    st.builds(ResizeCommand, st.just(BY), st.integers(0, 3), st.integers(0, 4), st.booleans()),
    st.builds(DrainCommand, st.just(BY), st.sampled_from(["0", "1", "n2"])),
    st.builds(CollectCommand, st.just(BY), st.just(CollectKind.STACKS), RANKS),
    st.builds(CollectCommand, st.just(BY), st.just(CollectKind.LOGS), RANKS, st.just(20), st.integers(0, 1)),
)


@settings(max_examples=300)
@given(JOBS, EVENTS, st.lists(st.tuples(st.integers(0, 60), OPERATOR), max_size=8))
def test_operators_cannot_break_the_laws(
    job: Settings, events: list[tuple[str, int, int]], asked: list[tuple[int, WatcherRequest]]
) -> None:
    life = Life(job)
    coordinator = life.coordinator
    watchers: WatcherSessions = coordinator.extensions.find(WATCHERS)
    watchers.open(WATCHER)
    sizes = {NodeRange(job.min_nodes, job.max_nodes)}
    for at, event in enumerate([*events, ("wait", 0, 30)]):
        life.happen(*event)
        for when, request in asked:
            if when == at:
                watchers.receive(WATCHER, request, life.now, "")
                life._hear(coordinator.take_result().messages)
                life.states.append(coordinator.state)
                sizes.add(NodeRange(coordinator.settings.min_nodes, coordinator.settings.max_nodes))
    for places in life.rolls.values():
        check_round(list(places.values()), sizes)
    for before, after in pairwise(life.states):
        check_change(before, after)
    state = coordinator.state
    failed = state.verdict is not None and state.verdict.outcome is Outcome.FAILED
    assert sum(state.ledger) - failed == state.round
    seen = watchers.snapshot(life.now)()
    assert sum(node.state is MemberState.PARTICIPANT for node in seen.nodes) == len(state.participants)
    assert (seen.phase is JobPhase.RUNNING) == (state.complete and state.verdict is None)


def test_a_watcher_does_not_change_the_messages_to_nodes() -> None:
    def told_to_nodes(watched: bool) -> list[Told]:
        job = Job(Settings("job", 2, 2, last_call_timeout=0.0))
        if watched:
            job.ask(WatchRequest(after=0))
        for name in "ab":
            job.node(name)
        told = [*job.sent]
        for name, request in (("a", Fail(0, CAUSE, 3)), ("b", LeaveRequest()), ("a", Succeed(0))):
            told += job.hears(name, request)
        unlike = ReportRequested | Placed
        return [(to, message) for to, message in told if to != WATCHER and not isinstance(message, unlike)]

    assert told_to_nodes(watched=True) == told_to_nodes(watched=False)


def test_a_coordinator_without_nodes_is_not_resized() -> None:
    job = Job()
    assert "try again later" in job.command(ResizeCommand(BY, 1, 1)).detail
    assert job.coordinator.state.size is None
