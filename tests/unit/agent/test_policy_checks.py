"""The agent's reaction where the user has a check of the node: at first, and after a failure of its own."""

from __future__ import annotations

from signal import SIGINT, SIGTERM, SIGUSR1

import pytest

from rallypoint.agent.policy import Phase, PolicyState, begin, decide
from rallypoint.agent.steps import (
    CheckNode,
    DrainArrived,
    End,
    Event,
    ForwardSignal,
    KillWorkers,
    LogLine,
    NodeChecked,
    RequestJoin,
    SignalArrived,
    StartWorkers,
    Step,
    StopWorkers,
    WorkersFailed,
)
from rallypoint.control.membership.state import Fail, Reason, RoundEnd
from rallypoint.control.protocol.messages import (
    LeaveRequest,
    LinkDown,
    LinkUp,
    RoundEnded,
)
from tests.unit.agent.test_policy import CAUSE, STOPPED, ended, kind_of, placed

PASSED, UNFIT = NodeChecked(), NodeChecked("the check has failed")
BROKEN: tuple[Event, ...] = (PASSED, placed(0), WorkersFailed(CAUSE))
OTHERS = CAUSE._replace(rank=3, pid=77, host="another")


def after(*events: Event) -> tuple[PolicyState, list[Step]]:
    """Where an agent with a check stands after these events, and all its steps but lines of the log."""
    status, first = begin(PolicyState(checks_node=True))
    steps = list(first)
    for event in events:
        status, now = decide(status, event)
        steps += [each for each in now if not isinstance(each, LogLine)]
    return status, steps


def kinds(*events: Event) -> list[object]:
    return [kind_of(step) for step in after(*events)[1]]


def test_without_a_check_the_first_step_is_the_join() -> None:
    assert begin(PolicyState()) == (PolicyState(), (RequestJoin(),))


def test_a_node_that_is_not_fit_leaves() -> None:
    status, steps = after(UNFIT)
    assert status.phase is Phase.ENDED
    assert steps[1:] == [LeaveRequest(), End(UNFIT)]


def test_after_a_failure_of_its_own_the_node_is_checked_when_its_workers_are_gone() -> None:
    status, steps = after(*BROKEN, ended(0))
    assert status.phase is Phase.CHECKING
    assert [type(each) for each in steps[3:]] == [Fail, StopWorkers], "no place is requested yet"
    assert steps[-1] == StopWorkers(restarts=True, failed=True, ends_all=True), "the check may need the devices"
    assert kinds(*BROKEN, ended(0), STOPPED)[-1] is CheckNode
    assert kinds(*BROKEN, ended(0), STOPPED, PASSED, placed(1))[-2:] == [RequestJoin, StartWorkers]
    assert after(*BROKEN, ended(0), STOPPED, UNFIT)[1][-2:] == [LeaveRequest(), End(UNFIT)]


@pytest.mark.parametrize(
    "end",
    [
        RoundEnd(0, Reason.FAILURE, "another", OTHERS),
        RoundEnd(0, Reason.LOST, "another"),
        RoundEnd(0, Reason.DEPARTED, "another"),
        RoundEnd(0, Reason.REQUESTED, "ann"),
    ],
)
@pytest.mark.parametrize("before", [BROKEN[:2], BROKEN])
def test_a_round_that_ends_by_others_asks_for_no_check(end: RoundEnd, before: tuple[Event, ...]) -> None:
    status, steps = after(*before, RoundEnded(end))
    assert status.phase is Phase.FORMING
    assert [type(each) for each in steps[-2:]] == [RequestJoin, StopWorkers]
    assert kinds(*before, RoundEnded(end), STOPPED).count(CheckNode) == 1, "the one at first"


def test_a_drain_ends_the_check_too() -> None:
    assert kinds(DrainArrived("ann", 30.0))[-2:] == [LeaveRequest, StopWorkers]


def test_a_second_interrupt_kills_the_check() -> None:
    assert kinds(SignalArrived(SIGINT), SignalArrived(SIGINT))[-1] is KillWorkers
    assert kinds(SignalArrived(SIGTERM), SignalArrived(SIGTERM))[-1] is StopWorkers
    assert kinds(SignalArrived(SIGUSR1))[-1] is ForwardSignal


def test_what_happens_to_the_others_meanwhile_requests_no_place() -> None:
    checking = (*BROKEN, ended(0), STOPPED)
    for events in ((ended(1),), (LinkDown("away"), LinkUp(join_lost=True)), (ended(0),), (placed(1),)):
        assert kinds(*checking, *events) == kinds(*checking)
    status, steps = after(*checking, ended(1), PASSED, placed(2))
    assert (status.phase, status.round) == (Phase.RUNNING, 2)
    assert [type(each) for each in steps[-2:]] == [RequestJoin, StartWorkers]
    assert kinds(*checking, ended(1), PASSED, ended(1))[-1] is RequestJoin, "that one was seen"
