"""The address by which other machines know us."""

from __future__ import annotations

from rallypoint.control.coordinator.sessions import Liveness, SessionRecord, SessionRegistry
from rallypoint.control.membership.state import NodeId


def opened(sessions: SessionRegistry, number: int, address: str, server_address: str) -> SessionRecord:
    session = SessionRecord(NodeId(address, 1, 0), address, server_address)
    sessions.open(number, session, 0.0)
    return session


def test_the_external_address_comes_from_other_machines() -> None:
    known = SessionRegistry(Liveness(3.0, 60.0))
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
