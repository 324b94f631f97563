"""Peers that may connect to a round's worker store: its members, if their addresses are known (decision 28). Pure.

Every node sends its interfaces' addresses when it joins; the coordinator sees its session's source address. The store's
host gets all of them before its placement. Laws:

1. No peer is refused on a guess. If an address is uncertain, and no stricter policy was requested, all may connect, and
   a log line says why.
2. The host's own machine may always connect.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.endpoint import is_loopback
from rallypoint.base.errors import UsageError, UserError
from rallypoint.control.membership.state import NodeId, State, name_of
from rallypoint.control.protocol.messages import StorePeers
from rallypoint.store.transport import network

if TYPE_CHECKING:
    from rallypoint.control.coordinator.sessions import SessionRecord, SessionRegistry

_LOOPBACK = ("127.0.0.0/8", "::1")
_LINK_LOCAL = "fe80::/10"
_PART = 1000
"""Maximum number of addresses per message."""
_MAX_ADDRESSES = 128 * 1024
"""Maximum number of members' addresses sent to the host."""


class PeerPolicy(NamedTuple):
    """The value of `--store-peers`: whether members may connect, which networks may, and whether the flag was set.
    Without members and networks, all may connect."""

    members: bool = True
    networks: tuple[str, ...] = ()
    explicit: bool = False


def parse_policy(text: str) -> PeerPolicy:
    """Parse `members`, `any`, or comma-separated addresses and networks, which may include `members`.

    Args:
        text: the value from the user; empty for the default.

    Raises:
        UsageError: a part is invalid.
    """
    if not text:
        return PeerPolicy()
    parts = [part.strip() for part in text.split(",")]
    if parts == ["any"]:
        return PeerPolicy(members=False, explicit=True)
    networks = tuple(part for part in parts if part != "members")
    for part in networks:
        try:
            network(part)
        except UserError as error:
            raise UsageError(f"{error}, or use members, or any alone") from None
    return PeerPolicy("members" in parts, networks, explicit=True)


def peers_notification(state: State, sessions: SessionRegistry) -> list[StorePeers]:
    """The notification to the host of a complete round's store; empty if no member sent addresses."""
    known: dict[str, None] = {}
    doubt, some = "", False
    for node, participant in state.participants.items():
        session = sessions.find(node)
        if session is not None:
            some = some or session.addresses is not None
            known.update(dict.fromkeys(session.addresses or ()))  # validated addresses, like all messages of nodes
            shown = (address.partition("%")[0] for address in (session.address, session.observed_address))
            known.update((address, None) for address in shown if address not in known and _is_network(address))
        doubt = doubt or _why_uncertain(state, node, session, is_host=participant.rank == 0)
    if not some:
        return []
    addresses = [address for address in known if not is_loopback(address)]
    if len(addresses) > _MAX_ADDRESSES:
        doubt = f"its members have {len(addresses)} addresses, more than the {_MAX_ADDRESSES} that a store accepts"
        addresses = []
    starts = range(0, max(1, len(addresses)), _PART)
    return [
        StorePeers(tuple(addresses[at : at + _PART]), is_first_part=at == 0, reason_unrestricted=doubt) for at in starts
    ]


def _why_uncertain(state: State, node: NodeId, session: SessionRecord | None, *, is_host: bool) -> str:
    """Why a member's addresses might differ from those that it sent; empty if they do not."""
    if session is None or (session.addresses is None and not is_host):
        return f"the addresses of {name_of(state, node)} are not known"
    seen, own = (address.partition("%")[0] for address in (session.observed_address, session.address))
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
    policy: PeerPolicy, notifications: Sequence[StorePeers], own: Sequence[str] | None, address: str
) -> tuple[list[str] | None, str]:
    """Decide which peers may connect (None for all), and the warning to log (empty for none).

    Args:
        policy: the policy of this node, which hosts the store.
        notifications: the addresses from the coordinator; empty if they are unknown.
        own: the addresses of this machine; None if they are unknown.
        address: the address that the workers use for the store.
    """
    if not policy.members and not policy.networks:
        return None, ""
    doubt = next(
        (notification.reason_unrestricted for notification in notifications if notification.reason_unrestricted), ""
    )
    doubt = doubt or ("" if notifications else "this backend does not report the members' addresses")
    doubt = doubt or ("" if own is not None else "this machine's own addresses cannot be listed")
    in_vain = not notifications and not policy.networks  # these alone would permit no other member's worker
    if policy.members and doubt and (in_vain or not policy.explicit):
        if in_vain and not policy.explicit:
            return None, ""
        return None, (
            f"the worker store accepts connections from any address, because {doubt}; set --store-peers to the "
            "networks from which workers connect, such as 10.0.0.0/8, or to any"
        )
    members = (
        itertools.chain.from_iterable(notification.addresses for notification in notifications)
        if policy.members
        else ()
    )
    link = (_LINK_LOCAL,) if address.lower().startswith("fe80:") else ()
    peers = [*_LOOPBACK, *(own or ()), *policy.networks, *filter(_is_network, members), *link]
    if not (policy.members and doubt):
        return peers, ""
    return peers, (
        f"the worker store might refuse workers, because {doubt}; add the networks from which they connect to "
        "--store-peers, as in members,10.0.0.0/8"
    )
