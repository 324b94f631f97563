"""Peers of a worker store: the nodes' addresses, the coordinator's use of them, and the host's checks."""

from __future__ import annotations

import pytest

from rallypoint.base.errors import UsageError
from rallypoint.control.coordinator import store_peers
from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.coordinator.store_peers import PeerPolicy, parse_policy, peers_of
from rallypoint.control.membership.state import NodeId, NodeInfo, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.messages import JoinRequest, Placed, StorePeers
from rallypoint.store.transport import networks

MEMBERS = PeerPolicy()
OWN = ("10.0.0.1", "192.168.0.1")


def node(number: int) -> NodeId:
    return NodeId(f"10.0.0.{number}", number, 0, f"n{number}")


def round_of(*addresses: tuple[str, ...] | None, seen: tuple[str, ...] = ()) -> list[OutgoingMessage]:
    """The messages when the last node joins. The nodes report `addresses` and are seen at `seen`."""
    coordinator = Coordinator(Settings("job", len(addresses), len(addresses)))
    told: list[OutgoingMessage] = []
    for number, each in enumerate(addresses, 1):
        address = f"10.0.0.{number}"
        shown = seen[number - 1] if seen else address
        coordinator.open(number, SessionRecord(node(number), address, observed_address=shown), 0.0)
        told = coordinator.receive(
            number, JoinRequest(NodeInfo("default", 1, "", 7), 60.0, addresses=each), 0.0
        ).messages
    return told


def peers(told: list[OutgoingMessage]) -> list[StorePeers]:
    """The addresses sent to the store's host, before its place; nobody else gets them."""
    found = [(session, notice) for session, notice in told if isinstance(notice, StorePeers | Placed)]
    (host,) = [session for session, each in found if isinstance(each, Placed) and each.placement.group_rank == 0]
    kinds = [type(notice) for session, notice in found if session == host]
    assert kinds == [StorePeers] * (len(kinds) - 1) + [Placed]
    assert {session for session, notice in found if isinstance(notice, StorePeers)} <= {host}
    return [notice for _, notice in found if isinstance(notice, StorePeers)]


def test_the_host_learns_all_valid_addresses_of_all_members() -> None:
    (told,) = peers(round_of(("10.0.0.1",), ("10.0.0.2", "192.168.0.2", "999.1.1.1", "::::", "10.0.0.0/99")))
    assert told.reason_unrestricted == ""
    found, warning = peers_of(MEMBERS, [told], OWN, "10.0.0.1")
    assert found is not None
    assert networks(found)
    assert set(found) == {"10.0.0.1", "10.0.0.2", "192.168.0.2", *OWN, "127.0.0.0/8", "::1"}
    assert not warning


def test_without_addresses_all_peers_are_admitted() -> None:
    assert peers(round_of(None, None)) == []
    assert peers_of(MEMBERS, [], OWN, "10.0.0.1") == (None, "")
    found, warning = peers_of(parse_policy("members"), [], OWN, "10.0.0.1")
    assert found is None
    assert "any address, because this backend does not report the members' addresses; set --store-peers" in warning
    found, warning = peers_of(parse_policy("members,10.0.0.0/8"), [], OWN, "10.0.0.1")
    assert found == ["127.0.0.0/8", "::1", *OWN, "10.0.0.0/8"]
    assert "might refuse workers, because this backend does not report the members' addresses" in warning


def test_many_addresses_are_sent_in_parts() -> None:
    many = tuple(f"2001:db8:1111:2222:3333:4444:{number:04x}:5555/64" for number in range(1000))
    told = peers(round_of(many, tuple(each.replace("1111", "2222") for each in many), ("10.0.0.3",)))
    assert [each.is_first_part for each in told] == [True, False, False]
    assert len({address for each in told for address in each.addresses}) == 2003
    assert [codec.decode_notification(codec.encode(each)) for each in told] == told
    assert max(len(codec.encode(each)) for each in told) < 60 * 1024
    found, _ = peers_of(MEMBERS, told, OWN, "10.0.0.1")
    assert found is not None
    assert set(many) < set(found)


DOUBTS = {
    "unknown": (round_of(("10.0.0.1",), None), "the addresses of n2 (rank 1) are not known"),
    "translated": (
        round_of((), (), seen=("10.0.0.1", "203.0.113.7")),
        "n2 (rank 1) has the address 10.0.0.2 and is seen as 203.0.113.7, so addresses are translated",
    ),
    "translated host": (
        round_of((), (), seen=("203.0.113.7", "10.0.0.2")),
        "n1 (rank 0) has the address 10.0.0.1 and is seen as 203.0.113.7, so addresses are translated",
    ),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_doubtful_addresses_admit_all_peers_with_a_warning(case: str) -> None:
    messages, why = DOUBTS[case]
    told = peers(messages)
    assert [notice.reason_unrestricted for notice in told] == [why]
    found, warning = peers_of(MEMBERS, told, OWN, "10.0.0.1")
    assert found is None
    assert warning.startswith(
        f"the worker store accepts connections from any address, because {why}; set --store-peers"
    )
    strict, warning = peers_of(parse_policy("members"), told, OWN, "10.0.0.1")
    assert strict is not None
    assert case != "translated" or "203.0.113.7" in strict
    assert warning.startswith(f"the worker store might refuse workers, because {why}; add the networks")


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", PeerPolicy()),
        ("members", PeerPolicy(explicit=True)),
        ("any", PeerPolicy(members=False, explicit=True)),
        ("10.0.0.0/8, fd00::/8", PeerPolicy(False, ("10.0.0.0/8", "fd00::/8"), explicit=True)),
        ("members,10.9.9.9", PeerPolicy(True, ("10.9.9.9",), explicit=True)),
    ],
)
def test_policies(text: str, policy: PeerPolicy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize("text", ["everybody", "any,10.0.0.0/8", "10.0.0.0/33", "n1", "members,,any"])
def test_invalid_policies(text: str) -> None:
    with pytest.raises(UsageError, match=r"is neither an address nor a network; .* or use members, or any alone"):
        parse_policy(text)


def test_policies_and_own_addresses_decide_on_peers() -> None:
    told = peers(round_of((), ()))
    found, _ = peers_of(parse_policy("10.9.0.0/16"), told, OWN, "10.0.0.1")
    assert found is not None
    assert "10.0.0.2" not in found
    assert {"10.9.0.0/16", *OWN} < set(found)
    assert peers_of(parse_policy("any"), told, OWN, "10.0.0.1") == (None, "")
    found, warning = peers_of(MEMBERS, told, None, "10.0.0.1")
    assert found is None
    assert "this machine's own addresses cannot be listed" in warning
    # A store with a link-local address is open to its link.
    assert "fe80::/10" in (peers_of(MEMBERS, told, OWN, "fe80::1%eth0")[0] or ())
    assert "fe80::/10" not in (peers_of(MEMBERS, told, OWN, "10.0.0.1")[0] or ())


def test_a_claimed_address_is_passed_on_only_if_valid() -> None:
    coordinator = Coordinator(Settings("job", 2, 2))
    coordinator.open(1, SessionRecord(node(1), "fe80::1%eth0", observed_address="fe80::1%eth1"), 0.0)
    coordinator.open(2, SessionRecord(node(2), "no address", observed_address="10.0.0.2"), 0.0)
    for number in (1, 2):
        sends = coordinator.receive(
            number, JoinRequest(NodeInfo("default", 1, "", 7), 60.0, addresses=()), 0.0
        ).messages
    (told,) = peers(sends)
    assert set(told.addresses) == {"fe80::1", "10.0.0.2"}
    assert "has the address no address and is seen as 10.0.0.2" in told.reason_unrestricted
    assert codec.decode_notification(codec.encode(told)) == told


@pytest.mark.parametrize("text", ["n1", "10.0.0.1\n", "x" * 200, ""])
def test_invalid_addresses_are_refused_on_receipt(text: str) -> None:
    asked = JoinRequest(NodeInfo("default", 1, "", 7), 60.0, addresses=(text,))
    with pytest.raises(codec.CodecError, match="among its addresses"):
        codec.decode_request(codec.encode(asked))


def test_too_many_addresses_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_peers, "_MAX_ADDRESSES", 3)
    assert len(peers(round_of(("10.0.0.1",), ("10.0.0.2", "192.168.0.2")))[0].addresses) == 3
    (told,) = peers(round_of(("10.0.0.1",), ("10.0.0.2", "192.168.0.2", "192.168.0.3")))
    assert told.addresses == ()
    found, warning = peers_of(MEMBERS, [told], OWN, "10.0.0.1")
    assert found is None
    assert "because its members have 4 addresses, more than the 3 that a store accepts" in warning
