"""Names of nodes for people: host and group rank, never the internal name of the rendezvous."""

from __future__ import annotations

import pytest

from rallypoint.control.membership.state import (
    NodeId,
    NodeInfo,
    Participant,
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

A, B, C = (NodeId(f"10.77.0.{number}", 100 + number, 0, f"n{number}") for number in (1, 2, 3))
MEMBER = NodeInfo("default", 1, "", 7000)


def test_names_of_nodes() -> None:
    def named(*nodes: NodeId) -> list[str]:
        places = {node: Participant(MEMBER, rank) for rank, node in enumerate(nodes)}
        return [name_of(State(complete=True, participants=places), node) for node in nodes]

    assert named(A, B) == ["n1 (rank 0)", "n2 (rank 1)"]
    assert named(A, B._replace(host=A.host)) == ["n1 pid 101 (rank 0)", "n1 pid 102 (rank 1)"]
    assert name_of(State(), C) == "n3"
    assert name_of(State(), NodeId("10.77.0.9", 1, 0)) == "10.77.0.9"
    assert name_of(State(), NodeId.placeholder(4)) == "the node of group rank 4"
    returning = Participant(MEMBER, previous_rank=0)
    state = State(round=1, participants={A: returning, C: Participant(MEMBER)}, survivors={B: 1})
    assert [name_of(state, node) for node in (A, B, C)] == ["n1 (rank 0)", "n2 (rank 1)", "n3"]


def test_long_lists_of_names_are_cut() -> None:
    nodes = [NodeId("h", number, 0, f"n{number}") for number in range(7)]
    assert join_names(names_of(State(), nodes)) == "n0, n1, n2, n3 and 3 more"
    assert join_names(names_of(State(), nodes[:4])) == "n0, n1, n2 and n3"
    assert join_names(()) == ""


def test_names_of_machines_are_cut_and_cleaned() -> None:
    host = "\x1b[31mn3\n" + 999 * "x"
    client = ClientHandshake("job", None, b"c", Settings("job", 2, 3))
    hello = codec.decode(codec.encode(client.hello("10.0.0.1\r", NodeId("10.0.0.1", 1, 0, host))), Hello)
    assert hello.address == "10.0.0.1?"
    assert hello.node.host.startswith("?[31mn3?x")
    assert len(hello.node.host) == 255


def test_a_shared_state_with_unprintable_names_is_refused() -> None:
    state = State(participants={A._replace(host="n\x1b"): Participant(MEMBER)})
    with pytest.raises(RendezvousStateError, match="not text"):
        decode_state(encode_state(state))
