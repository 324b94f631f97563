"""Commands to a job that is between rounds, made smaller, taken over, or commanded by several people at once."""

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
    DrainRequested,
    Fault,
    FaultRequested,
    JoinRequest,
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
from tests.unit.coordinator.test_watching import BY, CAUSE, WATCHER, Job, Told, running, snapshot_in

JOINED = JoinRequest(NodeInfo("default", 2, "", 7000, None, 3), 600.0)


def hosts(job: Job) -> tuple[list[str], list[str]]:
    """The participants, and the spares."""
    state = job.coordinator.state
    return [each.host for each in state.participants], [each.host for each in state.redundancy_list]


def test_who_had_a_place_before_keeps_it_where_there_are_fewer() -> None:
    first, new = NodeId("a", 1, 0, "a"), NodeId("b", 1, 0, "b")
    info = NodeInfo("default", 1, "", 7000)
    state = State(participants={new: Participant(info), first: Participant(info, previous_rank=0)})
    after = with_size(state, NodeRange(1, 1), Settings("job", 1, 2))
    assert (list(after.participants), list(after.redundancy_list)) == ([first], [new])
    assert (after.last_call, after.last_calls) == (1, 1), "there are enough nodes now"
    assert with_size(after, NodeRange(2, 2), Settings("job", 1, 1)).last_call == 0, "and now there are not"


def test_a_round_that_is_held_back_is_not_larger_than_the_job_was_made() -> None:
    job = Job(Settings("job", 3, 3, last_call_timeout=0.0, restart_backoff=10.0))
    for name in "abc":
        job.node(name)
    job.hears("b", Fail(0, CAUSE, 3))
    assert job.command(ResizeCommand(BY, 1, 2)).done
    for name in "abc":
        job.hears(name, JOINED)
    assert hosts(job) == (["a", "b"], ["c"])
    assert job.status().phase is JobPhase.HELD_BACK
    assert "no round is running" in job.command(RestartCommand(BY)).detail
    job.wait(10.0)
    assert (job.coordinator.state.complete, job.coordinator.state.round) == (True, 1)


@pytest.mark.parametrize("size", [NodeRange(1, 4), NodeRange(1, 2)], ids=["larger", "smaller than its round"])
def test_a_control_plane_that_has_forgotten_all_learns_the_size_from_the_nodes(size: NodeRange) -> None:
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


def test_a_place_says_the_size_that_an_operator_has_set() -> None:
    job = running("a", "b")
    job.command(ResizeCommand(BY, 1, 2))
    job.command(RestartCommand(BY))
    told = job.hears("a", JOINED) + job.hears("b", JOINED)
    assert {each.placement.size for _, each in told if isinstance(each, Placed)} == {NodeRange(1, 2)}


def test_the_node_that_hosts_the_control_plane_is_not_drained() -> None:
    job = Job(Settings("job", 1, 1, last_call_timeout=0.0))
    record = SessionRecord(NodeId("10.0.0.1", 7, 0, "host"), "10.0.0.1", in_this_process=True, local=True, leased=False)
    job.coordinator.open(1, record, job.now)
    job.coordinator.receive(1, JOINED, job.now)
    before = job.coordinator.state
    reply = job.command(DrainCommand(BY, "host"))
    assert not reply.done
    assert "hosts this job's control plane" in reply.detail
    assert job.sent == [(WATCHER, reply)]
    assert job.coordinator.state is before


def test_a_spare_and_a_node_that_waits_can_be_drained() -> None:
    job = Job(Settings("job", 2, 2, last_call_timeout=0.0))
    for name in "abc":
        job.node(name)
    assert job.command(DrainCommand(BY, "c")).done
    assert [session for session, each in job.sent if isinstance(each, DrainRequested)] == [ord("c")]


@pytest.mark.parametrize("phase", [AgentPhase.ENDING, AgentPhase.LEAVING, AgentPhase.ENDED])
def test_a_drain_does_not_change_how_an_agent_ends_that_ends_already(phase: AgentPhase) -> None:
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


def test_who_watches_sees_that_a_job_is_preempted_and_which_nodes_are_lost_meanwhile() -> None:
    job = running("a", "b")
    job.hears("b", PreemptJob(60.0, "received SIGUSR2"))
    job.coordinator.close(ord("b"), job.now)
    seen = job.status()
    assert seen.phase is JobPhase.RUNNING
    assert [(each.kind, each.text) for each in seen.events][-2:] == [
        ("job preempted", "b (rank 1) received SIGUSR2: the job is being preempted"),
        ("node lost", "b (rank 1): a node was lost"),
    ]
    job.hears("a", Drain(0, needs_consent=True))
    assert job.status().events[-1].text == "the job has stopped: b (rank 1) received SIGUSR2"


def test_who_watches_sees_each_node_that_is_lost_at_once() -> None:
    job = Job(Settings("job", 9, 9))
    for name in "abcdefgh":
        job.node(name)
    lost = "abcdef"
    job.coordinator._end([ord(name) for name in lost], job.now, Reason.LOST, "silent")
    job.coordinator.receive(ord("g"), LeaveRequest(), job.now)
    texts = [each.text for each in job.status().events if each.kind == "node lost"]
    assert texts == [*(f"{name}: a node was lost" for name in lost), "g: a node left"]


def test_who_watches_sees_who_was_lost_with_the_node_that_ended_the_round() -> None:
    job = running("a", "b", "c")
    job.coordinator._end([ord("b"), ord("c")], job.now, Reason.LOST, "silent")
    texts = [each.text for each in job.status().events]
    assert sum("b (rank 1)" in each for each in texts) == 1
    assert texts.count("c (rank 2): a node was lost") == 1


def test_of_two_operators_each_is_told_what_came_of_its_own_command() -> None:
    job = running("a", "b")
    other = WATCHER + 1
    job.watchers.open(other)
    told = []
    for session in (WATCHER, other):
        job.watchers.receive(session, RestartCommand(BY), job.now, "")
        told += job.told(job.coordinator.take_result().messages)
    replies = {session: each.done for session, each in told if isinstance(each, CommandReply)}
    assert replies == {WATCHER: True, other: False}
    assert job.coordinator.state.ledger.requested == 1


def test_how_long_a_job_waits_counts_from_its_first_node() -> None:
    job = Job(now=90_000.0)
    assert job.status().phase_for == 0.0
    job.node("a")
    job.wait(3.0)
    assert job.status().phase_for == 3.0


def test_nodes_are_asked_again_at_once_when_a_round_has_started() -> None:
    job = running("a", "b")
    job.ask(WatchRequest())
    for name in "ab":
        job.hears(name, NodeReport(0, (1, 2)))
    job.command(RestartCommand(BY))
    for name in "ab":
        job.hears(name, JOINED)
    told = job.ask(WatchRequest())
    assert sum(isinstance(each, ReportRequested) for _, each in told) == 2
    for name in "ab":
        told = job.hears(name, NodeReport(1, (3, 4)))
    seen = snapshot_in(told + job.told(job.coordinator.tick(job.now).messages))
    assert [each.report and each.report.pids for each in seen.nodes] == [(3, 4)] * 2


def test_who_follows_a_large_job_sees_the_workers_of_a_new_round_soon() -> None:
    job = running(*(chr(number) for number in range(0x100, 0x100 + 400)))
    job.ask(WatchRequest(after=0))
    job.command(RestartCommand(BY))
    for session in list(job.coordinator.sessions):
        job.hears(chr(session.number), JOINED)
    asked = [session for session, each in job.ask(WatchRequest(after=1)) if isinstance(each, ReportRequested)]
    assert len(asked) == 400
    job.wait(1.0)
    told = job.ask(WatchRequest(after=1))
    assert not any(isinstance(each, ReportRequested) for _, each in told), "and then now and again"


def test_what_nobody_asked_for_is_not_listened_to() -> None:
    coordinator = Coordinator(Settings("job", 1, 1, last_call_timeout=0.0), "inc")
    coordinator.open(1, SessionRecord(NodeId("10.0.0.1", 7, 0, "a"), "10.0.0.1"), 0.0)
    coordinator.receive(1, JOINED, 0.0)
    for said in (NodeReport(0, (666,)), CollectedPart(1, b"x", True)):
        assert coordinator.receive(1, said, 0.0).messages == []
    assert coordinator.extensions.loaded == [], "nothing is kept for watchers before one has come"
    watchers: WatcherSessions = coordinator.extensions.find(WATCHERS)
    watchers.open(WATCHER)
    coordinator.receive(1, NodeReport(0, (666,)), 0.0)
    assert all(each.report is None for each in watchers.snapshot(0.0)().nodes)
    assert coordinator.take_result().messages == []


def test_nobody_waits_for_a_node_that_is_lost_while_it_collects() -> None:
    job = running("a", "b")
    told = job.ask(CollectCommand(BY, CollectKind.STACKS))
    number = next(each.number for _, each in told if isinstance(each, CollectRequested))
    job.hears("a", CollectedPart(number, b"x", True))
    told = job.told(job.coordinator.close(ord("b"), job.now).messages)
    assert [each for session, each in told if isinstance(each, CommandReply)] == [
        CommandReply(False, "lost in the meantime: b (rank 1)")
    ]


def test_more_nodes_than_there_are_have_to_be_forced_and_are_awaited_from_the_next_round_on() -> None:
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


def test_a_node_that_is_drained_is_shown_so_and_its_end_says_by_whom() -> None:
    job = running("a", "b")
    job.command(DrainCommand(BY, "b"))
    assert {each.host: each.drained_by for each in job.status().nodes} == {"a": "", "b": BY}
    job.hears("b", LeaveRequest(why=f"drained by {BY}"))
    assert job.status().events[-1].text == f"round 0 ended: b (rank 1): a node left (drained by {BY})"


def test_with_a_notice_the_round_ends_by_the_drain_and_not_by_something_unknown() -> None:
    job = running("a", "b")
    job.hears("b", Preempt(0, 30.0, f"is being drained by {BY}"))
    for name in "ab":
        job.hears(name, Drain(0, needs_consent=True))
    assert f"b (rank 1) is being drained by {BY}" in job.status().events[-1].text


FOLLOW = CollectCommand(BY, CollectKind.LOGS, (), 20, 77)


def asked_for_logs(told: list[Told]) -> list[str]:
    return [chr(session) for session, each in told if isinstance(each, CollectRequested)]


def test_logs_are_followed_through_rounds_until_the_job_ends() -> None:
    job = Job(Settings("job", 2, 3, last_call_timeout=0.0))
    for name in "ab":
        job.node(name)
    told = job.ask(FOLLOW)
    assert asked_for_logs(told) == ["a", "b"]
    asked = next(each for _, each in told if isinstance(each, CollectRequested))
    assert (asked.lines, asked.cursor, asked.most > 0) == (20, 77, True)
    told = job.hears("b", CollectedPart(asked.number, b"x", True))
    assert asked_for_logs(told) == ["b"], "as it was read"
    job.command(RestartCommand(BY))
    job.hears("a", JOINED)
    job.node("c")
    told = job.hears("b", JOINED)
    assert "c" in asked_for_logs(told), "a node that is new"
    told = job.ask(StopCommand(BY))
    assert not [each for _, each in told if isinstance(each, CommandReply) and not each.detail]
    told = []
    for name in "abc":
        told += job.hears(name, CollectedPart(asked.number, b"last words", True))
    replies = [each for session, each in told if session == WATCHER]
    assert replies[-1] == CommandReply(True, "")
    assert sum(isinstance(each, CollectedPart) for each in replies) == 3
    assert asked_for_logs(told) == []


def test_logs_of_the_last_round_are_there_while_none_runs() -> None:
    job = running("a", "b")
    job.hears("b", Fail(0, CAUSE, 3))
    assert asked_for_logs(job.ask(CollectCommand(BY, CollectKind.LOGS, (1,)))) == ["a", "b"]


def test_logs_of_some_ranks_come_from_their_nodes() -> None:
    job = running("a", "b", "c")
    assert asked_for_logs(job.ask(CollectCommand(BY, CollectKind.LOGS, (5, 4, 0)))) == ["c", "a"]


def test_a_stop_of_a_job_that_is_over_says_so() -> None:
    job = running("a", "b")
    assert job.command(StopCommand(BY)).done
    reply = job.command(StopCommand(BY))
    assert (reply.done, reply.detail) == (False, "the job has already stopped")


def test_a_new_watcher_takes_the_place_of_the_one_that_has_been_silent_for_the_longest_time() -> None:
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


def test_a_fault_is_asked_of_the_node_that_has_the_worker_and_told_to_all() -> None:
    job = running("a", "b")
    reply = job.command(FaultCommand(BY, Fault.PAUSE_WORKER, rank=3, lasts=2.0))
    assert reply == CommandReply(True, f"{BY} drills pause worker: rank 3 on b (rank 1), for 2 s at most")
    wanted = FaultRequested(BY, Fault.PAUSE_WORKER, 3, 2.0)
    assert [told for told in job.sent if isinstance(told[1], FaultRequested)] == [(ord("b"), wanted)]
    assert {session for session, each in job.sent if isinstance(each, OperatorAction)} == {ord("a"), ord("b")}
    event = job.status().events[-1]
    assert (event.kind, event.text) == (EventKind.DRILL, reply.detail)


def test_a_node_that_is_killed_is_silent_until_it_was_counted_as_lost() -> None:
    job = running("a", "b")
    assert job.command(FaultCommand(BY, Fault.KILL_NODE, node="b")).done
    (wanted,) = [each for _, each in job.sent if isinstance(each, FaultRequested)]
    assert wanted == FaultRequested(BY, Fault.KILL_NODE, -1, 2 * job.settings.lease)


@pytest.mark.parametrize(
    "command",
    [
        FaultCommand(BY, Fault.KILL_WORKER),
        FaultCommand(BY, Fault.HANG, rank=4),
        FaultCommand(BY, Fault.CUT),
        FaultCommand(BY, Fault.KILL_AGENT, node="c"),
    ],
)
def test_a_fault_for_nobody_is_refused(command: FaultCommand) -> None:
    job = running("a", "b")
    reply = job.command(command)
    assert not reply.done
    assert job.sent == [(WATCHER, reply)]


@pytest.mark.parametrize("fault", Fault)
def test_a_drill_does_not_take_the_control_plane_away(fault: Fault) -> None:
    job = Job(Settings("job", 1, 1, last_call_timeout=0.0))
    record = SessionRecord(NodeId("10.0.0.1", 7, 0, "host"), "10.0.0.1", in_this_process=True, local=True, leased=False)
    job.coordinator.open(1, record, job.now)
    job.coordinator.receive(1, JOINED, job.now)
    reply = job.command(FaultCommand(BY, fault, rank=0, node="host", lasts=1.0))
    assert reply.done == (fault not in {Fault.KILL_AGENT, Fault.KILL_NODE, Fault.CUT}), reply


def test_who_may_not_give_commands_may_not_drill() -> None:
    job = running("a", "b")
    told = job.ask(FaultCommand(BY, Fault.KILL_WORKER, rank=0), refusal="not you")
    assert told == [(WATCHER, CommandReply(False, "not you"))]


def test_a_node_that_is_followed_is_asked_again_when_it_is_back() -> None:
    job = Job(Settings("job", 2, 3, last_call_timeout=0.0))
    for name in "ab":
        job.node(name)
    job.reads_all = False
    number = next(message.number for _, message in job.ask(FOLLOW) if isinstance(message, CollectRequested))
    job.hears("b", CollectedPart(number, b"x", True))
    node = next(session.node for session in job.coordinator.sessions if session.number == ord("b"))
    # It has opened a second session, and not said in it what it holds, when the first one breaks.
    job.coordinator.open(201, SessionRecord(node, node.addr, state=SessionState.RESUMING), job.now)
    job.told(job.coordinator.close(ord("b"), job.now).messages)
    assert not asked_for_logs(job.ask(Taken(number)))
    info = job.coordinator.state.participants[node].node_info
    held = ResumeRequest("inc", info, round=0, origin="inc", group_rank=1, group_world_size=2, round_over=False)
    told = job.told(job.coordinator.receive(201, held, job.now).messages)
    assert [session for session, message in told if isinstance(message, CollectRequested)] == [201]


def test_a_rank_of_a_node_that_has_succeeded_and_left_is_named_so() -> None:
    job = running("a", "b")
    job.hears("b", Succeed(0))
    job.told(job.coordinator.close(ord("b"), job.now).messages)
    with pytest.raises(CommandRefused, match="the node that had rank 2 succeeded and left"):
        nodes_with_ranks((2,), job.coordinator.state)
    with pytest.raises(CommandRefused, match="the job has no rank 9"):
        nodes_with_ranks((9,), job.coordinator.state)
