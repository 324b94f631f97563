"""What a node is told when it looks again: also what others have done to it meanwhile."""

from __future__ import annotations

from rallypoint.coordinator.notification_diff import notification_diff
from rallypoint.membership.state import NodeId, NodeInfo, Outcome, Participant, State, Verdict
from rallypoint.protocol.messages import JobEnded, JoinRefused, Refusal

A, B = NodeId("a", 1, 0), NodeId("b", 1, 0)
IN = Participant(NodeInfo("default", 1, "host", 7000))
DONE = Verdict(Outcome.SUCCEEDED)


def test_who_was_taken_out_after_succeeding_still_hears_the_verdict() -> None:
    before = State(complete=True, participants={B: IN}, succeeded=frozenset({A}))
    after = before._replace(closed=True, verdict=DONE, succeeded=frozenset({A, B}))
    assert [type(each) for each in notification_diff(before, after, A, joined=True)] == [JobEnded]


def test_who_was_never_in_is_not_concerned() -> None:
    assert notification_diff(State(), State(closed=True, verdict=DONE), A, joined=False) == []


def test_a_spare_has_no_part_in_the_end() -> None:
    after = State(closed=True, verdict=DONE, redundancy_list={A: IN.node_info})
    (told,) = notification_diff(State(), after, A, joined=True)
    assert isinstance(told, JoinRefused)
    assert told.refusal is Refusal.SPARE_NOT_NEEDED
