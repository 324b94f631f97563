"""The agent's reactions with a check of the node: at first, and after a failure of its workers."""

from __future__ import annotations

from functools import partial
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest

from rallypoint.agent.policy import Phase, PolicyState, begin
from rallypoint.agent.steps import (
    CheckNode,
    DrainArrived,
    End,
    Event,
    ForwardSignal,
    KillWorkers,
    NodeChecked,
    RequestJoin,
    SignalArrived,
    StartWorkers,
    StopWorkers,
    WorkersFailed,
)
from rallypoint.control.membership.state import Fail, Reason, RoundEnd
from rallypoint.control.protocol.messages import LeaveRequest, LinkDown, LinkUp, RoundEnded
from tests.unit.agent import test_policy
from tests.unit.agent.test_policy import CAUSE, STOPPED, ended, placed

PASSED, UNFIT = NodeChecked(), NodeChecked("the check has failed")
BROKEN: tuple[Event, ...] = (PASSED, placed(0), WorkersFailed(CAUSE))
OTHERS = CAUSE._replace(rank=3, pid=77, host="another")
after = partial(test_policy.after, checks=True)
acts = partial(test_policy.acts, checks=True)
kinds = partial(test_policy.kinds, checks=True)


def test_the_first_step() -> None:
    assert begin(PolicyState()) == (PolicyState(), (RequestJoin(),)), "without a check"
    assert acts() == [CheckNode()]
    assert after(UNFIT)[0].phase is Phase.ENDED
    assert acts(UNFIT)[1:] == [LeaveRequest(), End(UNFIT)]


def test_a_node_is_checked_after_its_own_failure() -> None:
    steps = acts(*BROKEN, ended(0))
    assert after(*BROKEN, ended(0))[0].phase is Phase.CHECKING
    assert [type(step) for step in steps[3:]] == [Fail, StopWorkers], "no place is requested yet"
    assert steps[-1] == StopWorkers(restarts=True, failed=True, ends_all=True), "the check may need the devices"
    assert kinds(*BROKEN, ended(0), STOPPED)[-1] is CheckNode
    assert kinds(*BROKEN, ended(0), STOPPED, PASSED, placed(1))[-2:] == [RequestJoin, StartWorkers]
    assert acts(*BROKEN, ended(0), STOPPED, UNFIT)[-2:] == [LeaveRequest(), End(UNFIT)]


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
def test_failures_of_other_nodes_need_no_check(end: RoundEnd, before: tuple[Event, ...]) -> None:
    assert after(*before, RoundEnded(end))[0].phase is Phase.FORMING
    assert kinds(*before, RoundEnded(end))[-2:] == [RequestJoin, StopWorkers]
    assert kinds(*before, RoundEnded(end), STOPPED).count(CheckNode) == 1, "the one at first"


def test_drains_and_signals_during_the_check() -> None:
    assert kinds(DrainArrived("ann", 30.0))[-2:] == [LeaveRequest, StopWorkers]
    assert kinds(SignalArrived(SIGINT), SignalArrived(SIGINT))[-1] is KillWorkers
    assert kinds(SignalArrived(SIGTERM), SignalArrived(SIGTERM))[-1] is StopWorkers
    assert kinds(SignalArrived(SIGUSR1))[-1] is ForwardSignal


def test_rounds_of_others_request_no_place_during_the_check() -> None:
    checking = (*BROKEN, ended(0), STOPPED)
    for events in ((ended(1),), (LinkDown("away"), LinkUp(join_lost=True)), (ended(0),), (placed(1),)):
        assert kinds(*checking, *events) == kinds(*checking)
    status, _ = after(*checking, ended(1), PASSED, placed(2))
    assert (status.phase, status.round) == (Phase.RUNNING, 2)
    assert kinds(*checking, ended(1), PASSED, placed(2))[-2:] == [RequestJoin, StartWorkers]
    assert kinds(*checking, ended(1), PASSED, ended(1))[-1] is RequestJoin, "that one was seen"
