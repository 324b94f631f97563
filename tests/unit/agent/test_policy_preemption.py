"""The agent's reactions when a whole job is preempted."""

from __future__ import annotations

from functools import partial
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.agent.policy import Phase, PolicyState, decide
from rallypoint.agent.steps import (
    DrainArrived,
    End,
    Event,
    ForwardSignal,
    NodeChecked,
    PostNotice,
    SetTimer,
    SignalArrived,
    StartWorkers,
    Step,
    StopWorkers,
    Timer,
    TimerFired,
    WorkersReady,
    WorkersSucceeded,
)
from rallypoint.control.membership.state import Drain, Outcome, PreemptJob, Refusal, Succeed
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRefused,
    LeaveRequest,
    LinkLost,
    NodesWaiting,
    Preempted,
)
from rallypoint.failures.cause import Ending
from rallypoint.features.preemption.rules import NOTED, RULES, PreemptionRequested, RequeueJob
from rallypoint.notices import PREEMPTION
from tests.effort import examples
from tests.unit.agent import test_policy
from tests.unit.agent.test_policy import (
    LIVELY,
    PREEMPTED,
    STOPPED,
    TERM,
    World,
    check_laws,
    drained,
    kind_of,
    left,
    placed,
)

acts = partial(test_policy.acts, rules=[RULES])
after = partial(test_policy.after, rules=[RULES])
kinds = partial(test_policy.kinds, rules=[RULES])
WHY = "received SIGUSR2"
REQUESTED = PreemptionRequested(60.0, WHY)
BY_ANOTHER = Preempted(0, "b (rank 1)", 60.0, True, WHY)
BY_THIS = Preempted(0, "a (rank 0)", 60.0, True, WHY)
CONSENT = Drain(0, needs_consent=True)


def awaits_verdict(seconds: float) -> SetTimer:
    return SetTimer(Timer.VERDICT, seconds + 5.0)


def verdict_of(step: Step) -> End:
    assert isinstance(step, End)
    assert isinstance(step.event, JobEnded)
    assert step.event.verdict.outcome is Outcome.STOPPED
    assert step.event.verdict.ending is Ending.PREEMPTED
    return step


def test_a_request_preempts_the_job_once() -> None:
    asked = [PreemptJob(60.0, WHY), awaits_verdict(60.0), PostNotice(PREEMPTION, "", 60.0)]
    assert acts(placed(0), REQUESTED)[1:] == asked
    assert acts(placed(0), REQUESTED, BY_THIS, REQUESTED)[1:] == asked
    # Without workers, the verdict is awaited for a moment only.
    assert acts(REQUESTED) == [PreemptJob(60.0, WHY), awaits_verdict(0.0)]
    verdict_of(acts(REQUESTED, TimerFired(Timer.VERDICT))[-1])
    verdict_of(acts(REQUESTED, JoinRefused(Refusal.TIMEOUT, "1 of 2"))[-1])


@pytest.mark.parametrize("notice", [0.0, 30.0])
def test_other_nodes_notify_their_workers(notice: float) -> None:
    assert acts(placed(0), BY_ANOTHER, WorkersReady(), notice=notice)[1:] == [
        awaits_verdict(60.0),
        PostNotice(PREEMPTION, "b (rank 1)", 60.0),
        CONSENT,
    ]
    assert kinds(placed(0), Preempted(1, "b", 60.0, True, WHY)) == [StartWorkers], "another round"
    for event in (NodesWaiting(0, 1), DrainArrived("ann@login", 30.0), Preempted(0, "c", 5.0)):
        assert acts(placed(0), BY_ANOTHER, event, notice=notice) == acts(placed(0), BY_ANOTHER, notice=notice)


@pytest.mark.parametrize("late", [False, True])
def test_the_delegate_requeues_and_the_end_says_whether_workers_saved(late: bool) -> None:
    status, steps = after(placed(0), BY_ANOTHER, WorkersReady(is_late=late), PREEMPTED, STOPPED)
    assert [kind_of(step) for step in steps[-3:]] == [RequeueJob, StopWorkers, JobEnded], "it is requeued at once"
    assert verdict_of(steps[-1]).saved is not late
    assert status.phase is Phase.ENDED
    assert steps[-2] == StopWorkers(SIGTERM), "with all of the grace period"
    *others, end = acts(PREEMPTED)  # a spare, which has nothing to save
    assert others == [RequeueJob()]
    assert verdict_of(end).saved is None


def test_workers_are_no_longer_started() -> None:
    """The round was complete before this node could start them: it consents, and the others save."""
    for before in ([], [REQUESTED], [placed(0), drained(0), placed(1)]):
        of = Preempted(1 if len(before) == 3 else 0, "b (rank 1)", 60.0, True, WHY)
        status, steps = after(*before, of, STOPPED, placed(2))
        assert steps.count(Drain(of.round, needs_consent=True)) == 1
        assert status.phase is Phase.FORMING
        assert sum(isinstance(step, StartWorkers) for step in steps) == (1 if len(before) == 3 else 0)
        verdict_of(decide(status, PREEMPTED, (RULES,))[1][-1])
    assert StartWorkers not in kinds(REQUESTED, placed(0)), "the place and the request have crossed"


def test_workers_that_succeed_have_finished_unless_they_had_acknowledged() -> None:
    assert acts(placed(0), BY_ANOTHER, WorkersSucceeded())[-1] == Succeed(0)
    assert acts(placed(0), BY_ANOTHER, WorkersReady(is_late=True), WorkersSucceeded())[-1] == Succeed(0)
    assert acts(placed(0), BY_ANOTHER, WorkersSucceeded(acknowledged=True))[-1] == CONSENT
    assert acts(placed(0), BY_ANOTHER, WorkersReady(), WorkersSucceeded(acknowledged=True))[-1] == CONSENT
    status, steps = after(placed(0), BY_ANOTHER, WorkersSucceeded(acknowledged=True), PREEMPTED, STOPPED)
    assert verdict_of(steps[-1]).saved is True
    assert status.phase is Phase.ENDED
    assert acts(placed(0), WorkersSucceeded(), BY_ANOTHER)[1:] == [Succeed(0), awaits_verdict(60.0)]
    ready_before = acts(placed(0), NodesWaiting(0, 1), WorkersReady(), BY_ANOTHER, notice=30)
    assert ready_before[-2:] == [awaits_verdict(60.0), CONSENT]


@pytest.mark.parametrize("event", [TimerFired(Timer.VERDICT), LinkLost("gone")])
def test_the_end_without_a_verdict(event: Event) -> None:
    for before in ([placed(0), BY_ANOTHER], [placed(0), WorkersSucceeded(), BY_ANOTHER], [placed(0), REQUESTED]):
        steps = acts(*before, event, STOPPED)
        assert verdict_of(steps[-1])
        assert RequeueJob() in steps, "each node may try: the scheduler takes one request"


def test_signals_during_a_preemption() -> None:
    steps = acts(placed(0), BY_ANOTHER, TERM, STOPPED)
    assert [kind_of(step) for step in steps[3:]] == [LeaveRequest, StopWorkers, JobEnded], "without a requeue"
    verdict_of(steps[-1])
    assert acts(placed(0), BY_ANOTHER, SignalArrived(SIGUSR1))[-1] == ForwardSignal(SIGUSR1)
    assert acts(placed(0), BY_ANOTHER, SignalArrived(SIGINT), STOPPED)[-1] == left(SIGINT)


@settings(max_examples=examples(500))
@given(st.lists(LIVELY, max_size=15), st.lists(LIVELY, max_size=25), st.sampled_from([0.0, 30.0]))
def test_a_preempted_agent_ends_as_such(before: list[Event], later: list[Event], notice: float) -> None:
    """The job ends as preempted, by a verdict that the agent received, or by a person's signal."""
    world, status, known = World(), PolicyState(notice_timeout=notice), False
    received = set()
    for event in [*before, REQUESTED, *later, TimerFired(Timer.VERDICT), STOPPED]:
        if not world.can_be(event):
            continue
        world.happens(event)
        known = known or NOTED in status.noted
        assert NOTED in status.noted or not known
        received.add(event)
        status, now = decide(status, event, (RULES,))
        for place, step in enumerate(now):
            world.take(step, event, now[:place])
            if known and isinstance(step, End) and isinstance(step.event, JobEnded) and step.event not in received:
                verdict_of(step)
            elif known and world.over:
                assert isinstance(step, End)
                assert isinstance(step.event, JobEnded | SignalArrived | NodeChecked)
    assert status.phase in (Phase.ENDED, Phase.LEAVING)


@settings(max_examples=examples(1000))
@given(st.lists(st.one_of(LIVELY, st.just(REQUESTED)), max_size=40), st.sampled_from([0.0, 30.0]), st.booleans())
def test_laws_with_preemption(events: list[Event], notice: float, checks: bool) -> None:
    check_laws(events, notice, checks, [RULES])
