"""The requests that a node repeats in a new session."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.membership.state import (
    Fail,
    NodeInfo,
    NodeRanks,
    Reason,
    RoundEnd,
    Settings,
    Succeed,
    recovery_timeout,
)
from rallypoint.control.protocol.messages import (
    Confirmed,
    ConfirmRequest,
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    NextStore,
    NodesSucceeded,
    Placed,
    Placement,
    Progress,
    ResumeRequest,
    RoundEnded,
    ranks_in,
)
from rallypoint.control.protocol.resume_state import (
    ResumeState,
    after_notification,
    after_request,
    give_up_at,
    requests_to_repeat,
    without_foreign_join,
)
from tests.unit.coordinator.test_control import CAUSE

MEMBER = NodeInfo("default", 1, "h", 7000)
PLACEMENT = Placement(0, 0, 2, NodeRanks(0, 2, 0, 2), "h", 7000, 0)


def waiting(now: float = 0.0, timeout: float = 600.0) -> ResumeState:
    held = after_request(ResumeState(), JoinRequest(MEMBER, timeout), now)
    return held._replace(opened="a")


def timeouts(held: ResumeState, now: float) -> list[float]:
    return [request.timeout for request in requests_to_repeat(held, now) if isinstance(request, JoinRequest)]


def progress(*, spare: bool) -> Progress:
    return Progress(0, True, 2, 1, 2, (), spare)


@pytest.mark.parametrize(("now", "left"), [(100.0, 500.0), (700.0, 0.0)])
def test_a_repeated_join_keeps_its_deadline(now: float, left: float) -> None:
    assert timeouts(waiting(), now) == [left]
    assert timeouts(after_notification(waiting(), progress(spare=False), 0.0), now) == [left]
    assert timeouts(waiting(timeout=math.inf), now) == [math.inf]
    (_, again) = requests_to_repeat(waiting(), 100.0)
    assert isinstance(again, JoinRequest)
    assert (again.timeout, again.waited) == (500.0, 100.0)
    held = after_request(ResumeState(), again, 200.0)  # by another agent's link
    assert [request.waited for request in requests_to_repeat(held, 250.0) if isinstance(request, JoinRequest)] == [
        150.0
    ]


def test_spares_wait_without_a_deadline() -> None:
    assert timeouts(after_notification(waiting(), progress(spare=True), 0.0), 7_000.0) == [600.0]


def test_another_coordinator_gets_neither_the_join_nor_the_next_store() -> None:
    joins = waiting()
    runs = after_request(after_notification(joins, Placed(PLACEMENT), 5.0), NextStore(0, 7100), 6.0)
    for held in (joins, runs):
        assert without_foreign_join(held, "a") == held
    assert without_foreign_join(joins, "b").join is None
    assert requests_to_repeat(without_foreign_join(runs, "b"), 6.0)[1:] == []


def test_keeping_a_place_is_a_join_with_the_next_store() -> None:
    held = after_request(after_notification(waiting(), Placed(PLACEMENT), 5.0), NextStore(0, 7100), 6.0)
    assert requests_to_repeat(held, 6.0)[1:] == [NextStore(0, 7100)]
    held = after_notification(held, RoundEnded(RoundEnd(0, Reason.FAILURE, "h"), keeps_place=True), 100.0)
    own = MEMBER._replace(store_port=7100)
    resumed, join = requests_to_repeat(held, 200.0)
    assert isinstance(resumed, ResumeRequest)
    assert (resumed.joining, resumed.round_over, resumed.node_info.store_port) == (True, True, 7100)
    assert join == JoinRequest(own, timeout=500.0, waited=100.0)
    placed = after_notification(held, Placed(PLACEMENT._replace(round=1)), 200.0)
    assert not placed.needs_coordinator
    assert requests_to_repeat(placed, 200.0)[1:] == []


def test_a_pending_confirmation_needs_the_coordinator() -> None:
    """No worker runs meanwhile. Without a deadline the agent would wait forever for a lost control plane."""
    held = after_request(ResumeState(), ConfirmRequest(1), 0.0)
    assert requests_to_repeat(held, 0.0) == [ConfirmRequest(1)]
    assert give_up_at(held, 10.0, Settings("job", 1, 2, join_timeout=600.0)) == 610.0
    newer = after_request(held, ConfirmRequest(2), 0.0)
    assert requests_to_repeat(after_notification(newer, Confirmed(1), 0.0), 0.0) == [ConfirmRequest(2)]
    for answer in (Confirmed(2), RoundEnded(RoundEnd(0, Reason.LOST, "h"))):
        told = after_notification(newer._replace(placement=PLACEMENT), answer, 0.0)
        assert give_up_at(told, 10.0, Settings("job", 1, 2, join_timeout=600.0)) == math.inf
        assert ConfirmRequest(2) not in requests_to_repeat(told, 0.0)


def test_a_confirmation_drops_only_its_request() -> None:
    """As tuples, `Succeed(2)` and `ConfirmRequest(2)` are equal."""
    held = after_request(ResumeState(placement=PLACEMENT._replace(round=2)), Succeed(2), 0.0)
    held = after_notification(after_request(held, ConfirmRequest(2), 0.0), Confirmed(2), 0.0)
    assert [type(each) for each in held.repeated_requests] == [Succeed]


def test_a_coordinator_counts_as_met_once_it_has_answered() -> None:
    """The first requests of its session may have been lost."""
    held = after_notification(waiting(), Heartbeat(), 0.0)
    held = without_foreign_join(held, "b")._replace(opened="b")
    assert requests_to_repeat(held, 0.0)[0] == ResumeRequest("a", MEMBER)
    assert requests_to_repeat(after_notification(held, Heartbeat(), 0.0), 0.0)[0] == ResumeRequest("b", MEMBER)
    assert requests_to_repeat(waiting(), 0.0)[0] == ResumeRequest("a", MEMBER, joining=True)


@pytest.mark.parametrize("done", [False, True])
def test_leaving_is_repeated_to_the_next_coordinator(done: bool) -> None:
    held = after_notification(waiting(), Placed(PLACEMENT), 5.0)
    held = after_request(held, Succeed(0) if done else Fail(0, CAUSE, 3), 6.0)
    held = after_request(held, LeaveRequest(why="drained by ann"), 7.0)
    resumed, *again = requests_to_repeat(held, 8.0)
    assert isinstance(resumed, ResumeRequest)
    assert (resumed.round, resumed.round_over, resumed.joining) == (0, False, False)
    assert again == [*([Succeed(0)] if done else []), LeaveRequest(why="drained by ann")]
    assert not after_request(held, JoinRequest(MEMBER, 600.0), 9.0).leave


SETTINGS = Settings("job", 1, 4, join_timeout=600.0)


@pytest.mark.parametrize(
    ("known", "own", "until"),
    [
        (((1, 3),), True, 10.0),  # all have succeeded: the verdict is certain
        (((0, 3),), True, 10.0),
        (((1, 2),), True, 610.0),  # of the node of rank 3 nothing is known, and it hosted the coordinator
        (((3, 3),), True, 10.0 + recovery_timeout(SETTINGS)),  # the host is done: another comes soon or never
        (((1, 3),), False, math.inf),  # its own workers run
    ],
)
def test_the_wait_for_a_coordinator_depends_on_finished_nodes(
    known: tuple[tuple[int, int], ...], own: bool, until: float
) -> None:
    place = PLACEMENT._replace(round=2, group_rank=0, group_world_size=4, control_rank=3)
    held = after_notification(waiting(), Placed(place), 5.0)
    held = after_notification(held, NodesSucceeded(1, ((0, 3),)), 6.0)
    assert held.succeeded == (), "of an earlier round"
    held = after_notification(held, NodesSucceeded(2, known), 6.0)
    if own:
        held = after_request(held, Succeed(2), 7.0)
    assert give_up_at(held, 10.0, SETTINGS) == until
    assert held.all_succeeded is (until == 10.0)
    (resumed, *_) = requests_to_repeat(held, 10.0)
    assert isinstance(resumed, ResumeRequest)
    assert resumed.succeeded == known
    over = after_notification(held, RoundEnded(RoundEnd(2, Reason.LOST, "h")), 11.0)
    assert (over.succeeded, over.all_succeeded) == ((), False)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(0, 12))
def test_foreign_ranges_are_bounded(ranges: list[tuple[int, int]], size: int) -> None:
    found = list(ranks_in(ranges, size))
    assert len(found) == len(set(found)) <= size
    assert set(found) <= {rank for first, last in ranges for rank in range(first, last + 1)} & set(range(size))
    if ranges == sorted(ranges):
        assert set(found) == {rank for first, last in ranges for rank in range(first, last + 1)} & set(range(size))
