"""Whom a control plane without a secret serves, by the user at the other end of a connection.

Laws:

1. On its own machine it serves its own user and root; any other user is refused before anything else happens.
2. Commands, which end or change a job, are taken from these only. A node on another machine may do so if it is the
   job's (`JobState.is_stranger`).
3. Where the kernel cannot be asked whose a connection is, nobody counts as this user; that is logged once.
"""

from __future__ import annotations

import socket
from enum import Enum, auto
from errno import ENOTCONN

from rallypoint.base.endpoint import is_loopback, unmapped_address
from rallypoint.base.log import get_logger
from rallypoint.base.peer_user import NOT_HERE, is_own_user, peer_user

log = get_logger(__name__)


class Peer(Enum):
    """Who is at the other end of a connection."""

    OWN_USER = auto()
    """A process of this machine, of our own user or of root."""
    OTHER_USER = auto()
    """A process of this machine, of another user; or a connection of this machine that no process holds any more."""
    REMOTE = auto()
    """A process of another machine, or of another network namespace of this one."""
    UNKNOWN = auto()
    """Somebody: the kernel cannot be asked."""


OTHER_USER_REFUSED = (
    "without a secret, this control plane serves only its own user and root on its machine, and this is another user; "
    "give all nodes and commands of the job the same RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)"
)

COMMAND_REFUSED = (
    "without a secret, commands are taken only from the user of the control plane (or root) on its own machine; give "
    "the job a RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one), or start its control plane with "
    "remote_control=true in --rdzv-conf"
)

STRANGER_REFUSED = (
    "without a secret, a job is ended or changed only from machines that host its nodes; give all nodes of the job the "
    "same RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)"
)


class PeerAccess:
    """Finds out who is at the other end of a server's connections."""

    def __init__(self) -> None:
        self._own_addresses: frozenset[str] | None = None
        self._warned = False

    def peer_of(self, connected: socket.socket) -> Peer:
        """Who is at the other end."""
        try:
            own, peer = (unmapped_address(str(name()[0])) for name in (connected.getsockname, connected.getpeername))
            if not is_loopback(own) and own != peer and peer not in self._addresses_here():
                return Peer.REMOTE
            uid = peer_user(connected)
        except OSError as error:
            return Peer.OTHER_USER if error.errno == ENOTCONN else self._unknown(error)
        if uid == NOT_HERE:
            return Peer.OTHER_USER if is_loopback(own) else Peer.REMOTE
        return Peer.OWN_USER if is_own_user(uid) else Peer.OTHER_USER

    def _addresses_here(self) -> frozenset[str]:
        """The addresses of this machine. One that it gets later, and that no connection shows, counts as another's:
        that is less than a user here may do, and not more than one elsewhere may.
        """
        if self._own_addresses is None:
            from rallypoint.base.interfaces import interfaces

            try:
                found = interfaces()
            except OSError:
                found = []
            self._own_addresses = frozenset(address for each in found for address in each.addresses)
        return self._own_addresses

    def _unknown(self, error: Exception) -> Peer:
        if not self._warned:
            self._warned = True
            log.warning(
                "which user a connection comes from cannot be found out here (%s), so commands to this control plane "
                "are refused; give the job a RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)",
                error,
            )
        return Peer.UNKNOWN
