"""What a change of the state means to a node: also what others have done to it meanwhile."""

from __future__ import annotations

from rallypoint.coordinator.notifications import end_notification, notification_diff
from rallypoint.membership.state import NodeId, NodeInfo, Outcome, Participant, Preemption, State, Verdict
from rallypoint.protocol.messages import JobEnded, JoinRefused, Refusal

A, B, C = NodeId("a", 1, 0), NodeId("b", 1, 0), NodeId("c", 1, 0)
IN = Participant(NodeInfo("default", 1, "host", 7000))
RUNS = State(complete=True, participants={A: IN, B: IN})


def names(before: State, after: State) -> dict[str, list[str]]:
    """The kinds of what each node is told, by its address."""
    told: dict[str, list[str]] = {}
    for nodes, notification in notification_diff(before, after):
        for node in nodes:
            told.setdefault(node.addr, []).append(type(notification).__name__)
    return told


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


def test_who_runs_hears_of_those_who_wait_and_of_who_will_be_taken_away() -> None:
    assert names(RUNS, RUNS._replace(wait_list={C: IN.node_info})) == {"a": ["NodesWaiting"], "b": ["NodesWaiting"]}
    said = RUNS._replace(preempted=Preemption(A, 5.0))
    assert names(RUNS, said) == {"b": ["Preempted"]}
    assert names(said, said) == {}


def test_a_spare_has_no_part_in_the_end() -> None:
    done = Verdict(Outcome.SUCCEEDED)
    after = State(closed=True, verdict=done, redundancy_list={A: IN.node_info})
    told = end_notification(after, A, done)
    assert isinstance(told, JoinRefused)
    assert told.refusal is Refusal.SPARE_NOT_NEEDED
    assert end_notification(after, B, done) == JobEnded(done)
