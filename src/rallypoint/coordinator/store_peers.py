"""Who may connect to the worker store of a round: its members, as far as their addresses are known (decision 28). Pure.

Every node tells the addresses of its interfaces when it joins; the coordinator sees from where its session comes. The
host of the store is told all of them before it is told its place. Laws:

1. Nobody is refused by a guess: where an address is not known for sure, and nobody has asked for more, all may connect,
   and people are told why.
2. The host's own machine may always connect.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.endpoint import is_loopback
from rallypoint.base.errors import UsageError, UserError
from rallypoint.membership.state import NodeId, State, name_of
from rallypoint.protocol.messages import StorePeers
from rallypoint.store.guard import network

if TYPE_CHECKING:
    from rallypoint.coordinator.session_registry import SessionRecord, SessionRegistry

_LOOPBACK = ("127.0.0.0/8", "::1")
_LINK_LOCAL = "fe80::/10"
_PART = 1000
"""Addresses in one message."""


class PeerPolicy(NamedTuple):
    """What `--store-peers` says: whether members may connect, which networks may, and whether it was given at all.

    Without either, all may.
    """

    members: bool = True
    networks: tuple[str, ...] = ()
    explicit: bool = False


def parse_policy(text: str) -> PeerPolicy:
    """Read `members`, `any`, or addresses and networks with commas between, `members` among them or not.

    Args:
        text: what the user gave; empty for the default.

    Raises:
        UsageError: a part is none of these.
    """
    if not text:
        return PeerPolicy()
    parts = [part.strip() for part in text.split(",")]
    if parts == ["any"]:
        return PeerPolicy(members=False, explicit=True)
    networks = tuple(part for part in parts if part != "members")
    for each in networks:
        try:
            network(each)
        except UserError as error:
            raise UsageError(f"{error}; or members, or any alone") from None
    return PeerPolicy("members" in parts, networks, explicit=True)


def peers_notification(state: State, sessions: SessionRegistry) -> list[StorePeers]:
    """What the host of the store of a complete round is told; nothing where no member has said anything."""
    found: dict[str, None] = {}
    doubt, some = "", False
    for node, participant in state.participants.items():
        number = sessions.session_of(node)
        session = None if number is None else sessions.get(number)
        if session is not None:
            some = some or session.addresses is not None
            shown = (each.partition("%")[0] for each in (session.address, session.observed_address))
            found |= dict.fromkeys((*(session.addresses or ()), *filter(_is_network, shown)))
        doubt = doubt or _doubt(state, node, session, is_host=participant.rank == 0)
    if not some:
        return []
    addresses = [each for each in found if not is_loopback(each)]
    starts = range(0, max(1, len(addresses)), _PART)
    return [
        StorePeers(tuple(addresses[at : at + _PART]), is_first_part=at == 0, reason_unrestricted=doubt) for at in starts
    ]


def _doubt(state: State, node: NodeId, session: SessionRecord | None, *, is_host: bool) -> str:
    """Why the addresses of a member may be others than those that it has told; empty if they are not."""
    if session is None or (session.addresses is None and not is_host):
        return f"the addresses of {name_of(state, node)} are not known"
    seen, own = (each.partition("%")[0] for each in (session.observed_address, session.address))
    if seen and seen != own:
        return f"{name_of(state, node)} has the address {own} and is seen as {seen}, so addresses are translated"
    return ""


def _is_network(text: str) -> bool:
    try:
        network(text)
    except UserError:
        return False
    return True


def peers_of(
    policy: PeerPolicy, told: Sequence[StorePeers], own: Sequence[str] | None, address: str
) -> tuple[list[str] | None, str]:
    """Who may connect, None for all; and a warning, if people should hear of it.

    Args:
        policy: of this node, where the store is.
        told: what the coordinator has told; nothing where it does not know.
        own: addresses of this machine; None if they are not known.
        address: by which the workers know the store.
    """
    if not policy.members and not policy.networks:
        return None, ""
    doubt = next((each.reason_unrestricted for each in told if each.reason_unrestricted), "")
    doubt = doubt or ("" if told else "this backend does not tell the members' addresses")
    doubt = doubt or ("" if own is not None else "this machine's own addresses cannot be listed")
    in_vain = not told and not policy.networks  # with these alone, no other member's worker would be let in
    if policy.members and doubt and (in_vain or not policy.explicit):
        if in_vain and not policy.explicit:
            return None, ""
        return None, (
            f"the worker store takes connections from any address, since {doubt}; give --store-peers the networks from "
            "which workers connect, as in 10.0.0.0/8, or any"
        )
    members = itertools.chain.from_iterable(each.addresses for each in told) if policy.members else ()
    link = (_LINK_LOCAL,) if address.lower().startswith("fe80:") else ()
    peers = [*_LOOPBACK, *(own or ()), *policy.networks, *filter(_is_network, members), *link]
    if not (policy.members and doubt):
        return peers, ""
    return peers, (
        f"the worker store may refuse workers, since {doubt}; give --store-peers the networks from which they connect "
        "too, as in members,10.0.0.0/8"
    )
