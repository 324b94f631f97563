"""The interface between an agent and any rendezvous (contract section 4.1), and ours, which notifies the agent.

Third parties implement `RendezvousHandler`, which is polled. `ElasticHandler` (in `elastic`) adds notifications for our
agent.

The registry maps backend names to creators. A name costs nothing until it is used. Our creators are strings like
`module:factory`. Other packages add theirs with `register` or an entry point in the group `torchrun.handlers` (contract
section 1.11), which is consulted only for names that are not registered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rallypoint.base.errors import UserError
from rallypoint.base.light_dataclasses import dataclass
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.base.plugins import entry_point, entry_point_names, load
from rallypoint.rendezvous.params import BACKENDS, RendezvousParameters

if TYPE_CHECKING:
    from rallypoint.store.api import Store


log = get_logger(__name__)


@dataclass(frozen=True)
class RendezvousStoreInfo:
    """Where a round's worker store listens."""

    MASTER_ADDR_KEY = "MASTER_ADDR"
    MASTER_PORT_KEY = "MASTER_PORT"

    master_addr: str
    master_port: int

    @staticmethod
    def build(rank: int, store: Store, local_addr: str | None, server_port: int | None = None) -> RendezvousStoreInfo:
        """Agree on the address through a store, for handlers whose rounds do not include it (contract section 4.1).

        Args:
            rank: this node's group rank; rank 0 sets the address, all others wait for it.
            store: the round's own store.
            local_addr: this node's address for others; by default its full host name.
            server_port: the port on which rank 0 is already listening; by default a free port.
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
    """The result of a rendezvous. The store is created on first use, because our own rounds do not need it."""

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
        """The number of nodes in the round."""
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
        """Name under which the handler was registered."""

    @property
    def use_agent_store(self) -> bool:
        """Whether `bootstrap_store_info` points to a live store that workers may use."""
        return False

    @abstractmethod
    def next_rendezvous(self) -> RendezvousInfo:
        """Block until a round that includes this node is complete.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousTimeoutError: the join deadline passed.
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
        """How many nodes are waiting for the next round."""

    @abstractmethod
    def get_run_id(self) -> str:
        """The job's id."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release everything. Returns whether this succeeded."""


RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]

ENTRY_POINT_GROUP = "torchrun.handlers"


class RendezvousHandlerRegistry:
    """Backend names and their creators."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator | str] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator | str) -> None:
        """Register a backend.

        Args:
            backend: its name.
            creator: creates a handler from parameters; or `module:factory`, imported on first use.

        Raises:
            UserError: the name is empty, or belongs to another creator.
        """
        if not backend:
            raise UserError("the name of a rendezvous backend must not be empty")
        if self._creators.get(backend, creator) != creator:
            raise UserError(f"the rendezvous backend {backend!r} is already registered with another creator")
        self._creators[backend] = creator

    def find(self, backend: str) -> RendezvousHandlerCreator | str:
        """Return the creator of a backend's handlers; one from an installed package is loaded once.

        Raises:
            UserError: the backend is unknown.
        """
        creator = self._creators.get(backend) or _plugin(backend)
        if creator is None:
            raise UserError(f"rendezvous backend {backend!r} is unknown; choose one of {', '.join(self.names())}")
        self._creators[backend] = creator
        return creator

    def names(self) -> tuple[str, ...]:
        """Known backends, including those of installed packages."""
        return tuple(sorted({*self._creators, *entry_point_names(ENTRY_POINT_GROUP)}))

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Create a handler for the backend in `params`.

        Raises:
            UserError: the backend is unknown, or its parameters cannot work.
            RuntimeError: the handler reports a different name.
        """
        creator = self.find(params.backend)
        if isinstance(creator, str):
            creator = load(creator)
        handler: RendezvousHandler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the handler created for the rendezvous backend {params.backend!r} reports the name "
                f"{handler.get_backend()!r}"
            )
        return handler


def _plugin(backend: str) -> RendezvousHandlerCreator | None:
    """Load the creator with this name from an installed package; a broken plug-in causes only a warning."""
    try:
        offer = entry_point(ENTRY_POINT_GROUP, backend)
        creator: RendezvousHandlerCreator | None = None if offer is None else offer()
    except Exception:
        log.warning("the rendezvous plug-in %r cannot be loaded", backend, exc_info=True)
        return None
    return creator


rendezvous_handler_registry = RendezvousHandlerRegistry()
for _name, _backend in BACKENDS.items():
    rendezvous_handler_registry.register(_name, _backend.creator)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a handler from the shared registry. See `RendezvousHandlerRegistry.create_handler`."""
    return rendezvous_handler_registry.create_handler(params)


FIRST_PROGRESS_REQUEST, MAX_PROGRESS_INTERVAL = 2.0, 60.0
"""Seconds until a waiting node first asks for the progress, and the maximum interval after that. Each interval is twice
the previous one: a spare that waits for days must not fill the log."""


class LocalJob(NamedTuple):
    """An agent's description of its job for commands on its machine, in terms of `--rdzv-backend` and the like.

    `script` is the base name of the workers' script. `began` is the agent's start in seconds since 1970; together with
    the pid, it identifies the agent on the machine. `user` is the agent's uid, as its socket shows it.
    """

    pid: int
    job: str
    backend: str
    endpoint: str
    script: str = ""
    began: float = 0.0
    user: int = -1
