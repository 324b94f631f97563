"""The interface between an agent and any rendezvous (contract section 4.1), and ours, which also notifies the agent.

`RendezvousHandler` is what a third party implements: it is polled. `ElasticHandler` (in `elastic`) adds what our agent
needs to be notified at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rallypoint.base.light_dataclasses import dataclass
from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.store.api import Store


@dataclass(frozen=True)
class RendezvousStoreInfo:
    """Where the worker store of a round listens."""

    MASTER_ADDR_KEY = "MASTER_ADDR"
    MASTER_PORT_KEY = "MASTER_PORT"

    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: Store, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Agree on the address over a store, for handlers whose rounds do not carry it (contract section 4.1).

        Args:
            rank: this node's group rank; rank 0 sets the address, all others wait for it.
            store: the round's own store.
            local_addr: this node's address as others reach it; its full host name if not given.
            server_port: the port on which rank 0 already listens; else a free port is chosen.
        """
        import socket

        from rallypoint.base.endpoint import free_port

        if rank == 0:
            port = free_port() if server_port is None else server_port
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, local_addr or socket.getfqdn())
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(port))
        addr = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        port = int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY).decode())
        return RendezvousStoreInfo(addr, port)


class RendezvousInfo:
    """The result of a rendezvous. The store is created on first use: a round of ours does not need it."""

    def __init__(
        self,
        store: Store | Callable[[], Store],
        rank: int,
        world_size: int,
        bootstrap_store_info: RendezvousStoreInfo | None,
    ) -> None:
        self._store = store
        self.rank = rank
        """This node's group rank."""
        self.world_size = world_size
        """How many nodes take part."""
        self.bootstrap_store_info = bootstrap_store_info
        """Where workers find their store, if the handler knows."""

    @property
    def store(self) -> Store:
        """The round's own store."""
        if callable(self._store):
            self._store = self._store()
        return self._store


class RendezvousHandler(ABC):
    """Takes part in a rendezvous for an agent."""

    @abstractmethod
    def get_backend(self) -> str:
        """The name that the handler was registered under."""

    @property
    def use_agent_store(self) -> bool:
        """Whether `bootstrap_store_info` points to a live store that workers may use."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Block until a round is complete with this node in it.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousTimeoutError: the join deadline has passed.
            RendezvousConnectionError: the control plane cannot be reached.
            RendezvousStateError: the shared state is damaged.
            RendezvousGracefulExitError: this node was a spare, and the job has ended.
        """

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the job is known to have ended."""

    @abstractmethod
    def set_closed(self) -> None:
        """End the job on all nodes."""

    @abstractmethod
    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next round."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The job's id."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release everything. Returns whether that went well."""
