"""The agent's reaction when a whole job is preempted."""

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
TOLD = PreemptionRequested(60.0, WHY)
OF_ANOTHER = Preempted(0, "b (rank 1)", 60.0, True, WHY)
OF_THIS = Preempted(0, "a (rank 0)", 60.0, True, WHY)
CONSENT = Drain(0, needs_consent=True)


def awaits(seconds: float) -> SetTimer:
    return SetTimer(Timer.VERDICT, seconds + 5.0)


def verdict_of(step: Step) -> End:
    assert isinstance(step, End)
    assert isinstance(step.event, JobEnded)
    assert step.event.verdict.outcome is Outcome.STOPPED
    assert step.event.verdict.ending is Ending.PREEMPTED
    return step


def test_who_is_told_tells_the_others_and_asks_its_own_workers_once() -> None:
    asked = [PreemptJob(60.0, WHY), awaits(60.0), PostNotice(PREEMPTION, "", 60.0)]
    assert acts(placed(0), TOLD)[1:] == asked
    assert acts(placed(0), TOLD, OF_THIS, TOLD)[1:] == asked, "told again, it has nothing more to do"


def test_the_others_ask_their_workers_whatever_notice_timeout_says() -> None:
    for notice in (0.0, 30.0):
        assert acts(placed(0), OF_ANOTHER, WorkersReady(), notice=notice)[1:] == [
            awaits(60.0),
            PostNotice(PREEMPTION, "b (rank 1)", 60.0),
            CONSENT,
        ]
    assert kinds(placed(0), Preempted(1, "b", 60.0, True, WHY)) == [StartWorkers], "another round"


@pytest.mark.parametrize(("late", "saved"), [(False, True), (True, False)])
def test_the_end_says_whether_the_workers_have_saved_and_the_delegate_requeues(late: bool, saved: bool) -> None:
    status, steps = after(placed(0), OF_ANOTHER, WorkersReady(is_late=late), PREEMPTED, STOPPED)
    assert [kind_of(step) for step in steps[-3:]] == [RequeueJob, StopWorkers, JobEnded], "it is requeued at once"
    assert verdict_of(steps[-1]).saved is saved
    assert status.phase is Phase.ENDED
    assert steps[-2] == StopWorkers(SIGTERM), "with all of the grace period"


def test_a_spare_ends_with_the_job_and_has_nothing_to_save() -> None:
    steps = acts(PREEMPTED)
    assert [kind_of(step) for step in steps] == [RequeueJob, JobEnded]
    assert verdict_of(steps[-1]).saved is None


def test_without_workers_the_verdict_is_awaited_for_a_moment_only() -> None:
    assert acts(TOLD) == [PreemptJob(60.0, WHY), awaits(0.0)]
    verdict_of(acts(TOLD, TimerFired(Timer.VERDICT))[-1])


def test_workers_that_have_not_been_started_are_not_started_any_more() -> None:
    """The round was complete before this node could begin: it consents, and the others save."""
    for before in ([], [TOLD], [placed(0), drained(0), placed(1)]):
        of = Preempted(1 if len(before) == 3 else 0, "b (rank 1)", 60.0, True, WHY)
        status, steps = after(*before, of, STOPPED, placed(2))
        assert steps.count(Drain(of.round, needs_consent=True)) == 1
        assert status.phase is Phase.FORMING
        assert sum(isinstance(step, StartWorkers) for step in steps) == (1 if len(before) == 3 else 0)
        verdict_of(decide(status, PREEMPTED, (RULES,))[1][-1])
    assert StartWorkers not in kinds(TOLD, placed(0)), "the place and what was said have crossed"


def test_workers_that_end_with_success_have_finished_unless_they_had_acknowledged() -> None:
    assert acts(placed(0), OF_ANOTHER, WorkersSucceeded())[-1] == Succeed(0)
    assert acts(placed(0), OF_ANOTHER, WorkersReady(is_late=True), WorkersSucceeded())[-1] == Succeed(0)
    assert acts(placed(0), OF_ANOTHER, WorkersSucceeded(acknowledged=True))[-1] == CONSENT
    assert acts(placed(0), OF_ANOTHER, WorkersReady(), WorkersSucceeded(acknowledged=True))[-1] == CONSENT
    status, steps = after(placed(0), OF_ANOTHER, WorkersSucceeded(acknowledged=True), PREEMPTED, STOPPED)
    assert verdict_of(steps[-1]).saved is True
    assert status.phase is Phase.ENDED


def test_workers_that_had_finished_are_asked_nothing() -> None:
    assert acts(placed(0), WorkersSucceeded(), OF_ANOTHER)[1:] == [Succeed(0), awaits(60.0)]


def test_what_was_acknowledged_before_counts() -> None:
    steps = acts(placed(0), NodesWaiting(0, 1), WorkersReady(), OF_ANOTHER, notice=30)
    assert steps[-2:] == [awaits(60.0), CONSENT]


@pytest.mark.parametrize("event", [NodesWaiting(0, 1), DrainArrived("ann@login", 30.0), Preempted(0, "c", 5.0)])
def test_changes_of_membership_mean_nothing_any_more(event: Event) -> None:
    for notice in (0.0, 30.0):
        assert acts(placed(0), OF_ANOTHER, event, notice=notice) == acts(placed(0), OF_ANOTHER, notice=notice)


@pytest.mark.parametrize("event", [TimerFired(Timer.VERDICT), LinkLost("gone")])
def test_it_ends_so_though_the_verdict_cannot_be_told(event: Event) -> None:
    for before in ([placed(0), OF_ANOTHER], [placed(0), WorkersSucceeded(), OF_ANOTHER], [placed(0), TOLD]):
        steps = acts(*before, event, STOPPED)
        assert verdict_of(steps[-1])
        assert RequeueJob() in steps, "each may try: the scheduler takes one request"


def test_sigterm_ends_it_at_once_and_requeues_nothing() -> None:
    steps = acts(placed(0), OF_ANOTHER, TERM, STOPPED)
    assert [kind_of(step) for step in steps[3:]] == [LeaveRequest, StopWorkers, JobEnded]
    verdict_of(steps[-1])


def test_other_signals_mean_what_they_mean() -> None:
    assert acts(placed(0), OF_ANOTHER, SignalArrived(SIGUSR1))[-1] == ForwardSignal(SIGUSR1)
    assert acts(placed(0), OF_ANOTHER, SignalArrived(SIGINT), STOPPED)[-1] == left(SIGINT)


def test_a_join_that_is_refused_meanwhile_ends_so() -> None:
    verdict_of(acts(TOLD, JoinRefused(Refusal.TIMEOUT, "1 of 2"))[-1])


@settings(max_examples=examples(500))
@given(st.lists(LIVELY, max_size=15), st.lists(LIVELY, max_size=25), st.sampled_from([0.0, 30.0]))
def test_who_knows_of_it_ends_with_it(before: list[Event], later: list[Event], notice: float) -> None:
    """Whatever happens, the end is that of a preempted job, or of a verdict that was told; or a person's signal."""
    world, status, known = World(), PolicyState(notice_timeout=notice), False
    told = set()
    for event in [*before, TOLD, *later, TimerFired(Timer.VERDICT), STOPPED]:
        if not world.can_be(event):
            continue
        world.happens(event)
        known = known or NOTED in status.noted
        assert NOTED in status.noted or not known
        told.add(event)
        status, now = decide(status, event, (RULES,))
        for place, step in enumerate(now):
            world.take(step, event, now[:place])
            if known and isinstance(step, End) and isinstance(step.event, JobEnded) and step.event not in told:
                verdict_of(step)
            elif known and world.over:
                assert isinstance(step, End)
                assert isinstance(step.event, JobEnded | SignalArrived | NodeChecked)
    assert status.phase in (Phase.ENDED, Phase.LEAVING)


@settings(max_examples=examples(1000))
@given(st.lists(st.one_of(LIVELY, st.just(TOLD)), max_size=40), st.sampled_from([0.0, 30.0]), st.booleans())
def test_the_laws_of_the_policy_hold_beside_it(events: list[Event], notice: float, checks: bool) -> None:
    check_laws(events, notice, checks, [RULES])
