"""The agent's reaction to events: examples, and laws for any sequence of events."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.agent.policy import Phase, PolicyState, PostedNotice, Rules, begin, decide
from rallypoint.agent.steps import (
    CheckNode,
    DrainArrived,
    End,
    Event,
    ForwardSignal,
    KillWorkers,
    LogLine,
    NodeChecked,
    PostNotice,
    PostStopNotice,
    RequestJoin,
    SetTimer,
    SignalArrived,
    StartWorkers,
    Step,
    StopHeld,
    StopWorkers,
    Timer,
    TimerFired,
    WithdrawNotice,
    WorkersFailed,
    WorkersFenced,
    WorkersReady,
    WorkersStopped,
    WorkersSucceeded,
)
from rallypoint.control.membership.state import (
    Drain,
    Fail,
    NodeRanks,
    Outcome,
    Preempt,
    Reason,
    Refusal,
    RoundEnd,
    Succeed,
    Verdict,
)
from rallypoint.control.protocol.messages import (
    Heartbeat,
    JobEnded,
    JoinRefused,
    LeaveReply,
    LeaveRequest,
    LinkDown,
    LinkLost,
    LinkUp,
    NodesWaiting,
    Placed,
    Placement,
    Preempted,
    ProgressText,
    RoundEnded,
)
from rallypoint.failures.cause import Cause, Ending
from rallypoint.notices import PREEMPTION, SCALE
from tests.effort import examples

CAUSE = Cause(1, 1, "host", 42, -9, "Signal 9 (SIGKILL)", "", 0.0, "")


def placed(round_: int) -> Placed:
    return Placed(Placement(round_, 0, 1, NodeRanks(0, 1, 0, 1), "127.0.0.1", 7000, 0))


def drained(round_: int) -> RoundEnded:
    return RoundEnded(RoundEnd(round_, Reason.DRAINED, "node"))


def ended(round_: int) -> RoundEnded:
    return RoundEnded(RoundEnd(round_, Reason.FAILURE, "node", CAUSE))


SUCCEEDED = JobEnded(Verdict(Outcome.SUCCEEDED))
FAILED = JobEnded(Verdict(Outcome.FAILED, CAUSE))
PREEMPTED = JobEnded(Verdict(Outcome.STOPPED, detail="b received SIGUSR2", ending=Ending.PREEMPTED), is_delegate=True)
STOPPED = WorkersStopped()
TERM, INT, QUIT, HUP = (SignalArrived(number) for number in (SIGTERM, SIGINT, SIGQUIT, SIGHUP))
SIGNAL_OVER, NOTICE_OVER, LEAVE_OVER, VERDICT_OVER = map(
    TimerFired, (Timer.SIGNAL, Timer.NOTICE, Timer.LEAVE, Timer.VERDICT)
)
ENDINGS = [SUCCEEDED, FAILED, LinkLost("gone"), TERM, INT, QUIT, HUP]


def after(
    *events: Event, notice: float = 0, rules: Sequence[Rules] = (), checks: bool = False
) -> tuple[PolicyState, list[Step]]:
    """The state of an agent after these events, and all its steps; with a check, from the beginning."""
    status, steps = PolicyState(notice_timeout=notice, checks_node=checks), list[Step]()
    if checks:
        status, now = begin(status)
        steps += now
    for event in events:
        status, now = decide(status, event, rules)
        steps += now
    return status, steps


def acts(*events: Event, **options: Any) -> list[Step]:
    """The steps without log lines."""
    return [step for step in after(*events, **options)[1] if not isinstance(step, LogLine)]


def kinds(*events: Event, **options: Any) -> list[object]:
    """The type of each step, the timer that it sets, or the type of the event that ends the agent."""
    return [kind_of(step) for step in acts(*events, **options)]


def kind_of(step: Step) -> object:
    if isinstance(step, SetTimer):
        return step.timer
    return type(step.event) if isinstance(step, End) else type(step)


def left(number: int, standing: str = "", *, saved: bool = False) -> End:
    """The end after a signal."""
    return End(SignalArrived(number), standing, saved)


QUERY = [LeaveRequest(wants_reply=True), SetTimer(Timer.QUERY, 0.2), SetTimer(Timer.LEAVE, 1.0)]


# Rounds


def test_a_failure_restarts_the_workers() -> None:
    steps = kinds(placed(0), WorkersFailed(CAUSE), ended(0), STOPPED, placed(1))
    assert steps == [StartWorkers, Fail, RequestJoin, StopWorkers, StartWorkers]
    status, early = after(placed(0), WorkersFailed(CAUSE), ended(0), placed(1))
    assert status.phase is Phase.FORMING
    assert not isinstance(early[-1], StartWorkers), "the place comes before the workers have ended"
    status, now = decide(status, STOPPED)
    assert now == (StartWorkers(placed(1).placement),)
    assert (status.phase, status.round) == (Phase.RUNNING, 1)


def test_places_in_rounds_that_have_ended_are_not_taken() -> None:
    stopping = placed(0), ended(0), placed(1), ended(1)
    assert kinds(*stopping, STOPPED) == [StartWorkers, RequestJoin, StopWorkers, RequestJoin]
    assert kinds(*stopping, STOPPED, placed(2))[-1] is StartWorkers
    assert kinds(*stopping, placed(2), ended(1), STOPPED)[-1] is StartWorkers
    assert kinds(ended(0), ended(0), placed(1)) == [RequestJoin, StartWorkers]
    assert kinds(placed(0), ended(0), STOPPED, ended(1), placed(2))[-2:] == [RequestJoin, StartWorkers]


def test_a_kept_place_is_taken_when_the_workers_have_ended() -> None:
    kept = [ended(round_)._replace(keeps_place=True) for round_ in (0, 1)]
    steps = acts(placed(0), WorkersFailed(CAUSE), kept[0], placed(1), STOPPED)
    assert steps[2] == RequestJoin(keeps_place=True)
    assert steps[4:] == [StartWorkers(placed(1).placement)]
    steps = acts(placed(0), kept[0], placed(1), kept[1], placed(2), STOPPED)
    assert [step for step in steps if isinstance(step, RequestJoin)] == [RequestJoin(keeps_place=True)] * 2
    assert steps[-1] == StartWorkers(placed(2).placement)


def test_success_waits_for_the_verdict() -> None:
    events = (placed(0), WorkersSucceeded(), SUCCEEDED, STOPPED)
    expected: list[object] = [StartWorkers, Succeed, StopWorkers, JobEnded]
    assert [kinds(*events[:many]) for many in range(1, 5)] == [expected[:many] for many in range(1, 5)]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (RoundEnd(0, Reason.LOST, "n3 (rank 2)", detail="silent for 3 s"), "n3 (rank 2) was lost (silent for 3 s)"),
        (RoundEnd(0, Reason.LOST, ""), "a node was lost"),
        (RoundEnd(0, Reason.DEPARTED, "n3 (rank 2)"), "n3 (rank 2) left"),
        (RoundEnd(0, Reason.DRAINED, "n1 (rank 0)", detail="n4 is new"), "n4 is new"),
        (RoundEnd(0, Reason.FORGOTTEN, ""), "how it ended is no longer known"),
        (RoundEnd(0, Reason.FAILURE, "n2 (rank 1)", CAUSE), "rank 1 failed on host (exit code -9, SIGKILL): Signal 9"),
    ],
)
def test_log_line_of_a_rounds_end(end: RoundEnd, words: str) -> None:
    _, steps = after(placed(0), RoundEnded(end))
    (line,) = [step.text for step in steps if isinstance(step, LogLine)]
    assert line.startswith(f"round 0 ended: {words}")


def test_new_nodes_drain_the_current_round_once() -> None:
    assert isinstance(after(placed(2), NodesWaiting(2, 1))[1][-1], Drain)
    assert kinds(placed(2), NodesWaiting(1, 1), NodesWaiting(2, 0)) == [StartWorkers]
    # The notification may come while the workers of the round before still stop.
    steps = acts(placed(0), ended(0), placed(1), NodesWaiting(1, 1), ended(1), STOPPED, placed(2))
    expected = [StartWorkers, RequestJoin, StopWorkers, Drain, RequestJoin, StartWorkers]
    assert [type(step) for step in steps] == expected
    assert steps[3] == Drain(1, needs_consent=False)
    assert kinds(placed(0), ended(0), placed(1), NodesWaiting(1, 0), NodesWaiting(0, 1))[-1] is StopWorkers


# The connection to the coordinator


def test_a_lost_control_plane_changes_no_result_of_the_workers() -> None:
    assert kinds(placed(0), WorkersSucceeded(), LinkLost("gone"), STOPPED)[-2:] == [StopWorkers, JobEnded]
    assert kinds(placed(0), LinkLost("gone"), STOPPED)[-2:] == [StopWorkers, LinkLost]
    status, steps = after(placed(0), WorkersFailed(CAUSE), LinkLost("the control plane is gone"), STOPPED)
    assert status.phase is Phase.ENDED
    assert steps[-1] == End(JobEnded(Verdict(Outcome.FAILED, CAUSE, ending=Ending.INFRASTRUCTURE)))
    text = "the control plane is gone; this node is ending the job with the failure of its own workers"
    assert LogLine(text, True) in steps
    again = kinds(placed(0), WorkersFailed(CAUSE), ended(0), LinkLost("gone"), STOPPED)
    assert again[-1] is LinkLost, "the others know the failure, and a restart would have followed"


def test_a_lost_connection_stops_nothing_and_is_logged_once() -> None:
    status, steps = after(placed(0), LinkDown("the server is away"), LinkDown("the server is away"))
    assert status.phase is Phase.RUNNING
    assert steps[1:] == [LogLine("the server is away; the workers keep running", warning=True)]
    _, steps = after(placed(0), LinkUp(), LinkDown("x"), ended(0), STOPPED, placed(1), LinkDown("x"), LinkUp())
    assert [step.text for step in steps if isinstance(step, LogLine)][-1] == "the control plane is reachable again"
    assert sum(isinstance(step, LogLine) for step in steps) == 3
    brief = [event for number in range(1, 1001) for event in (LinkDown("x", number), LinkUp(brief=number))]
    _, steps = after(placed(0), *brief)
    assert sum(isinstance(step, LogLine) for step in steps) == 20, "of the 1st, 2nd, 4th, ... 512th"


# Ends and signals


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    "before",
    [
        (placed(0),),
        (placed(0), WorkersFailed(CAUSE)),
        (placed(0), WorkersSucceeded()),
        (placed(0), ended(0)),
        (placed(0), ended(0), placed(1)),
    ],
)
def test_the_end_waits_for_the_workers(before: tuple[Event, ...], ending: Event) -> None:
    status, steps = after(*before, ending)
    assert status.phase is Phase.ENDING
    assert not any(isinstance(step, End) for step in steps)
    assert sum(isinstance(step, StopWorkers) for step in steps) == 1, "one stop, and one grace"
    status, now = decide(status, STOPPED)
    assert status.phase is Phase.ENDED
    assert isinstance(now[-1], End)
    assert len(now) == 1


@pytest.mark.parametrize(
    "ending", [*(event for event in ENDINGS if event != TERM), JoinRefused(Refusal.TIMEOUT, "1 of 2")]
)
def test_without_workers_the_end_is_immediate(ending: Event) -> None:
    status, steps = after(ending)
    assert status.phase is Phase.ENDED
    assert isinstance(steps[-1], End)


def test_signals_leave_the_job_and_reach_the_workers() -> None:
    assert acts(placed(0), HUP)[1:] == [LeaveRequest(), StopWorkers(SIGHUP, shared=True)]
    assert acts(placed(0), TERM)[1:] == [LeaveRequest(), PostStopNotice(), StopWorkers(SIGTERM, shared=True)]
    assert acts(HUP) == [LeaveRequest(), left(SIGHUP)]
    assert acts(TERM) == [LeaveRequest(), *QUERY]


@pytest.mark.parametrize("notice", [0, 30])
def test_a_drained_node_names_the_person(notice: float) -> None:
    ann, saved = "ann@login", notice > 0
    consented: list[Event] = [WorkersReady(), drained(0)] if notice else []
    status, steps = after(placed(0), DrainArrived(ann, notice), *consented, IN_ORDER, LEAVE_OVER, notice=notice)
    assert status.phase is Phase.ENDED
    lines = [step.text for step in steps if isinstance(step, LogLine)]
    assert f"{ann} is draining this node" in lines[0]
    assert not any("SIGTERM" in line for line in lines)
    assert LeaveRequest(why=f"drained by {ann}") in steps
    assert steps[-1] == End(SignalArrived(SIGTERM), saved=saved, drained_by=ann)
    assert [step.why for step in steps if isinstance(step, Preempt)] == [f"is being drained by {ann}"] * bool(notice)


def test_workers_save_before_a_drain_also_without_a_notice_timeout() -> None:
    drain = DrainArrived("ann@login", 30.0)
    assert kinds(placed(0), drain)[1:] == [Preempt, PostNotice]
    assert acts(placed(0), drain, WorkersReady())[-1] == Drain(0, needs_consent=True)
    other = Preempted(0, "b", 30.0, why="is being drained by ann@login")
    assert acts(placed(0), other, WorkersReady())[-1] == Drain(0, needs_consent=True)
    assert acts(placed(0), other, NodesWaiting(0, 1))[-1] == PostNotice("preemption", "b", 30.0)
    assert kinds(placed(0), DrainArrived("ann@login", 0.0))[-1] is StopWorkers


WAITING = WorkersStopped(waiting=True)
"""Workers have left their round, and wait in their processes."""


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_end_during_a_restart_stops_waiting_workers(ending: Event) -> None:
    status, steps = after(placed(0), ended(0), placed(1), ending)
    number = ending.number if isinstance(ending, SignalArrived) else SIGTERM
    assert (status.phase, steps[-1]) == (Phase.ENDING, StopHeld(number, failed=ending == FAILED))
    assert decide(status, STOPPED)[0].phase in (Phase.ENDED, Phase.LEAVING)
    assert StopHeld not in kinds(placed(0), ending), "that stop is no restart"
    status, (stop,) = decide(status, WAITING)
    assert stop == StopWorkers(number, failed=True), "it was done when the end came"
    assert decide(status, STOPPED)[0].phase in (Phase.ENDED, Phase.LEAVING)


def test_further_signals_during_a_stop() -> None:
    assert after(placed(0), ended(0), placed(1), INT)[1][-3:-1] == [LeaveRequest(), ForwardSignal(SIGINT)]
    assert after(placed(0), ended(0), TERM)[1][-2:-1] == [LeaveRequest()], "the stop has sent SIGTERM"
    assert after(placed(0), ended(0), placed(1), INT, STOPPED)[1][-1:] == [left(SIGINT)], "the place is not taken"
    assert kinds(placed(0), TERM, TERM, HUP, TERM) == [StartWorkers, LeaveRequest, PostStopNotice, StopWorkers]


@pytest.mark.parametrize(
    ("events", "kills"),
    [
        ([placed(0), INT], True),
        ([placed(0), QUIT], True),
        ([placed(0), ended(0), INT], True),
        ([placed(0), TERM, INT], True),
        ([placed(0), TERM], False),
        ([placed(0), HUP], False),
        ([INT], False),
    ],
)
def test_the_first_interrupt_announces_that_another_one_kills(events: list[Event], kills: bool) -> None:
    steps = after(*events)[1]
    lines = "; ".join(step.text for step in steps if isinstance(step, LogLine))
    assert ("another interrupt will kill them at once" in lines) is kills
    assert KillWorkers() not in steps
    for another in (INT, QUIT):
        assert (KillWorkers() in after(*events, another)[1]) is kills


@pytest.mark.parametrize("before", [(), (placed(0),), (placed(0), ended(0)), (placed(0), TERM)])
@pytest.mark.parametrize("number", [SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH])
def test_other_signals_are_forwarded(before: tuple[Event, ...], number: int) -> None:
    status, _ = after(*before)
    assert decide(status, SignalArrived(number)) == (status, (ForwardSignal(number),))


IN_ORDER = WorkersStopped(ended_in_order=True)


def test_a_node_that_leaves_asks_whether_the_job_continues() -> None:
    leaving = (placed(0), TERM, IN_ORDER)
    status, steps = after(*leaving)
    assert (status.phase, steps[-3:]) == (Phase.LEAVING, QUERY)
    replies = [LeaveReply(True, 3), LeaveReply(True, 2), LeaveReply(True, 1)]
    assert after(*leaving, *replies)[0].phase is Phase.LEAVING, "it must continue for a moment"
    assert after(*leaving, *replies[:2], LEAVE_OVER)[1][-1] == left(SIGTERM, "continues on 2 other nodes")
    assert after(*leaving, *replies, LEAVE_OVER)[1][-1] == left(SIGTERM, "continues on 1 other node")
    assert after(*leaving, LeaveReply(False, 0, Outcome.SUCCEEDED))[1][-1] == left(SIGTERM, "has succeeded")
    assert after(TERM, LeaveReply(True, 2), LEAVE_OVER)[1][-1] == left(SIGTERM, "continues on 2 other nodes"), "a spare"
    assert after(placed(0), ended(0), TERM, IN_ORDER)[1][-3:] == QUERY, "during another stop"
    for ended_with_0 in (True, False):
        steps = after(placed(0), TERM, WorkersStopped(True, ended_with_0=ended_with_0), TimerFired(Timer.QUERY))[1]
        requests = [step for step in steps if isinstance(step, LeaveRequest)]
        assert [request.ended_with_0 for request in requests] == [False, ended_with_0, ended_with_0]


LEAVES = (placed(0), TERM, IN_ORDER)


@pytest.mark.parametrize(
    ("events", "number"),
    [
        ((*LEAVES, LeaveReply(False, 1)), SIGTERM),
        ((*LEAVES, LeaveReply(True, 2), LeaveReply(False, 1)), SIGTERM),
        ((*LEAVES, LeaveReply(False, 0, Outcome.FAILED)), SIGTERM),
        ((*LEAVES, LEAVE_OVER), SIGTERM),
        ((*LEAVES, LeaveReply(True, 2), LinkDown("away")), SIGTERM),
        ((*LEAVES, LinkLost("gone")), SIGTERM),
        ((*LEAVES, LeaveReply(True, 2), TERM, INT), SIGTERM),
        ((placed(0), TERM, STOPPED), SIGTERM),
        ((placed(0), INT, IN_ORDER), SIGINT),
        ((placed(0), HUP, IN_ORDER), SIGHUP),
        ((placed(0), LinkDown("away"), TERM, IN_ORDER), SIGTERM),
    ],
)
def test_a_node_that_is_stopped(events: tuple[Event, ...], number: int) -> None:
    """The job does not continue, its workers were killed, or the signal does not ask it to leave."""
    status, steps = after(*events)
    assert (status.phase, steps[-1]) == (Phase.ENDED, left(number))


def by(number: int, *reached: int) -> WorkersFailed:
    """A worker was ended by a signal, a moment after these were sent to all processes."""
    return WorkersFailed(CAUSE._replace(exitcode=-number), frozenset(reached))


def test_workers_ended_by_a_signal_to_all_have_not_failed() -> None:
    status, steps = after(placed(0), by(SIGTERM, SIGTERM))
    assert steps[1:] == [SetTimer(Timer.SIGNAL, 1.0)]
    assert decide(status, by(SIGTERM, SIGTERM))[1] == (), "it is judged once"
    assert decide(status, TERM)[1][1:] == (LeaveRequest(), PostStopNotice(), StopWorkers(SIGTERM, shared=True))
    assert kinds(placed(0), by(SIGTERM, SIGTERM), TERM, STOPPED, SIGNAL_OVER)[-1] is SignalArrived
    assert Fail not in kinds(placed(0), by(SIGTERM, SIGTERM), TERM, SIGNAL_OVER, STOPPED, SIGNAL_OVER)
    stopped = [LeaveRequest, PostStopNotice, StopWorkers]
    assert kinds(placed(0), by(SIGTERM, SIGTERM), TERM, notice=30) == [StartWorkers, Timer.SIGNAL, *stopped]
    # The agent receives the signal first, with a notice to the workers:
    notice = [StartWorkers, Preempt, PostNotice]
    assert kinds(placed(0), TERM, by(SIGTERM), notice=30) == [*notice, *stopped]
    handled = WorkersFailed(CAUSE._replace(exitcode=128 + SIGTERM))
    assert kinds(placed(0), TERM, handled, notice=30) == [*notice, *stopped]
    assert kinds(placed(0), TERM, WorkersFailed(CAUSE), notice=30) == [*notice, Fail]


def test_without_a_signal_to_the_agent_the_worker_has_failed() -> None:
    status, steps = after(placed(0), by(SIGTERM, SIGTERM), SIGNAL_OVER)
    assert steps[-1] == Fail(0, by(SIGTERM).cause, 0)
    assert (status.phase, status.held_failure) == (Phase.BROKEN, None)
    stopped = kinds(placed(0), by(SIGTERM, SIGTERM), ended(0), SIGNAL_OVER)
    assert stopped == [StartWorkers, Timer.SIGNAL, RequestJoin, StopWorkers]
    lost = after(placed(0), by(SIGTERM, SIGTERM), LinkLost("gone"), STOPPED)[1][-1]
    assert lost == End(JobEnded(Verdict(Outcome.FAILED, by(SIGTERM).cause, ending=Ending.INFRASTRUCTURE)))
    for failed in (by(SIGTERM), by(SIGUSR1, SIGUSR1), by(SIGTERM, SIGCONT), WorkersFailed(CAUSE)):
        assert after(placed(0), failed)[1][1:] == [Fail(0, failed.cause, 0)], "at once"


def test_workers_that_the_fence_has_killed_have_not_failed() -> None:
    status, steps = after(placed(0), WorkersFenced())
    assert (status.phase, status.failure) == (Phase.BROKEN, None)
    assert steps[-1] == Drain(0)
    assert kinds(placed(0), WorkersFenced(), ended(0), STOPPED, placed(1))[-1] is StartWorkers


# Notices


def test_new_nodes_wait_until_the_workers_agree() -> None:
    status, steps = after(placed(2), NodesWaiting(2, 1), NodesWaiting(2, 2), notice=30)
    assert status.posted_notice == PostedNotice(SCALE)
    assert steps[-1] == PostNotice(SCALE, "", 30)
    assert Drain not in map(type, steps)
    status, now = decide(status, WorkersReady())
    assert now == (Drain(2, needs_consent=True),)
    assert decide(status, WorkersReady())[1] == ()
    assert decide(status, NodesWaiting(2, 1))[1] == ()
    gone = placed(2), NodesWaiting(2, 1), NodesWaiting(2, 0)
    assert acts(*gone, notice=30)[-1] == WithdrawNotice()
    assert acts(*gone, WorkersReady(), notice=30)[-1] == WithdrawNotice()
    assert kinds(*gone, NodesWaiting(2, 1), notice=30)[-1] is PostNotice


def test_workers_that_have_succeeded_need_no_notice() -> None:
    assert kinds(placed(2), WorkersSucceeded(), NodesWaiting(2, 1), notice=30)[-1] is Drain
    assert kinds(placed(2), WorkersSucceeded(), Preempted(2, "b", 9), notice=30)[-1] is Drain
    assert kinds(placed(2), NodesWaiting(2, 1), WorkersSucceeded(), notice=30)[-2:] == [Succeed, Drain]


def test_a_preempted_node_leaves_when_all_have_saved_or_at_the_deadline() -> None:
    status, _ = after(placed(0), TERM, notice=30)
    assert acts(placed(0), TERM, notice=30)[1:] == [Preempt(0, 30), PostNotice(PREEMPTION, "", 30)]
    assert status.phase is Phase.RUNNING
    leaves = [LeaveRequest, PostStopNotice, StopWorkers]
    events = (placed(0), TERM, TERM, WorkersReady(), drained(0))
    assert kinds(*events, notice=30)[-4:] == [Drain, *leaves]
    assert kinds(*events, STOPPED, notice=30)[-1] is SignalArrived
    steps = kinds(placed(0), TERM, WorkersReady(), NOTICE_OVER, STOPPED, notice=30)
    assert steps[-5:] == [Drain, *leaves, SignalArrived]
    assert kinds(placed(0), TERM, WorkersFailed(CAUSE), NOTICE_OVER, notice=30)[-2:] == [LeaveRequest, StopWorkers]
    assert kinds(placed(0), NodesWaiting(0, 1), WorkersReady(), NOTICE_OVER, notice=30)[-1] is Drain, "it stays"
    assert kinds(placed(0), TERM, INT, notice=30)[-2:] == [LeaveRequest, StopWorkers]
    assert kinds(placed(0), TERM, INT, INT, notice=30)[-1] is KillWorkers


def test_the_other_nodes_save_before_a_node_leaves() -> None:
    assert acts(placed(0), Preempted(0, "b", 9), WorkersReady(), notice=30)[1:] == [
        PostNotice(PREEMPTION, "b", 9),
        Drain(0, needs_consent=True),
    ]
    steps = after(placed(0), NodesWaiting(0, 1), Preempted(0, "b", 9), NodesWaiting(0, 0), notice=30)[1]
    assert steps[-1] == PostNotice(PREEMPTION, "b", 9), "only the notice of new nodes would be withdrawn"
    assert kinds(placed(0), Preempted(1, "b", 9), notice=30) == [StartWorkers]


def over(reason: Reason) -> RoundEnded:
    return RoundEnded(RoundEnd(0, reason, "node"))


@pytest.mark.parametrize(
    ("events", "failed"),
    [
        ([WorkersFailed(CAUSE), ended(0)], True),
        ([ended(0)], True),
        ([over(Reason.LOST)], True),
        ([FAILED], True),
        ([WorkersFailed(CAUSE), LinkLost("gone")], True),
        ([over(Reason.DEPARTED)], False),
        ([over(Reason.DRAINED)], False),
        ([LinkLost("gone")], False),
        ([SUCCEEDED], False),
        ([TERM], False),
        ([INT], False),
        ([NodesWaiting(0, 1), ended(0)], False),
        ([NodesWaiting(0, 1), NodesWaiting(0, 0), ended(0)], True),
        ([Preempted(0, "b", 9), FAILED], False),
        ([TERM, ended(0)], False),
    ],
)
def test_only_a_failure_without_a_notice_shortens_the_grace(events: list[Event], failed: bool) -> None:
    notice = 0 if TERM in events else 30
    (stop,) = (step for step in after(placed(0), *events, notice=notice)[1] if isinstance(step, StopWorkers))
    assert stop.failed is failed


def test_progress_of_a_forming_round_is_logged_after_the_stop() -> None:
    def logged(*events: Event) -> str:
        line = after(placed(0), ended(0), *events)[1][-1]
        assert isinstance(line, LogLine)
        return line.text

    progress = ProgressText("1 of 2 nodes have joined", warning=True)
    assert (kinds(progress), len(after(progress)[1])) == ([], 1)
    assert after(placed(0), ended(0), progress)[1] == after(placed(0), ended(0))[1]
    assert logged(STOPPED, progress) == "1 of 2 nodes have joined"
    short, enough = (ProgressText("1 of 2", warning=True, is_short=is_short) for is_short in (True, False))
    all_with_0, killed = WorkersStopped(True, ended_with_0=True), WorkersStopped(True)
    assert "all ranks on this node exited with code 0" in logged(all_with_0, short)
    assert logged(all_with_0, enough) == logged(killed, short) == "1 of 2"
    assert logged(all_with_0, placed(1), ended(1), killed, short) == "1 of 2"


# Laws for any sequence of events

EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(placed, st.integers(0, 3)),
    st.builds(ended, st.integers(0, 3)),
    st.builds(NodesWaiting, st.integers(0, 3), st.integers(0, 2)),
    st.builds(Preempted, st.integers(0, 3), st.just("b"), st.just(9.0), st.booleans()),
    st.builds(SignalArrived, st.sampled_from([SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1])),
    st.sampled_from(
        [
            SUCCEEDED,
            FAILED,
            JoinRefused(Refusal.TIMEOUT, "1 of 2"),
            LinkLost("gone"),
            LinkDown("away"),
            LinkUp(),
            ProgressText("1 of 2 nodes have joined", warning=True),
            Heartbeat(),
            WorkersSucceeded(),
            WorkersSucceeded(acknowledged=True),
            VERDICT_OVER,
            PREEMPTED,
            WorkersFailed(CAUSE),
            by(SIGTERM, SIGTERM),
            SIGNAL_OVER,
            LeaveReply(True, 2),
            LeaveReply(False, 0),
            LEAVE_OVER,
            STOPPED,
            WAITING,
            NodeChecked(),
            NodeChecked("exit code 1"),
            WorkersReady(),
            NOTICE_OVER,
        ]
    ),
)
LIVELY = st.one_of(
    st.builds(placed, st.integers(0, 3)),
    st.builds(ended, st.integers(0, 3)),
    st.sampled_from([STOPPED, WAITING, WorkersFailed(CAUSE), NodeChecked()]),
    EVENTS,
)


_HOLDS_A_PLACE = {Phase.RUNNING, Phase.BROKEN, Phase.FINISHED}


class World:
    """The effect of the steps on a node, and what must never happen."""

    def __init__(self) -> None:
        self.running = self.stopping = self.over = self.checking = self.unchecked = False
        self.waiting = self.can_wait = False
        self.round = -1
        self.killed_by: list[int] = []

    def can_be(self, event: Event) -> bool:
        if isinstance(event, WorkersStopped):
            return self.stopping and (self.can_wait or not event.waiting)
        if isinstance(event, NodeChecked):
            return self.checking and not self.stopping
        return self.running or not isinstance(event, (WorkersSucceeded, WorkersFailed, WorkersReady))

    def happens(self, event: Event) -> None:
        if isinstance(event, SignalArrived) and event.number in {SIGINT, SIGQUIT}:
            self.killed_by.append(event.number)
        if isinstance(event, WorkersStopped):
            self.running = self.stopping = self.checking = False
            self.waiting = event.waiting
        if isinstance(event, NodeChecked):
            self.checking, self.unchecked = False, bool(event.failure)

    def take(self, step: Step, event: Event, before: Sequence[Step]) -> None:
        assert not self.over, f"{step} after the end"
        match step:
            case StartWorkers(placement=placement):
                assert not self.running, "started while workers run or stop"
                self.running, self.round = True, placement.round
                assert not self.checking, "started beside the check"
                self.waiting = False
            case CheckNode():
                assert not self.running, "checked while workers run or stop"
                assert not self.waiting, "checked while workers wait, and have the devices"
                assert not self.checking, "checked twice at once"
                self.checking = self.unchecked = True
            case RequestJoin():
                assert not self.checking, "asked for a place while the check runs"
                assert not self.unchecked, "asked for a place before the check has passed"
            case StopWorkers(restarts=again, ends_all=all_):
                assert self.running or self.checking or self.waiting, "stopped what does not run"
                self.can_wait = again and not all_
                assert not self.stopping, "stopped twice"
                asked = any(isinstance(earlier, RequestJoin) for earlier in before)
                assert asked or not again or self.unchecked, "stopped before asking again"
                self.stopping = True
            case StopHeld():
                assert self.stopping, "stopped only waiting workers"
            case KillWorkers():
                assert self.stopping, "killed without having asked"
                assert len(self.killed_by) >= 2, "killed without a second interrupt"
            case PostNotice() | WithdrawNotice() | PostStopNotice() | Preempt():
                assert self.running, "asked no worker"
                assert not self.stopping, "asked workers that stop"
            case End():
                assert not self.running, "ended before the workers were gone"
                assert not self.waiting, "ended while workers wait for a round"
                assert not self.checking, "ended before the check was"
                self.over = True
            case _:
                pass


@settings(max_examples=examples(1000))
@given(st.lists(LIVELY, max_size=40), st.sampled_from([0.0, 30.0]), st.booleans())
def test_laws(events: list[Event], notice: float, checks: bool) -> None:
    check_laws(events, notice, checks)


def check_laws(events: list[Event], notice: float, checks: bool, rules: Sequence[Rules] = ()) -> None:
    """Check the laws for these events, with the rules of features."""
    world = World()
    status, first = begin(PolicyState(notice_timeout=notice, checks_node=checks))
    for step in first:
        world.take(step, Heartbeat(), ())
    for event in events:
        if not world.can_be(event):
            continue
        world.happens(event)
        before = status
        world.unchecked |= checks and before.phase is Phase.BROKEN and event == ended(before.round)
        status, now = decide(status, event, rules)
        for place, step in enumerate(now):
            world.take(step, event, now[:place])
        assert (status.notice_timeout, status.checks_node) == (notice, checks)
        assert bool(status.stopping) == world.stopping or status.phase is Phase.ENDED
        assert (status.phase is Phase.ENDED) == world.over
        if isinstance(event, RoundEnded) and before.phase in _HOLDS_A_PLACE:
            assert (event.end.round == before.round) == bool(now), "rounds that have ended change nothing"
    # A signal and the end of the workers always end it.
    status, now = decide(status, HUP, rules)
    for step in now:
        world.take(step, HUP, now)
    if world.stopping:
        world.running = world.stopping = world.checking = world.waiting = False
        status, now = decide(status, STOPPED, rules)
        for step in now:
            world.take(step, STOPPED, now)
    assert status.phase is Phase.ENDED
    assert world.over


def test_a_node_that_leaves_knows_whether_all_have_saved() -> None:
    acknowledged = after(placed(0), TERM, WorkersReady(), drained(0), STOPPED, notice=30)[1][-1]
    assert acknowledged == left(SIGTERM, saved=True)
    alone = after(placed(0), TERM, WorkersReady(), drained(0), IN_ORDER, LeaveReply(False, 0), notice=30)[1][-1]
    assert alone == left(SIGTERM, saved=True)
    late = after(placed(0), TERM, WorkersReady(is_late=True), NOTICE_OVER, STOPPED, notice=30)[1]
    assert late[-1] == left(SIGTERM)
    assert Drain not in kinds(placed(0), TERM, WorkersReady(is_late=True), NOTICE_OVER, notice=30)


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ([WorkersStopped(ended_in_order=False)], "its workers did not end in time and were killed"),
        ([IN_ORDER, LinkDown("it is away")], "the control plane does not answer"),
        ([IN_ORDER, LeaveReply(False, 0), LEAVE_OVER], ""),
    ],
)
def test_a_drained_node_gives_the_reason_if_the_job_is_unknown(last: list[Event], why: str) -> None:
    status, steps = after(placed(0), DrainArrived("ann@login", 0.0), *last)
    (ending,) = [step for step in steps if isinstance(step, End)]
    assert (status.phase, ending.standing) == (Phase.ENDED, "")
    assert ending.unasked.startswith(why)
    assert bool(ending.unasked) is bool(why)
