"""Commands between rounds, to a resized or new coordinator, and by several operators at once."""

from __future__ import annotations

import pytest

from rallypoint.agent.policy import Phase as AgentPhase
from rallypoint.agent.policy import PolicyState, decide
from rallypoint.agent.steps import DrainArrived
from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.sessions import SessionRecord, SessionState
from rallypoint.control.membership.rules import with_size
from rallypoint.control.membership.state import (
    Drain,
    Fail,
    NodeId,
    NodeInfo,
    NodeRange,
    Participant,
    Preempt,
    PreemptJob,
    Reason,
    Settings,
    State,
    Succeed,
)
from rallypoint.control.protocol.messages import (
    CollectedPart,
    CollectKind,
    CollectRequested,
    Fault,
    FaultRequested,
    LeaveRequest,
    NodeReport,
    OperatorAction,
    Placed,
    ReportRequested,
    ResumeRequest,
    Taken,
)
from rallypoint.control.protocol.resume_state import ResumeState, after_notification, requests_to_repeat
from rallypoint.observe.status import status_lines
from rallypoint.observe.watching import WATCHERS
from rallypoint.observe.watching.commands import CommandRefused, nodes_with_ranks
from rallypoint.observe.watching.messages import (
    CollectCommand,
    CommandReply,
    DrainCommand,
    EventKind,
    FaultCommand,
    JobPhase,
    ResizeCommand,
    RestartCommand,
    StopCommand,
    WatchRequest,
)
from rallypoint.observe.watching.session import MAX_WATCHERS, JobWatch
from rallypoint.observe.watching.watchers import WatcherSessions
from tests.unit.coordinator.test_watching import BY, CAUSE, JOINED, WATCHER, Job, Told, of, running, snapshot_in


def hosting() -> Job:
    """A job whose only node hosts the coordinator."""
    job = Job(Settings("job", 1, 1, last_call_timeout=0.0))
    record = SessionRecord(NodeId("10.0.0.1", 7, 0, "host"), "10.0.0.1", in_this_process=True, local=True, leased=False)
    job.coordinator.open(1, record, job.now)
    job.coordinator.receive(1, JOINED, job.now)
    return job


def test_former_participants_keep_their_places_in_a_smaller_job() -> None:
    first, new = NodeId("a", 1, 0, "a"), NodeId("b", 1, 0, "b")
    info = NodeInfo("default", 1, "", 7000)
    state = State(participants={new: Participant(info), first: Participant(info, previous_rank=0)})
    after = with_size(state, NodeRange(1, 1), Settings("job", 1, 2))
    assert (list(after.participants), list(after.redundancy_list)) == ([first], [new])
    assert (after.last_call, after.last_calls) == (1, 1), "there are enough nodes now"
    assert with_size(after, NodeRange(2, 2), Settings("job", 1, 1)).last_call == 0, "and now there are not"


def test_a_round_in_backoff_follows_the_new_size() -> None:
    job = running("a", "b", "c", restart_backoff=10.0)
    job.hears("b", Fail(0, CAUSE, 3))
    assert job.command(ResizeCommand(BY, 1, 2)).done
    for name in "abc":
        job.hears(name, JOINED)
    state = job.coordinator.state
    assert [node.host for node in state.participants] == ["a", "b"]
    assert [node.host for node in state.redundancy_list] == ["c"]
    assert job.status().phase is JobPhase.HELD_BACK
    assert "no round is running" in job.command(RestartCommand(BY)).detail
    job.wait(10.0)
    assert (job.coordinator.state.complete, job.coordinator.state.round) == (True, 1)


@pytest.mark.parametrize("size", [NodeRange(1, 4), NodeRange(1, 2)], ids=["larger", "smaller than its round"])
def test_a_new_control_plane_learns_the_size_from_nodes(size: NodeRange) -> None:
    job = running("a", "b", "c")
    assert job.command(ResizeCommand(BY, *size)).done
    (action,) = {each for _, each in job.sent if isinstance(each, OperatorAction)}
    placed = next(each for session, each in running("a", "b", "c").sent if isinstance(each, Placed))
    held = after_notification(after_notification(ResumeState(last_join=JOINED), placed, 0.0), action, 0.0)
    held = held._replace(met="inc", opened="inc")
    (resumed,) = requests_to_repeat(held, 0.0)
    assert isinstance(resumed, ResumeRequest)
    settings = Settings("job", 3, 3, last_call_timeout=0.0)
    fresh = Coordinator(settings, "another", learns_settings=True)
    record = SessionRecord(NodeId("10.0.0.97", 7, 0, "a"), "10.0.0.97", settings=settings)
    fresh.open(1, record, 0.0)
    fresh.receive(1, resumed, 0.0)
    assert (fresh.settings.min_nodes, fresh.settings.max_nodes) == size
    assert (fresh.state.complete, len(fresh.state.participants)) == (True, 3), "its round runs on"


def test_placements_have_the_new_size() -> None:
    job = running("a", "b")
    job.command(ResizeCommand(BY, 1, 2))
    job.command(RestartCommand(BY))
    told = job.hears("a", JOINED) + job.hears("b", JOINED)
    assert {message.placement.size for _, message in told if isinstance(message, Placed)} == {NodeRange(1, 2)}


def test_the_host_of_the_control_plane_is_neither_drained_nor_taken_away() -> None:
    job = hosting()
    before = job.coordinator.state
    reply = job.command(DrainCommand(BY, "host"))
    assert not reply.done
    assert "hosts this job's control plane" in reply.detail
    assert job.sent == [(WATCHER, reply)]
    assert job.coordinator.state is before
    drilled = [fault for fault in Fault if hosting().command(FaultCommand(BY, fault, 0, "host", 1.0)).done]
    assert set(Fault) - set(drilled) == {Fault.KILL_AGENT, Fault.KILL_NODE, Fault.CUT}


@pytest.mark.parametrize("phase", [AgentPhase.ENDING, AgentPhase.LEAVING, AgentPhase.ENDED])
def test_an_agent_that_is_ending_ignores_a_drain(phase: AgentPhase) -> None:
    status = PolicyState(phase=phase, round=0)
    assert decide(status, DrainArrived(BY, 30.0)) == (status, ())


@pytest.mark.parametrize("command", [RestartCommand(BY), DrainCommand(BY, "b"), ResizeCommand(BY, 1, 2)])
def test_a_preempted_job_can_only_be_stopped(command: RestartCommand | DrainCommand | ResizeCommand) -> None:
    job = running("a", "b")
    job.hears("b", PreemptJob(60.0, "received SIGUSR2"))
    before = job.coordinator.state
    reply = job.command(command)
    assert not reply.done
    assert "preempted" in reply.detail
    assert job.coordinator.state is before
    assert job.command(StopCommand(BY)).done


def test_watchers_see_a_preemption_and_lost_nodes() -> None:
    job = running("a", "b")
    job.hears("b", PreemptJob(60.0, "received SIGUSR2"))
    job.coordinator.close(ord("b"), job.now)
    seen = job.status()
    assert seen.phase is JobPhase.RUNNING
    assert [(event.kind, event.text) for event in seen.events][-2:] == [
        ("job preempted", "b (rank 1) received SIGUSR2: the job is being preempted"),
        ("node lost", "b (rank 1): a node was lost"),
    ]
    job.hears("a", Drain(0, needs_consent=True))
    assert job.status().events[-1].text == "the job has stopped: b (rank 1) received SIGUSR2"


def test_every_lost_node_is_an_event() -> None:
    job = Job(Settings("job", 9, 9))
    for name in "abcdefgh":
        job.node(name)
    lost = "abcdef"
    job.coordinator._end([ord(name) for name in lost], job.now, Reason.LOST, "silent")
    job.coordinator.receive(ord("g"), LeaveRequest(), job.now)
    texts = [event.text for event in job.status().events if event.kind is EventKind.NODE_LOST]
    assert texts == [*(f"{name}: a node was lost" for name in lost), "g: a node left"]
    job = running("a", "b", "c")  # where the first one ends the round
    job.coordinator._end([ord("b"), ord("c")], job.now, Reason.LOST, "silent")
    texts = [event.text for event in job.status().events]
    assert sum("b (rank 1)" in text for text in texts) == 1
    assert texts.count("c (rank 2): a node was lost") == 1


def test_a_new_round_asks_for_reports_at_once() -> None:
    job = running("a", "b")
    job.ask(WatchRequest())
    for name in "ab":
        job.hears(name, NodeReport(0, (1, 2)))
    job.command(RestartCommand(BY))
    for name in "ab":
        job.hears(name, JOINED)
    assert len(of(ReportRequested, job.ask(WatchRequest()))) == 2
    for name in "ab":
        told = job.hears(name, NodeReport(1, (3, 4)))
    seen = snapshot_in(told + job.told(job.coordinator.tick(job.now).messages))
    assert [node.report and node.report.pids for node in seen.nodes] == [(3, 4)] * 2


def test_a_follower_of_a_large_job_sees_a_new_round_soon() -> None:
    job = running(*(chr(number) for number in range(0x100, 0x100 + 400)))
    job.ask(WatchRequest(after=0))
    job.command(RestartCommand(BY))
    for session in list(job.coordinator.sessions):
        job.hears(chr(session.number), JOINED)
    assert len(of(ReportRequested, job.ask(WatchRequest(after=1)))) == 400
    job.wait(1.0)
    assert not of(ReportRequested, job.ask(WatchRequest(after=1))), "and then now and again"


def test_unrequested_reports_are_ignored() -> None:
    coordinator = Coordinator(Settings("job", 1, 1, last_call_timeout=0.0), "inc")
    coordinator.open(1, SessionRecord(NodeId("10.0.0.1", 7, 0, "a"), "10.0.0.1"), 0.0)
    coordinator.receive(1, JOINED, 0.0)
    for request in (NodeReport(0, (666,)), CollectedPart(1, b"x", True)):
        assert coordinator.receive(1, request, 0.0).messages == []
    assert coordinator.extensions.loaded == [], "nothing is kept for watchers before one has come"
    watchers: WatcherSessions = coordinator.extensions.find(WATCHERS)
    watchers.open(WATCHER)
    coordinator.receive(1, NodeReport(0, (666,)), 0.0)
    assert all(each.report is None for each in watchers.snapshot(0.0)().nodes)
    assert coordinator.take_result().messages == []


def test_a_size_beyond_the_present_nodes_must_be_forced() -> None:
    job = running("a", "b", "c")
    refused = job.command(ResizeCommand(BY, 9, 9))
    assert not refused.done
    assert refused.detail.startswith("the job has 3 nodes; with a minimum of 9, its next failure would stop it")
    assert "until 6 more have joined" in refused.detail
    forced = job.command(ResizeCommand(BY, 9, 9, force=True))
    assert forced.done
    assert forced.detail.endswith("to 9:9 nodes, from the next round on, which needs 6 more nodes")
    seen = job.status()
    assert (seen.phase, seen.min_nodes) == (JobPhase.RUNNING, 9)
    assert "nodes     3 (next round: min 9, max 9)" in status_lines(seen)


def test_the_end_of_a_round_names_the_drain() -> None:
    job = running("a", "b")
    job.hears("b", Preempt(0, 30.0, f"is being drained by {BY}"))
    for name in "ab":
        job.hears(name, Drain(0, needs_consent=True))
    assert f"b (rank 1) is being drained by {BY}" in job.status().events[-1].text


FOLLOW = CollectCommand(BY, CollectKind.LOGS, (), 20, 77)


def asked_for_logs(told: list[Told]) -> list[str]:
    return [chr(session) for session, _ in of(CollectRequested, told)]


def test_logs_are_followed_until_the_job_ends() -> None:
    job = Job(Settings("job", 2, 3, last_call_timeout=0.0))
    for name in "ab":
        job.node(name)
    told = job.ask(FOLLOW)
    assert asked_for_logs(told) == ["a", "b"]
    asked = next(message for _, message in told if isinstance(message, CollectRequested))
    assert (asked.lines, asked.cursor, asked.most > 0) == (20, 77, True)
    told = job.hears("b", CollectedPart(asked.number, b"x", True))
    assert asked_for_logs(told) == ["b"], "once it was read"
    job.command(RestartCommand(BY))
    job.hears("a", JOINED)
    job.node("c")
    assert "c" in asked_for_logs(job.hears("b", JOINED)), "a new node"
    told = job.ask(StopCommand(BY))
    assert (WATCHER, CommandReply(True, "")) not in told
    told = []
    for name in "abc":
        told += job.hears(name, CollectedPart(asked.number, b"last words", True))
    replies = [message for session, message in told if session == WATCHER]
    assert replies[-1] == CommandReply(True, "")
    assert sum(isinstance(message, CollectedPart) for message in replies) == 3
    assert asked_for_logs(told) == []


def test_logs_of_some_ranks_come_from_their_nodes_also_between_rounds() -> None:
    job = running("a", "b", "c")
    assert asked_for_logs(job.ask(CollectCommand(BY, CollectKind.LOGS, (5, 4, 0)))) == ["c", "a"]
    job = running("a", "b")
    job.hears("b", Fail(0, CAUSE, 3))
    assert asked_for_logs(job.ask(CollectCommand(BY, CollectKind.LOGS, (1,)))) == ["a", "b"]


def test_each_operator_gets_the_reply_to_its_own_command() -> None:
    job = running("a", "b")
    other = WATCHER + 1
    job.watchers.open(other)
    told = []
    for session in (WATCHER, other):
        job.watchers.receive(session, RestartCommand(BY), job.now, "")
        told += job.told(job.coordinator.take_result().messages)
    assert {session: message.done for session, message in told if isinstance(message, CommandReply)} == {
        WATCHER: True,
        other: False,
    }
    assert job.coordinator.state.ledger.requested == 1
    assert job.command(StopCommand(BY)).done
    assert job.command(StopCommand(BY)) == CommandReply(False, "the job has already stopped")


def test_a_new_watcher_replaces_the_longest_silent_one() -> None:
    dispatcher = Dispatcher(Settings("job", 1, 1))
    ended: list[int] = []
    watches: list[JobWatch] = []
    for number in range(MAX_WATCHERS):

        def disconnect(_why: str, number: int = number) -> None:
            ended.append(number)

        watches.append(JobWatch(dispatcher, lambda _: None, disconnect))
    watches[0].receive(WatchRequest())
    JobWatch(dispatcher, lambda _: None, lambda _: None)
    assert ended == [1]
    watches[1].receive(WatchRequest())
    watches[1].detach()
    JobWatch(dispatcher, lambda _: None, lambda _: None)
    assert ended == [1, 2]


def test_a_drill_goes_to_the_worker_s_node_and_is_announced_to_all() -> None:
    job = running("a", "b")
    reply = job.command(FaultCommand(BY, Fault.PAUSE_WORKER, rank=3, lasts=2.0))
    assert reply == CommandReply(True, f"{BY} drills pause worker: rank 3 on b (rank 1), for 2 s at most")
    assert of(FaultRequested, job.sent) == [(ord("b"), FaultRequested(BY, Fault.PAUSE_WORKER, 3, 2.0))]
    assert {session for session, _ in of(OperatorAction, job.sent)} == {ord("a"), ord("b")}
    event = job.status().events[-1]
    assert (event.kind, event.text) == (EventKind.DRILL, reply.detail)
    # A killed node is silent until it counts as lost.
    assert job.command(FaultCommand(BY, Fault.KILL_NODE, node="b")).done
    killed = FaultRequested(BY, Fault.KILL_NODE, -1, 2 * job.settings.lease)
    assert of(FaultRequested, job.sent) == [(ord("b"), killed)]


def test_a_followed_node_is_asked_again_when_it_is_back() -> None:
    job = Job(Settings("job", 2, 3, last_call_timeout=0.0))
    for name in "ab":
        job.node(name)
    job.reads_all = False
    number = next(message.number for _, message in job.ask(FOLLOW) if isinstance(message, CollectRequested))
    job.hears("b", CollectedPart(number, b"x", True))
    node = next(session.node for session in job.coordinator.sessions if session.number == ord("b"))
    # Its first session breaks after it has opened a second one, and before it has resumed there.
    job.coordinator.open(201, SessionRecord(node, node.addr, state=SessionState.RESUMING), job.now)
    job.told(job.coordinator.close(ord("b"), job.now).messages)
    assert not asked_for_logs(job.ask(Taken(number)))
    info = job.coordinator.state.participants[node].node_info
    held = ResumeRequest("inc", info, round=0, origin="inc", group_rank=1, group_world_size=2, round_over=False)
    told = job.told(job.coordinator.receive(201, held, job.now).messages)
    assert [session for session, _ in of(CollectRequested, told)] == [201]


def test_ranks_of_finished_nodes_are_refused() -> None:
    job = running("a", "b")
    job.hears("b", Succeed(0))
    job.told(job.coordinator.close(ord("b"), job.now).messages)
    with pytest.raises(CommandRefused, match="the node that had rank 2 succeeded and left"):
        nodes_with_ranks((2,), job.coordinator.state)
    with pytest.raises(CommandRefused, match="the job has no rank 9"):
        nodes_with_ranks((9,), job.coordinator.state)
