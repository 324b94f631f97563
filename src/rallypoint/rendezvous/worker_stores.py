"""Where the worker store of a round comes from. A round's store is new: no key of one round can be read in the next.

Three ways, chosen by the backend and the environment: hosted by the agent on a port of the kernel's choice (the
default), at the rendezvous endpoint itself (static), or left to the workers (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`,
contract section 2.1).
"""

from __future__ import annotations

from rallypoint.base.endpoint import free_port, is_loopback, listening_address
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.store.server import StoreServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rallypoint.coordinator.store_peers import PeerPolicy
    from rallypoint.protocol.messages import StorePeers

log = get_logger(__name__)

_MIN_CONNECTIONS = 256
"""Clients for whom every process has descriptors."""


class WorkerStoreSupply:
    """One node's supply of worker stores: prepare, begin, round_ended, prepare, begin, round_ended, ..., close."""

    hosted_by_agent = True
    """Whether an agent serves the store that workers are told of."""

    def prepare(self, address: str) -> tuple[str, int]:
        """Have a store ready for the round to come; one that was prepared and never used serves again.

        Args:
            address: of this node towards the control plane.

        Returns:
            Its address (empty: the one that this node's control connection shows) and port.
        """
        raise NotImplementedError

    def round_ended(self) -> None:
        """The round is over, and the next one has not been asked for yet; its workers may still run. Never waits."""

    def discard_prepared(self) -> None:
        """What was prepared may have been used in a round that this node never began: prepare another."""

    def own_addresses(self) -> tuple[str, ...] | None:
        """From where this node's workers may connect to a store of another's; None if that is not known."""
        return None

    def set_peers(self, told: Sequence[StorePeers]) -> None:
        """The next round's store is the one here: serve it to whom it belongs, by what the coordinator has told.

        Called from any thread, before other nodes can know of the round.
        """

    def begin_round(self, *, is_host: bool, clients: int) -> None:
        """The round has begun: the one before is over, and unless this node is its host what was prepared can go.

        Args:
            is_host: whether it is.
            clients: connections to its host: of the round's workers and agents, and to the coordinator if it is there.
        """

    def close(self) -> None:
        """Release everything. Idempotent."""


def allow_connections(clients: int) -> None:
    """See to it that so many can connect to this process, and say so where they cannot."""
    if clients > _MIN_CONNECTIONS:
        from rallypoint.base.descriptors import allow_descriptors

        allow_descriptors(clients, f"The {clients} connections of this job's workers and agents")


def own_addresses() -> tuple[str, ...] | None:
    """Those of this machine's interfaces; None if they cannot be listed."""
    from rallypoint.base.interfaces import interface_addresses

    return interface_addresses()


class StoreAccess:
    """Who is let in to this node's stores, round by round."""

    def __init__(self, policy: PeerPolicy) -> None:
        self._policy = policy
        self._warned = ""

    @property
    def guards(self) -> bool:
        """Whether not everybody is let in."""
        return self._policy.members or bool(self._policy.networks)

    def peers(self, told: Sequence[StorePeers], address: str) -> list[str] | None:
        """Who may connect to the store of the round to come, known by `address`; None for all. Says once why all may.

        Args:
            told: what the coordinator has told.
            address: by which workers know the store.
        """
        from rallypoint.coordinator.store_peers import peers_of

        peers, warning = peers_of(self._policy, told, own_addresses(), address)
        if warning and not self._warned:
            self._warned = warning
            log.warning("%s", warning)
        return peers


class AgentStoreSupply(WorkerStoreSupply):
    """A server of this agent's own for each round, at one address of this node and a port that the kernel picks."""

    def __init__(self, address: str = "", *, only_here: bool = False, peers: PeerPolicy | None = None) -> None:
        """Make nothing yet.

        Args:
            address: this node's, as the user gave it; empty if the control connection is to show it.
            only_here: whether all workers of the job are on this machine.
            peers: who may connect; None for whoever can reach it.
        """
        self._address = address
        self._loopback_only = only_here
        self._access = None if peers is None else StoreAccess(peers)
        self._prepared: StoreServer | None = None
        self._current: StoreServer | None = None

    def own_addresses(self) -> tuple[str, ...] | None:
        return None if self._access is None else own_addresses()

    def set_peers(self, told: Sequence[StorePeers]) -> None:
        server = self._prepared
        if server is not None and self._access is not None and not is_loopback(server.host):
            server.set_peers(self._access.peers(told, self._address or server.host))

    def prepare(self, address: str) -> tuple[str, int]:
        if self._prepared is None:
            where = listening_address(self._address or address, only_here=self._loopback_only)
            held = self._access is not None and self._access.guards and not is_loopback(where)
            self._prepared = StoreServer(where, held=held)
        return self._address, self._prepared.port

    def discard_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None

    def begin_round(self, *, is_host: bool, clients: int) -> None:
        previous, self._current = self._current, None
        if previous is not None:
            previous.close()
        if is_host:
            self._current, self._prepared = self._prepared, None
            allow_connections(clients)
        else:
            self.discard_prepared()

    def close(self) -> None:
        for server in (self._prepared, self._current):
            if server is not None:
                server.close()
        self._prepared = self._current = None


class WorkerHostedStores(WorkerStoreSupply):
    """No server here: the worker of rank 0 opens torch's own, on a port that was free a moment ago."""

    hosted_by_agent = False

    def __init__(self, address: str = "") -> None:
        self._address = address

    def prepare(self, address: str) -> tuple[str, int]:
        return self._address, free_port()
