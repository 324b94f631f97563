"""Who may connect to a round's store: the nodes' addresses, the coordinator's use of them, the host's checks."""

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
    """What is told when the last of so many nodes joins, who tell these addresses and are seen at those."""
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
    """What the host of the store is told of that, before its place; nobody else is told any of it."""
    found = [(session, notice) for session, notice in told if isinstance(notice, StorePeers | Placed)]
    (host,) = [session for session, each in found if isinstance(each, Placed) and each.placement.group_rank == 0]
    kinds = [type(notice) for session, notice in found if session == host]
    assert kinds == [StorePeers] * (len(kinds) - 1) + [Placed]
    assert {session for session, notice in found if isinstance(notice, StorePeers)} <= {host}
    return [notice for _, notice in found if isinstance(notice, StorePeers)]


def test_the_host_is_told_all_addresses_of_all_members() -> None:
    (told,) = peers(round_of(("10.0.0.1",), ("10.0.0.2", "192.168.0.2")))
    assert (set(told.addresses), told.reason_unrestricted) == ({"10.0.0.1", "10.0.0.2", "192.168.0.2"}, "")
    found, warning = peers_of(MEMBERS, [told], OWN, "10.0.0.1")
    assert found is not None
    assert {*told.addresses, *OWN, "127.0.0.0/8", "::1"} == set(found)
    assert not warning


def test_where_nobody_tells_any_nothing_is_sent_and_all_may() -> None:
    assert peers(round_of(None, None)) == []
    assert peers_of(MEMBERS, [], OWN, "10.0.0.1") == (None, "")


def test_where_a_backend_tells_none_who_insists_on_members_hears_that_it_is_in_vain() -> None:
    found, warning = peers_of(parse_policy("members"), [], OWN, "10.0.0.1")
    assert found is None
    assert "any address, because this backend does not report the members' addresses; set --store-peers" in warning
    found, warning = peers_of(parse_policy("members,10.0.0.0/8"), [], OWN, "10.0.0.1")
    assert found == ["127.0.0.0/8", "::1", *OWN, "10.0.0.0/8"]
    assert "might refuse workers, because this backend does not report the members' addresses" in warning


def test_many_addresses_are_told_in_parts_that_fit_their_frames() -> None:
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
def test_where_addresses_are_in_doubt_all_may_and_a_line_says_why(case: str) -> None:
    sends, why = DOUBTS[case]
    told = peers(sends)
    assert [each.reason_unrestricted for each in told] == [why]
    found, warning = peers_of(MEMBERS, told, OWN, "10.0.0.1")
    assert found is None
    assert warning.startswith(
        f"the worker store accepts connections from any address, because {why}; set --store-peers"
    )
    strict, warning = peers_of(parse_policy("members"), told, OWN, "10.0.0.1")
    assert strict is not None
    assert warning.startswith(f"the worker store might refuse workers, because {why}; add the networks")


def test_who_insists_on_members_has_the_addresses_as_they_are_seen_too() -> None:
    found, _ = peers_of(parse_policy("members"), peers(DOUBTS["translated"][0]), OWN, "10.0.0.1")
    assert found is not None
    assert "203.0.113.7" in found


def test_a_node_that_cannot_list_its_own_addresses_lets_all_in() -> None:
    found, warning = peers_of(MEMBERS, peers(round_of((), ())), None, "10.0.0.1")
    assert found is None
    assert "this machine's own addresses cannot be listed" in warning


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
def test_what_users_write(text: str, policy: PeerPolicy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize("text", ["everybody", "any,10.0.0.0/8", "10.0.0.0/33", "n1", "members,,any"])
def test_what_users_cannot_write(text: str) -> None:
    with pytest.raises(UsageError, match=r"is neither an address nor a network; .* or use members, or any alone"):
        parse_policy(text)


def test_only_networks_are_only_networks_and_any_is_any() -> None:
    told = peers(round_of((), ()))
    found, _ = peers_of(parse_policy("10.9.0.0/16"), told, OWN, "10.0.0.1")
    assert found is not None
    assert "10.0.0.2" not in found
    assert {"10.9.0.0/16", *OWN} < set(found)
    assert peers_of(parse_policy("any"), told, OWN, "10.0.0.1") == (None, "")


def test_where_the_store_is_known_by_an_address_of_one_link_all_of_that_link_may() -> None:
    told = peers(round_of((), ()))
    assert "fe80::/10" in (peers_of(MEMBERS, told, OWN, "fe80::1%eth0")[0] or ())
    assert "fe80::/10" not in (peers_of(MEMBERS, told, OWN, "10.0.0.1")[0] or ())


def test_what_a_node_calls_its_address_is_told_only_if_it_is_one() -> None:
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
def test_what_is_no_address_is_refused_on_arrival(text: str) -> None:
    asked = JoinRequest(NodeInfo("default", 1, "", 7), 60.0, addresses=(text,))
    with pytest.raises(codec.CodecError, match="among its addresses"):
        codec.decode_request(codec.encode(asked))


def test_what_only_looks_like_an_address_lets_nobody_in() -> None:
    found, _ = peers_of(MEMBERS, peers(round_of((), ("10.0.0.2", "999.1.1.1", "::::", "10.0.0.0/99"))), OWN, "10.0.0.1")
    assert found is not None
    assert networks(found)
    assert not {"999.1.1.1", "::::", "10.0.0.0/99"} & set(found)


def test_more_addresses_than_a_store_can_be_told_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_peers, "_MAX_ADDRESSES", 3)
    assert len(peers(round_of(("10.0.0.1",), ("10.0.0.2", "192.168.0.2")))[0].addresses) == 3
    (told,) = peers(round_of(("10.0.0.1",), ("10.0.0.2", "192.168.0.2", "192.168.0.3")))
    assert told.addresses == ()
    found, warning = peers_of(MEMBERS, [told], OWN, "10.0.0.1")
    assert found is None
    assert "because its members have 4 addresses, more than the 3 that a store accepts" in warning
