"""Names of a node for people: its host and group rank, never its internal name in the rendezvous."""

from __future__ import annotations

import pytest

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import (
    Drain,
    NodeId,
    NodeInfo,
    Participant,
    Preempt,
    Settings,
    State,
    join_names,
    name_of,
    names_of,
)
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import decode_state, encode_state
from rallypoint.control.protocol.errors import RendezvousStateError
from rallypoint.control.protocol.handshake import ClientHandshake, Hello
from rallypoint.control.protocol.messages import JoinRequest, NodesWaiting, Preempted, RoundEnded

SETTINGS = Settings("job", 2, 3, last_call_timeout=0.0)
A, B, C = (NodeId(f"10.77.0.{number}", 100 + number, 0, f"n{number}") for number in (1, 2, 3))
MEMBER = NodeInfo("default", 1, "", 7000)


def running(*nodes: NodeId) -> Coordinator:
    """A job whose nodes have their places; sessions count from 1."""
    coordinator = Coordinator(SETTINGS._replace(min_nodes=len(nodes)))
    for session, node in enumerate(nodes, 1):
        coordinator.open(session, SessionRecord(node, node.addr), 0.0)
        coordinator.receive(session, JoinRequest(MEMBER, 600.0), 0.0)
    coordinator.tick(0.0)
    assert coordinator.state.complete
    return coordinator


def test_a_node_is_its_host_and_rank() -> None:
    state = running(A, B).state
    assert [name_of(state, each) for each in (A, B, C)] == ["n1 (rank 0)", "n2 (rank 1)", "n3"]
    assert name_of(state, NodeId("10.77.0.9", 1, 0)) == "10.77.0.9"
    assert name_of(state, NodeId.placeholder(4)) == "the node of group rank 4"


def test_two_agents_of_one_host_are_told_apart_by_their_pids() -> None:
    twin = B._replace(host=A.host)
    state = running(A, twin).state
    assert [name_of(state, each) for each in (A, twin)] == ["n1 pid 101 (rank 0)", "n1 pid 102 (rank 1)"]


def test_who_comes_back_keeps_its_rank_in_its_name() -> None:
    state = State(
        round=1, participants={A: Participant(MEMBER, previous_rank=0), C: Participant(MEMBER)}, survivors={B: 1}
    )
    assert [name_of(state, each) for each in (A, B, C)] == ["n1 (rank 0)", "n2 (rank 1)", "n3"]


def test_many_are_a_few_and_a_number() -> None:
    nodes = [NodeId("h", number, 0, f"n{number}") for number in range(7)]
    assert join_names(names_of(State(), nodes)) == "n0, n1, n2, n3 and 3 more"
    assert join_names(names_of(State(), nodes[:4])) == "n0, n1, n2 and n3"
    assert join_names(()) == ""


@pytest.mark.parametrize(
    ("reset", "told"),
    [("its connection broke: reset", "its connection broke: reset"), ("", "")],
)
def test_the_others_hear_who_was_lost_and_how(reset: str, told: str) -> None:
    sends = running(A, B).close(2, 1.0, detail=reset).messages
    (end,) = [notice.end for _, notice in sends if isinstance(notice, RoundEnded)]
    assert (end.node, end.detail) == ("n2 (rank 1)", told)


def test_a_new_node_is_named_and_not_who_has_drained_the_round() -> None:
    coordinator = running(A, B)
    coordinator.open(3, SessionRecord(C, C.addr), 1.0)
    told = coordinator.receive(3, JoinRequest(MEMBER, 600.0), 1.0).messages
    assert {notice for _, notice in told} == {NodesWaiting(0, 1, ("n3",))}
    sends = coordinator.receive(1, Drain(0), 1.0).messages
    assert {notice.end.detail for _, notice in sends if isinstance(notice, RoundEnded)} == {"the new node n3 joins"}


def test_who_will_be_taken_away_is_named_to_the_others_alone() -> None:
    coordinator = running(A, B)
    told = coordinator.receive(2, Preempt(0, 30.0), 1.0).messages
    assert told == [(1, Preempted(0, "n2 (rank 1)", 30.0))]
    sends = coordinator.receive(1, Drain(0), 1.0).messages
    ends = [notice.end for _, notice in sends if isinstance(notice, RoundEnded)]
    assert {end.detail for end in ends} == {"n2 (rank 1) is being preempted"}
    assert {end.missing_nodes for end in ends} == {1}, "it is not there for the next round"


def test_the_name_of_a_machine_is_cut_and_cleaned_on_arrival() -> None:
    host = "\x1b[31mn3\n" + 999 * "x"
    client = ClientHandshake("job", None, b"c", SETTINGS)
    hello = codec.decode(codec.encode(client.hello("10.0.0.1\r", NodeId("10.0.0.1", 1, 0, host))), Hello)
    assert hello.address == "10.0.0.1?"
    assert hello.node.host.startswith("?[31mn3?x")
    assert len(hello.node.host) == 255


def test_a_shared_state_with_names_that_are_no_text_is_refused() -> None:
    state = State(participants={A._replace(host="n\x1b"): Participant(MEMBER)})
    with pytest.raises(RendezvousStateError, match="not text"):
        decode_state(encode_state(state))
