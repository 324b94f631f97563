"""`static`: the user sets the ranks, and the workers' store is at the endpoint itself (contract section 4.9).

The node with rank 0 listens on `master_addr:master_port`. Workers use the TCPStore protocol there, as they expect.
Agents use the control protocol on the same port, and so learn about failures, unlike torch's static agents. A
connection's first byte distinguishes the two. Each round has a new store behind the same port.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rallypoint.base.clock import Deadline
from rallypoint.base.descriptors import allow_nodes
from rallypoint.base.endpoint import (
    Endpoint,
    host_name,
    is_loopback,
    is_own_unknown_name,
    is_this_machine,
    parse_endpoint,
)
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.loop import shared_loop
from rallypoint.control.coordinator.dispatcher import Dispatcher, LocalLink
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.membership.state import Settings
from rallypoint.control.protocol.errors import RendezvousConnectionError
from rallypoint.control.protocol.messages import Deliver, Link
from rallypoint.rendezvous.backends.options import (
    accepted_keys,
    control_listeners,
    control_tls,
    endpoint_words,
    job_key,
    rank_hint,
    refuse_unknown_port,
    settings_of,
    store_peers,
)
from rallypoint.rendezvous.elastic import ControlPlane, ElasticHandler, own_node
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.worker_stores import StoreAccess, WorkerStoreSupply, allow_connections
from rallypoint.store.server import RoundStores
from rallypoint.store.transport import StoreGuard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rallypoint.control.client.dialing import DialTarget
    from rallypoint.control.protocol.messages import StorePeers
    from rallypoint.rendezvous.backends.rank_zero import EndpointCheck

_log = get_logger(__name__)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for `static`, which always waits for `max_nodes`. Opens nothing before the first join.

    Raises:
        UserError: no rank, a rank beyond the number of nodes, no port, or an option that cannot work.
    """
    endpoint = parse_endpoint(params.endpoint, None)
    rank = rank_hint(params)
    if rank is None:
        raise UserError("a static rendezvous needs this node's rank; set --node-rank (rdzv option rank)")
    if rank >= params.max_nodes:
        raise UserError(
            f"--node-rank {rank} is out of range with --nnodes={params.max_nodes}; use 0 to {params.max_nodes - 1}"
        )
    refuse_unknown_port(params, endpoint)
    everyone = RendezvousParameters(
        params.backend, params.endpoint, params.run_id, params.max_nodes, params.max_nodes, **params.config
    )
    settings = settings_of(everyone, join_timeout_key="timeout", fixed_ranks=True)
    master = _StaticEndpoint(params, endpoint, settings, rank)
    return ElasticHandler(params.backend, master, master)


class _StaticEndpoint(ControlPlane, WorkerStoreSupply):
    """The endpoint of a static job: on rank 0 the server of both protocols, elsewhere only an address."""

    def __init__(self, params: RendezvousParameters, endpoint: Endpoint, settings: Settings, rank: int) -> None:
        # The default is a loopback address, which does not show where the other nodes are.
        only_here = is_loopback(endpoint.host) and params.endpoint_given
        super().__init__(settings, endpoint_words(endpoint, only_here), params.endpoint_flag, rank)
        self._endpoint = endpoint
        self._workers_host = endpoint.host
        self._rank = rank
        self._tls = control_tls(params.config)
        self._listeners = partial(control_listeners, params, [endpoint.host], endpoint.port, only_here=only_here)
        peers = store_peers(params, only_here=only_here or params.max_nodes == 1)
        self._access = None if peers is None else StoreAccess(peers)
        self._endpoint_check: EndpointCheck | None = None
        self._stores: RoundStores | None = None
        self._server: ControlServer | None = None
        self._dispatcher: Dispatcher | None = None

    # The control plane

    def coordinator(self) -> Dispatcher | None:
        """The coordinator, if this is rank 0."""
        return self._dispatcher

    def watch_endpoint(self) -> str | None:
        """The endpoint."""
        return str(self._endpoint)

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        """Serve the endpoint if this is rank 0, and connect."""
        if self._rank != 0:
            from rallypoint.control.client.tcp_link import TcpLink
            from rallypoint.rendezvous.backends.rank_zero import RankZeroResolver

            return TcpLink(
                RankZeroResolver(self._dial_target(), self._rank), self.settings, own_node(), deliver, deadline
            )
        try:
            listeners = self._listeners()
        except OSError as error:
            port = self.endpoint_flag.replace("addr", "port").replace("ADDR", "PORT")
            raise RendezvousConnectionError(
                f"node rank 0 cannot listen at {self._endpoint}: {error.strerror}; set {port} to a free port, or, if "
                "rank 0 of this job is already running on this machine, set a different --node-rank on this node"
            ) from None
        allow_nodes(self.settings.max_nodes)
        self._dispatcher = dispatcher = Dispatcher(self.settings)
        # No worker can connect before this node has its placement and the peers.
        guarded = self._access is not None and self._access.is_guarded
        own_user = self._access is None or guarded
        self._stores = RoundStores(StoreGuard(peers=()) if guarded else None, own_user=own_user)
        self._server = ControlServer(
            dispatcher, listeners, keys=accepted_keys(), tls=self._tls, fallback=self._stores.add_connection
        )
        if self.settings.max_nodes == 1 and is_own_unknown_name(self._endpoint.host):
            self._workers_host = "127.0.0.1"
            _log.warning(
                "workers get MASTER_ADDR=127.0.0.1: %s, this machine's own name, does not resolve", host_name()
            )
        self._endpoint = Endpoint(self._endpoint.host, self._server.port)
        if not is_this_machine(self._endpoint.host, ask=False):
            self._begin_check(dispatcher, deliver)
        return LocalLink(dispatcher, own_node(self._endpoint.host), deliver, self._endpoint.host)

    def _dial_target(self) -> DialTarget:
        from rallypoint.control.client.dialing import DialTarget

        return DialTarget(self._endpoint, job_key(self.settings.run_id), self._tls, self.endpoint_flag)

    def _begin_check(self, dispatcher: Dispatcher, deliver: Deliver) -> None:
        from rallypoint.rendezvous.backends.rank_zero import EndpointCheck

        self._endpoint_check = EndpointCheck(self._dial_target(), dispatcher, deliver)
        shared_loop().call(self._endpoint_check.start)

    def hosts_coordinator(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def close(self) -> None:
        """Disconnect all workers, and end the server if this node hosts it."""
        if self._stores is not None:
            self._stores.close()
        if self._endpoint_check is not None:
            shared_loop().call(self._endpoint_check.stop)
        if self._server is not None:
            self._server.close(why=f"{host_name()}, which hosted it, left the job")

    # The workers' store: see `worker_stores.WorkerStoreSupply`

    def set_peers(self, notifications: Sequence[StorePeers]) -> None:
        """Apply the peers once the round is complete."""
        if self._stores is not None and self._access is not None:
            self._stores.set_peers(self._access.peers(notifications, self._endpoint.host))

    def prepare(self, address: str) -> tuple[str, int]:
        """Return the endpoint as written, to which a static job's workers connect unless none could."""
        return self._workers_host, self._endpoint.port

    def round_ended(self) -> None:
        """Put a new store behind the port. No node can be notified of the next round earlier, since that round needs
        this node."""
        if self._stores is not None:
            self._stores.next_round()

    def begin_round(self, *, is_host: bool, clients: int) -> None:
        """Disconnect the previous store's remaining clients: the previous round's workers are gone."""
        if self._stores is not None:
            allow_connections(clients)
            self._stores.end_previous()
