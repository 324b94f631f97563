"""One node's supply of worker stores, kept like `worker_stores.AgentStoreSupply`: ports instead of servers."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.control.coordinator.store_peers import PeerPolicy, peers_of
from rallypoint.control.protocol.messages import StorePeers
from rallypoint.rendezvous.worker_stores import WorkerStoreSupply
from tests.sim.world import World


class Stores(WorkerStoreSupply):
    """Each store has a port that no other store of the job has had."""

    def __init__(self, world: World, node: int) -> None:
        self._world = world
        self.worker_address = f"192.168.{node >> 8}.{node & 255}"
        """From where this node's workers come: another interface than the one towards the control plane."""
        self.prepared = 0
        self.current = 0

    def prepare(self, address: str) -> tuple[str, int]:
        """Have a store ready for the round to come."""
        if not self.prepared:
            self._world.ports += 1
            self.prepared = self._world.ports
        return "", self.prepared

    def own_addresses(self) -> tuple[str, ...]:
        """From where this node's workers may connect to a store of another's."""
        return (self.worker_address,)

    def set_peers(self, told: Sequence[StorePeers]) -> None:
        """Serve what is prepared to whom it belongs."""
        self._world.admitted[self.prepared] = peers_of(PeerPolicy(), told, self.own_addresses(), "")[0]

    def discard_prepared(self) -> None:
        """What was prepared may have been used: prepare another."""
        self.prepared = 0

    def begin_round(self, *, is_host: bool, clients: int) -> None:
        """The round has begun: the store before goes."""
        self.current = self.prepared if is_host else 0
        self.prepared = 0

    def close(self) -> None:
        """Let go of all."""
        self.prepared = self.current = 0
