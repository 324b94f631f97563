"""Whom a control plane without a secret serves, by the user at the other end of a connection.

Laws:

1. On its own machine it serves its own user and root; any other user is refused before anything else happens.
2. Commands, which end or change a job, are taken from these only. A node on another machine may do so if it is the
   job's (`Coordinator.is_stranger`).
3. Where the kernel cannot be asked whose a connection is, nobody counts as this user; that is logged once.
"""

from __future__ import annotations

from rallypoint.base.log import get_logger
from rallypoint.base.peer_user import Peer, PeerUsers, SocketName

log = get_logger(__name__)


OTHER_USER_REFUSED = (
    "without a secret, this control plane serves only its own user and root on its machine, and this is another user; "
    "give all nodes and commands of the job the same RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)"
)

COMMAND_REFUSED = (
    "without a secret, commands are taken only from the user of the control plane (or root) on its own machine; give "
    "the job a RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one), or start its control plane with "
    "remote_control=true in --rdzv-conf"
)


class PeerAccess:
    """Finds out who is at the other end of a server's connections."""

    def __init__(self) -> None:
        self._users = PeerUsers()
        self._warned = False

    def peer_between(self, own: SocketName, peer_name: SocketName) -> Peer:
        """Who is at the other end, by the names of both ends."""
        peer = self._users.peer_between(own, peer_name)
        if peer is Peer.UNKNOWN and not self._warned:
            self._warned = True
            log.warning(
                "which user a connection comes from cannot be found out here, so commands to this control plane are "
                "refused; give the job a RALLYPOINT_SECRET_FILE (`rallyctl secret` makes one)"
            )
        return peer
