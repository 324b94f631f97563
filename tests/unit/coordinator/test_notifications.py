"""The notifications that follow from a change of the state."""

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
    """The kinds of notifications, by the node's address."""
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


ENDS, PLACES = "RoundEnded", "Placed"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (RUNS, RUNS, {}),
        (
            RUNS._replace(succeeded=frozenset({B, C})),
            State(round=1, survivors={A: 0}),
            {"a": [ENDS], "b": [ENDS], "c": [ENDS]},
        ),
        (State(participants={A: IN}), State(round=1), {"a": [ENDS]}),
        (
            RUNS,
            State(round=1, complete=True, participants={B: IN}, wait_list={A: IN.node_info}),
            {"a": [ENDS], "b": [ENDS, PLACES]},
        ),
    ],
    ids=["no change", "the end, also for a removed node that succeeded", "a round that came and went", "a new round"],
)
def test_nodes_are_notified_of_changes(before: State, after: State, told: dict[str, list[str]]) -> None:
    assert names(before, after) == told


@pytest.mark.parametrize(("late", "gone"), [(A, B), (B, A)])
def test_late_placements_count_finished_nodes(late: NodeId, gone: NodeId) -> None:
    """From a new coordinator, or from a shared state read late."""
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
    assert not stepped(Exit(), read, late).finished, "the next round does not count them"


def test_spares_are_refused_or_fail_with_the_job() -> None:
    done = Verdict(Outcome.SUCCEEDED)
    after = State(closed=True, verdict=done, redundancy_list={A: IN.node_info})
    for_all, for_some = end_notifications(after, done)
    told = for_some[A]
    assert isinstance(told, JoinRefused)
    assert told.refusal is Refusal.SPARE_NOT_NEEDED
    assert (for_all, list(for_some)) == (JobEnded(done), [A])
    failed = Verdict(Outcome.FAILED)
    assert end_notifications(after, failed) == (JobEnded(failed), {A: JobEnded(failed, is_spare=True)})


def test_workers_are_kept_only_if_those_of_all_nodes_can_continue() -> None:
    new = Participant(IN.node_info._replace(restarts_workers=True), 1)
    one_new = placements(RUNS._replace(participants={A: IN, B: new}))
    assert [placement.restart_workers for placement in one_new.values()] == [True, True]
    assert not any(placement.restart_workers for placement in placements(RUNS).values())
    # Also those of a node that has finished and left: a node that hears late of its place must hear the same.
    assert placements(RUNS._replace(participants={A: IN}, finished={B: new}))[A].restart_workers
