"""Who speaks for whom, and what the nodes of other machines call us."""

from __future__ import annotations

from rallypoint.control.coordinator.sessions import SessionRecord, SessionRegistry
from rallypoint.control.membership.liveness import Liveness
from rallypoint.control.membership.state import NodeId


def opened(sessions: SessionRegistry, number: int, address: str, server_address: str) -> NodeId:
    session = SessionRecord(NodeId(address, 1, 0), address, server_address)
    sessions.open(number, session, 0.0)
    return session.node


def resume(known: SessionRegistry, number: int, name: NodeId) -> int | None:
    session = known.get(number)
    assert session is not None
    return known.resume(session, name)


def sessions() -> SessionRegistry:
    return SessionRegistry(Liveness(3.0, 60.0))


def test_only_nodes_of_other_machines_tell_what_we_are_called_outside() -> None:
    known = sessions()
    opened(known, 1, "127.0.0.1", "127.0.0.1")
    opened(known, 2, "10.0.0.2", "")
    assert known.own_external_address == ""
    opened(known, 3, "10.0.0.3", "10.0.0.254")
    opened(known, 4, "10.1.0.4", "10.1.0.254")
    assert known.own_external_address == "10.0.0.254"
    known.close(3)
    assert known.own_external_address == "10.1.0.254"
    known.close(4)
    assert known.own_external_address == ""


def test_a_name_that_was_claimed_is_found_by_what_its_node_was_called_since() -> None:
    known = sessions()
    first = opened(known, 1, "10.0.0.1", "a")
    second = opened(known, 2, "10.0.0.1", "a")
    assert resume(known, 2, first) == 1
    third = opened(known, 3, "10.0.0.1", "a")
    assert resume(known, 3, second) == 2
    assert known.session_of(first) == 3
    assert len({first, second, third}) == 3


def test_what_is_forgotten_is_no_name_any_more_and_others_stay() -> None:
    known = sessions()
    first, other = opened(known, 1, "10.0.0.1", "a"), opened(known, 2, "10.0.0.2", "a")
    again, beside = opened(known, 3, "10.0.0.1", "a"), opened(known, 4, "10.0.0.2", "a")
    resume(known, 3, first)
    resume(known, 4, other)
    known.close(3)
    known.forget(first)
    opened(known, 5, "10.0.0.1", "a")
    opened(known, 6, "10.0.0.2", "a")
    assert resume(known, 5, again) is None
    assert (known.session_of(first), known.session_of(again)) == (None, 5)
    assert resume(known, 6, beside) == 4
    assert known.session_of(other) == 6


def test_a_name_that_was_claimed_before_it_was_given_is_given_to_nobody_else() -> None:
    known = sessions()
    opened(known, 1, "10.0.0.9", "a")
    wanted = NodeId("10.0.0.2", 1, 0)
    resume(known, 1, wanted)
    assert opened(known, 2, "10.0.0.2", "a") != wanted
    assert known.session_of(wanted) == 1
    known.close(1)
    assert known.session_of(wanted) is None
    assert known.get(2) is not None


def test_a_session_claims_one_name_and_no_more() -> None:
    """Else somebody could fill the memory with names."""
    known = sessions()
    opened(known, 1, "a", "")
    resume(known, 1, NodeId("b", 2, 0))
    resume(known, 1, NodeId("c", 3, 0))
    assert known.session_of(NodeId("b", 2, 0)) == 1
    assert known.session_of(NodeId("c", 3, 0)) is None


def test_a_name_that_another_coordinator_gave_is_known_until_its_node_is_forgotten() -> None:
    known = sessions()
    name, elsewhere = opened(known, 1, "10.0.0.1", "a"), NodeId("10.0.0.1", 1, 9)
    session = known.get(1)
    assert session is not None
    assert known.name_of("other", elsewhere) is None
    known.reported(session, "other", elsewhere)
    assert known.name_of("other", elsewhere) == name
    assert known.name_of("another", elsewhere) is None
    for number in range(1_000):
        known.reported(session, str(number), elsewhere)
    assert sum(known.name_of(str(number), elsewhere) is not None for number in range(1_000)) < 100
    known.forget(name)
    assert known.name_of("other", elsewhere) is None
