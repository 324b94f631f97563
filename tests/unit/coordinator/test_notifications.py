"""What a change of the state means to a node, including changes by others meanwhile."""

from __future__ import annotations

import pytest

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.notifications import (
    end_notifications,
    newly_complete,
    notification_diff,
    placements,
)
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.rules import ClockView, step
from rallypoint.control.membership.state import (
    Exit,
    NodeId,
    NodeInfo,
    Outcome,
    Participant,
    Refusal,
    Settings,
    State,
    Succeed,
    Verdict,
)
from rallypoint.control.protocol.codec import decode_state, encode_state
from rallypoint.control.protocol.messages import JobEnded, JoinRefused, NodesSucceeded, Placed, ResumeRequest

A, B, C = NodeId("a", 1, 0), NodeId("b", 1, 0), NodeId("c", 1, 0)
IN = Participant(NodeInfo("default", 1, "host", 7000))
RUNS = State(complete=True, participants={A: IN, B: IN})


def names(before: State, after: State) -> dict[str, list[str]]:
    """The kinds of what each node is told, by its address."""
    told: dict[str, list[str]] = {}
    for nodes, notification in notification_diff(before, after):
        for node in nodes:
            told.setdefault(node.addr, []).append(type(notification).__name__)
    for node in placements(after) if newly_complete(before, after) else ():
        told.setdefault(node.addr, []).append("Placed")
    return told


def stepped(operation: Exit | Succeed, state: State, node: NodeId) -> State:
    after = step(operation, state, node, ClockView(0.0), Settings("job", 1, 2))
    assert isinstance(after, State)
    return after


def test_nothing_is_due_where_nothing_has_changed() -> None:
    assert names(RUNS, RUNS) == {}


def test_the_end_of_a_round_is_told_to_who_was_in_it_and_to_who_succeeded_and_was_taken_out() -> None:
    before = RUNS._replace(succeeded=frozenset({B, C}))
    assert names(before, State(round=1, survivors={A: 0})) == {
        "a": ["RoundEnded"],
        "b": ["RoundEnded"],
        "c": ["RoundEnded"],
    }


def test_a_round_that_came_and_went_unseen_ends_for_who_waited_for_it() -> None:
    assert names(State(participants={A: IN}), State(round=1)) == {"a": ["RoundEnded"]}


def test_a_new_round_is_told_to_those_in_it_alone() -> None:
    after = State(round=1, complete=True, participants={B: IN}, wait_list={A: IN.node_info})
    assert names(RUNS, after) == {"a": ["RoundEnded"], "b": ["RoundEnded", "Placed"]}


@pytest.mark.parametrize(("late", "gone"), [(A, B), (B, A)])
def test_who_hears_late_of_its_place_has_the_ranks_that_count_who_has_succeeded_and_left(
    late: NodeId, gone: NodeId
) -> None:
    """A coordinator that takes over, or a node that reads a shared state late."""
    sizes = {A: Participant(NodeInfo("default", 2, "a", 1), 0), B: Participant(NodeInfo("default", 3, "b", 2), 1)}
    runs = State(complete=True, participants=sizes)
    after = runs
    for operation in (Succeed(0), Exit()):
        after = stepped(operation, after, gone)
    assert list(after.participants) == [late]
    read = decode_state(encode_state(after))
    placed = placements(runs)[late]
    assert placements(read) == {late: placed}
    assert newly_complete(State(participants=sizes), read)
    coordinator = Coordinator(Settings("job", 1, 2), "0")
    coordinator.restore(read, 0.0)
    coordinator.open(1, SessionRecord(late, late.addr), 0.0)
    joins = ResumeRequest("0", sizes[late].node_info, joining=True)
    told = [notice for _, notice in coordinator.receive(1, joins, 0.0).messages]
    rank = sizes[gone].rank
    assert told == [Placed(placed._replace(origin="0")), NodesSucceeded(0, ((rank, rank),))]
    assert not stepped(Exit(), read, late).finished, "the next round counts only its own"


def test_a_spare_has_no_part_in_the_end() -> None:
    done = Verdict(Outcome.SUCCEEDED)
    after = State(closed=True, verdict=done, redundancy_list={A: IN.node_info})
    for_all, for_some = end_notifications(after, done)
    told = for_some[A]
    assert isinstance(told, JoinRefused)
    assert told.refusal is Refusal.SPARE_NOT_NEEDED
    assert (for_all, list(for_some)) == (JobEnded(done), [A])
    failed = Verdict(Outcome.FAILED)
    assert end_notifications(after, failed) == (JobEnded(failed), {A: JobEnded(failed, is_spare=True)})


def test_where_workers_of_one_node_cannot_go_on_no_node_keeps_its_own() -> None:
    kept = Participant(NodeInfo("default", 1, "host", 7000))
    new = Participant(kept.node_info._replace(restarts_workers=True), 1)
    assert {each.restart_workers for each in placements(RUNS._replace(participants={A: kept, B: new})).values()} == {
        True
    }
    assert not any(each.restart_workers for each in placements(RUNS).values())


def test_who_has_succeeded_and_left_still_says_whether_its_workers_could_go_on() -> None:
    """Else a node that hears late of its place would be told otherwise than those that heard in time."""
    new = Participant(IN.node_info._replace(restarts_workers=True), 1)
    runs = RUNS._replace(participants={A: IN}, finished={B: new})
    assert placements(runs)[A].restart_workers
