"""Which session speaks for which node, and the names that nodes of other machines give us."""

from __future__ import annotations

from rallypoint.control.coordinator.sessions import Liveness, SessionRecord, SessionRegistry, SessionState
from rallypoint.control.membership.state import NodeId


def opened(sessions: SessionRegistry, number: int, address: str, server_address: str) -> SessionRecord:
    session = SessionRecord(NodeId(address, 1, 0), address, server_address)
    sessions.open(number, session, 0.0)
    return session


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


def test_a_session_replaces_the_earlier_ones_of_its_node_when_it_speaks() -> None:
    known = sessions()
    first, second, third = (opened(known, number, "10.0.0.1", "a") for number in (1, 2, 3))
    other = opened(known, 4, "10.0.0.2", "a")
    assert known.find(first.node) is first
    assert known.replace_earlier(second) == (1,)
    assert known.find(first.node) is second
    assert known.replace_earlier(third) == (2,)
    assert known.replace_earlier(third) == known.replace_earlier(other) == ()
    assert list(known) == [third, other]


def test_a_node_is_gone_with_its_last_session_in_whatever_order_they_end() -> None:
    known = sessions()
    first, second = opened(known, 1, "10.0.0.1", "a"), opened(known, 2, "10.0.0.1", "a")
    assert known.close(1) is None
    assert known.find(first.node) is second
    assert known.close(2) == first.node
    assert known.close(2) is None
    assert first.node not in known


def test_who_has_yet_to_say_what_it_holds_cannot_be_told_anything() -> None:
    known = sessions()
    session = opened(known, 1, "10.0.0.1", "a")
    session.state = SessionState.RESUMING
    assert session.node not in known
    session.state = SessionState.OPEN
    assert session.node in known
