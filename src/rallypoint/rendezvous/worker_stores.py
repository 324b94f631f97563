"""Supplies each round's worker store. Each round gets a new store, so that no round can read an earlier one's keys.

The backend and the environment choose where it is: in the agent, on a port that the kernel chooses (the default), at
the rendezvous endpoint itself (static), or in a worker (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, contract section 2.1).
"""

from __future__ import annotations

from rallypoint.base.endpoint import free_port, is_loopback, listening_address
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.store.server import StoreServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rallypoint.control.coordinator.store_peers import PeerPolicy
    from rallypoint.control.protocol.messages import StorePeers

log = get_logger(__name__)

_MIN_CONNECTIONS = 256
"""Number of clients for which every process has enough descriptors."""


class StoreAccess:
    """The peers that may connect to this node's stores, round by round."""

    def __init__(self, policy: PeerPolicy) -> None:
        self._policy = policy
        self._warned = ""

    @property
    def is_guarded(self) -> bool:
        """Whether access is restricted."""
        return self._policy.members or bool(self._policy.networks)

    def own_addresses(self) -> tuple[str, ...] | None:
        """The addresses of this machine's interfaces; None if they cannot be listed."""
        from rallypoint.base.netlink import interface_addresses

        return interface_addresses()

    def peers(self, notifications: Sequence[StorePeers], address: str) -> list[str] | None:
        """Peers that may connect to the next round's store at `address`; None for all, which is logged once with the
        reason.

        Args:
            notifications: the list from the coordinator.
            address: the address that workers use for the store.
        """
        from rallypoint.control.coordinator.store_peers import peers_of

        peers, warning = peers_of(self._policy, notifications, self.own_addresses(), address)
        if warning and not self._warned:
            self._warned = warning
            log.warning("%s", warning)
        return peers


class WorkerStoreSupply:
    """A node's supply of worker stores: prepare, begin, round_ended, prepare, begin, round_ended, ..., close."""

    hosted_by_agent = True
    """Whether an agent serves the workers' store."""
    _access: StoreAccess | None = None
    """Peers that may connect to the store; None for all."""

    def prepare(self, address: str) -> tuple[str, int]:
        """Prepare a store for the next round; reuse one that was prepared but not used.

        Args:
            address: this node's address on the way to the control plane.

        Returns:
            Its address (empty: that of this node's control connection) and port.
        """
        raise NotImplementedError

    def round_ended(self) -> None:
        """Note that the round ended before the next one was requested; workers might still be running. Never waits."""

    def discard_prepared(self) -> None:
        """Discard the prepared store, which might have been used in a round that this node never began."""

    def own_addresses(self) -> tuple[str, ...] | None:
        """Addresses from which this node's workers might connect to another node's store; None if unknown."""
        return None if self._access is None else self._access.own_addresses()

    def set_peers(self, notifications: Sequence[StorePeers]) -> None:
        """Serve the next round's store, which this node hosts, to the members that the coordinator listed.

        Called on any thread, before other nodes can know about the round.
        """

    def begin_round(self, *, is_host: bool, clients: int) -> None:
        """Begin the round: release the previous store and, unless this node hosts the round's store, the prepared one.

        Args:
            is_host: whether this node hosts the round's store.
            clients: number of connections to the host, from the round's workers and agents, including those to its
                coordinator.
        """

    def close(self) -> None:
        """Release everything. Idempotent."""


def allow_connections(clients: int) -> None:
    """Permit this many connections to this process, and warn if that is impossible."""
    if clients > _MIN_CONNECTIONS:
        from rallypoint.base.descriptors import allow_descriptors

        allow_descriptors(clients, f"The {clients} connections of this job's workers and agents")


class AgentStoreSupply(WorkerStoreSupply):
    """The agent's own server for each round, at one address of this node and a port that the kernel chooses."""

    def __init__(self, address: str = "", *, only_here: bool = False, peers: PeerPolicy | None = None) -> None:
        """Prepare; creates nothing yet.

        Args:
            address: this node's address as set by the user; if empty, it comes from the control connection.
            only_here: whether all workers of the job are on this machine.
            peers: the peers that may connect; None for all.
        """
        self._address = address
        self._loopback_only = only_here
        self._access = None if peers is None else StoreAccess(peers)
        self._prepared: StoreServer | None = None
        self._told: Sequence[StorePeers] = ()
        self._current: StoreServer | None = None

    def set_peers(self, notifications: Sequence[StorePeers]) -> None:
        try:
            self._serve(notifications)
        except OSError as error:
            log.warning("the worker store cannot serve yet: %s", error)  # retried when the round begins

    def _serve(self, notifications: Sequence[StorePeers]) -> None:
        """Start to serve the prepared store. Raises OSError if no thread is available."""
        server, self._told = self._prepared, notifications
        if server is not None:
            access = None if is_loopback(server.host) else self._access
            server.set_peers(None if access is None else access.peers(notifications, self._address or server.host))

    def prepare(self, address: str) -> tuple[str, int]:
        """See the base class. The store only listens: one node of a round serves, and the coordinator decides which."""
        if self._prepared is None:
            own_user = self._access is None or self._access.is_guarded
            self._prepared = StoreServer(self._listens_at(address), own_user=own_user, held=True)
        return self._address, self._prepared.port

    def _listens_at(self, address: str) -> str:
        if self._address:
            return listening_address(self._address, only_here=self._loopback_only)
        return address if self._loopback_only or not is_loopback(address) else ""

    def discard_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None

    def begin_round(self, *, is_host: bool, clients: int) -> None:
        previous, self._current = self._current, None
        if previous is not None:
            previous.close()
        if is_host:
            if self._prepared is not None and self._prepared.is_held:
                self._serve(self._told)
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
    """No server in the agent: the worker with rank 0 opens torch's own, on a port that was free a moment ago."""

    hosted_by_agent = False

    def __init__(self, address: str = "") -> None:
        self._address = address

    def prepare(self, address: str) -> tuple[str, int]:
        return self._address, free_port()
